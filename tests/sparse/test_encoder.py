"""HashEncoder: outputs, streams, names, files, pipelines; and what it refuses."""

import json
import pickle
import uuid

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import sklearn.base
import xxhash
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import SGDClassifier
from sklearn.pipeline import make_pipeline
from support.scripts import run_python
from support.sparse_tables import plain_codes

import keras_multigpu.sparse
from keras_multigpu.sparse import HashEncoder, collision_probability

pytestmark = pytest.mark.backend_free

CARDINALITIES = {"city": 1000, "age": 100, "member": 2}


def published(columns, **settings):
    return HashEncoder(columns, layout="published", **settings)


def table(rng, rows=500):
    return pd.DataFrame(
        {
            "city": [f"city {number}" for number in rng.integers(1000, size=rows)],
            "age": rng.integers(100, size=rows),
            "member": rng.random(rows) < 0.5,
        }
    )


def test_the_three_outputs(rng):
    frame = table(rng)
    encoder = published(CARDINALITIES)
    indices = encoder.transform(frame)
    texts = {name: frame[name].map(str) for name in frame}
    np.testing.assert_array_equal(indices, plain_codes(texts, CARDINALITIES))
    assert indices.shape == (500, 12) == (500, encoder.ones)
    assert (encoder.width, encoder.ones) == (128 + 40 + 32, 12)
    dense = encoder.transform(frame, output="dense")
    expected = np.zeros((500, encoder.width), "float32")
    for row, ones in enumerate(indices):
        expected[row, ones] = 1
    np.testing.assert_array_equal(dense, expected)
    assert dense.dtype == np.float32
    csr = encoder.transform(frame, output="csr")
    assert csr.has_canonical_format
    np.testing.assert_array_equal(csr.toarray(), dense)
    assert published(CARDINALITIES, output="csr").transform(frame).nnz == 12 * 500


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_threads_and_chunks_change_nothing(rng, splits):
    frame = table(rng)
    encoder = HashEncoder(CARDINALITIES, splits=splits)
    whole = encoder.transform(frame)
    threads = HashEncoder(CARDINALITIES, splits=splits, num_threads=2).transform(frame)
    np.testing.assert_array_equal(threads, whole)
    stream = encoder.stream()
    parts = [stream(frame[first : first + 64]) for first in range(0, 500, 64)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    arrow = pa.concat_tables([pa.Table.from_pandas(frame[:7]), pa.Table.from_pandas(frame[7:])])
    np.testing.assert_array_equal(encoder.transform(arrow), whole)
    np.testing.assert_array_equal(encoder.transform(pl.from_pandas(frame)), whole)


def test_explain(rng):
    encoder = published({"a:b": 100, "c": 10})
    names = encoder.get_feature_names_out()
    assert len(names) == len(set(names)) == encoder.width == 72
    for index, name in enumerate(names):
        place = encoder.explain(index)
        assert place.name == name
        assert encoder.explain(name) == index
        first = 0 if place.column == "a:b" else 40
        group = 10 if place.column == "a:b" else 8
        assert index == first + place.split * group + place.position
    assert encoder.explain(13) == ("a:b", 1, 3)


def test_json_and_files(tmp_path, rng):
    frame = table(rng, 20)
    encoder = HashEncoder(
        {"city": None, "age": 3}, splits=2, collision_probability=0.1, missing="", others="ignore"
    ).fit(frame)
    again = HashEncoder.from_json(encoder.to_json())
    assert again.fingerprint == encoder.fingerprint
    assert again.others == "ignore"
    encoder.save(tmp_path / "encoder.json")
    loaded = HashEncoder.load(tmp_path / "encoder.json")
    np.testing.assert_array_equal(loaded.transform(frame), encoder.transform(frame))
    assert json.loads(encoder.to_json())["columns"] == {**encoder.cardinalities_}


# Written when there was only the published layout.
OLD_FILE = """{
 "format": 1,
 "columns": {"city": 1000, "age": 50},
 "splits": 2,
 "collision_probability": 0.1,
 "missing": "?",
 "output": "indices",
 "others": "error",
 "num_threads": 1,
 "fingerprint": "ad2b1381ffc30d4a"
}"""
OLD_INDICES = [[345, 4182, 4423, 4469], [1682, 3108, 4418, 4495]]


def test_a_file_without_a_layout_is_the_published_one(tmp_path):
    (tmp_path / "old.json").write_text(OLD_FILE)
    old = HashEncoder.load(tmp_path / "old.json")
    rows = {"city": ["Rome", None], "age": [41, 7]}
    assert old.transform(rows).tolist() == OLD_INDICES
    assert old.layout == "published"
    again = HashEncoder.from_json(old.to_json())
    assert again.transform(rows).tolist() == OLD_INDICES
    assert again.fingerprint == "ad2b1381ffc30d4a"


def test_a_pickle_without_a_layout_is_the_published_one():
    new = published({"x": 1000}, missing_values="empty fields")
    state = {name: value for name, value in vars(new).items() if name not in ("layout", "buckets")}
    old = HashEncoder.__new__(HashEncoder)
    old.__setstate__(state)
    assert old.set_params(splits=4).fingerprint == new.fingerprint
    new.set_params(missing_values=["NA"])
    for encoder in (new, HashEncoder({"x": 1000}, buckets=2)):
        assert pickle.loads(pickle.dumps(encoder)).get_params() == encoder.get_params()


def test_a_file_says_what_the_defaults_were():
    written = json.loads(HashEncoder({"x": 1000}).to_json())
    assert [written[name] for name in ("layout", "splits", "buckets")] == ["wide", 2, 8]
    written = json.loads(published({"x": 1000}).to_json())
    assert [written[name] for name in ("layout", "splits", "buckets")] == ["published", 4, None]


def test_the_wide_layout(rng):
    """Two groups, each a remainder of one half of the hash; the same in both ways to hash."""
    encoder = HashEncoder({"x": 1000, "y": 3})
    assert (encoder.width, encoder.ones) == (8 * 1000 + 2 * 32, 4)
    words = [f"value {number}" for number in rng.integers(1000, size=50)]
    found = encoder.transform({"x": words, "y": ["a"] * 50})
    digests = [xxhash.xxh64_intdigest(word.encode()) for word in words]
    expected = [[(one >> 32) % 4000, 4000 + (one & (2**32 - 1)) % 4000] for one in digests]
    assert found[:, :2].tolist() == expected
    assert HashEncoder({"x": 1000}, buckets=1.5, splits=1).width == 1500
    safe = HashEncoder({"x": 1000}, collision_probability=0.001)
    assert collision_probability(1000, safe.width // 2, 2) <= 0.001 < collision_probability(1000)


def test_values_of_the_wide_layout_can_have_weights_of_their_own():
    """A linear model of n values has rank n; of the published code, as many as the row is wide."""
    words = {"x": [f"value {number}" for number in range(400)]}
    rows = {
        layout: HashEncoder({"x": 400}, layout=layout).transform(words, output="dense")
        for layout in ("wide", "published")
    }
    assert np.linalg.matrix_rank(rows["wide"]) >= 0.95 * 400
    assert np.linalg.matrix_rank(rows["published"]) <= 80


def test_fingerprints():
    first = published({"x": 100, "y": 50})
    same = [
        published({"x": 99, "y": 50}, output="csr", num_threads=2),
        published(first.columns, splits=4),
    ]
    assert {one.fingerprint for one in same} == {first.fingerprint}
    others = [
        published({"y": 50, "x": 100}),
        published({"x": 101, "y": 50}),
        published({"x": 100, "z": 50}),
        published({"x": 100, "y": 50}, splits=2),
        published({"x": 100, "y": 50}, missing=""),
        HashEncoder({"x": 100, "y": 50}),
        HashEncoder({"x": 100, "y": 50}, splits=4),
        HashEncoder({"x": 100, "y": 50}, buckets=2),
    ]
    assert len({one.fingerprint for one in [first, *others]}) == 9
    assert first.fingerprint == "529c06fadc4930a3"
    first.set_params(missing_values="empty fields")
    assert first.fingerprint == "711a832bf516323c"  # as before there was a choice


# Estimated cardinalities, and scikit-learn.


def test_fit_estimates_what_was_not_given():
    numbers = np.arange(50_000)
    frame = pd.DataFrame({"x": numbers, "y": numbers % 100, "z": numbers % 7})
    encoder = HashEncoder({"x": None, "y": None, "z": 500})
    assert not encoder.is_ready
    stream = (frame[first : first + 9000] for first in range(0, 50_000, 9000))
    assert encoder.fit(stream) is encoder
    found = encoder.cardinalities_
    assert found["x"] == pytest.approx(50_000, rel=0.025)
    assert (found["y"], found["z"]) == (100, 500)
    assert list(encoder.feature_names_in_) == ["x", "y", "z"]
    whole = HashEncoder().fit(frame)
    assert list(whole.cardinalities_) == ["x", "y", "z"]
    assert whole.cardinalities_["x"] == found["x"]
    assert HashEncoder(["y"], others="ignore").fit(frame).cardinalities_ == {"y": 100}
    assert encoder.fit(frame[:10]).cardinalities_["x"] == 10


def test_fit_has_equal_texts_in_every_library():
    categories = pd.Categorical(["a", None, "b"], categories=["a", "b", "unused"])
    assert HashEncoder().fit({"x": categories}).cardinalities_ == {"x": 2}
    assert HashEncoder().fit({"x": ["a", "b", "b", None]}).cardinalities_ == {"x": 2}
    assert HashEncoder().fit({"x": pa.nulls(3)}).cardinalities_ == {"x": 1}


def test_in_a_pipeline(rng):
    frame = table(rng, 2000)
    y = frame["city"].map(len) + frame["member"] > 8
    encoder = HashEncoder({"city": None, "member": 2}, output="csr")
    columns = ColumnTransformer([("hash", encoder, ["city", "member"])])
    first = sklearn.base.clone(make_pipeline(columns, SGDClassifier(random_state=0)))
    assert first.fit(frame, y).score(frame, y) > 0.9
    plain = make_pipeline(encoder, SGDClassifier(random_state=0))
    plain.set_params(hashencoder__others="ignore").fit(frame, y)
    assert plain.score(frame, y) > 0.9
    assert plain[:-1].get_feature_names_out()[0] == "city:0:0"


def test_parameters_and_clones():
    encoder = HashEncoder({"x": 10}, splits=2)
    copy = sklearn.base.clone(encoder)
    assert copy.get_params() == encoder.get_params()
    assert copy.fingerprint == encoder.fingerprint
    assert copy.set_params(splits=4).ones == 4
    assert encoder.ones == 2
    assert eval(repr(encoder)).fingerprint == encoder.fingerprint
    np.testing.assert_array_equal(
        encoder.fit_transform({"x": ["a"]}), encoder.transform({"x": ["a"]})
    )


# What is refused.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": {"x": 0}}, r"columns\['x'\]` must be a positive integer.*columns\['x'\]=0"),
        ({"columns": {"x": -3}}, "positive integer.*=-3"),
        ({"columns": {"x": 2.0}}, "positive integer.*=2.0"),
        ({"columns": {"x": True}}, "positive integer.*=True"),
        ({"columns": {}}, r"dict from the names of columns.*columns=\{\}"),
        ({"columns": "city"}, "dict from the names.*columns='city'"),
        ({"columns": 3}, "dict from the names.*columns=3"),
        ({"columns": {3: 10}}, "must be strings.*the name 3"),
        ({"columns": ["x", "x"]}, r"must be different.*\['x', 'x'\]"),
        ({"splits": 3}, "`splits` must be 4.*splits=3"),
        ({"splits": True}, "splits=True"),
        ({"splits": 4.0}, "an integer, or None.* Received: splits=4.0"),
        ({"layout": "narrow"}, '`layout` must be "wide" or "published".*layout=\'narrow\''),
        ({"buckets": 0}, "`buckets` must be a positive number, the indices.*buckets=0"),
        ({"buckets": True}, "buckets=True"),
        ({"buckets": float("nan")}, "buckets=nan"),
        ({"layout": "published", "buckets": 4}, "leave `buckets` out. Received: buckets=4, lay"),
        ({"splits": "4"}, "splits='4'"),
        ({"collision_probability": 0}, "between 0 and 1.*collision_probability=0"),
        ({"collision_probability": 1.0}, "collision_probability=1.0"),
        ({"collision_probability": "low"}, "collision_probability='low'"),
        ({"missing": None}, "`missing` must be a string.*missing=None"),
        ({"output": "sparse"}, '`output` must be "indices", "csr" or "dense".*output=\'sparse\''),
        ({"output": None}, "output=None"),
        ({"others": "drop"}, '`others` must be "error" or "ignore".*others=\'drop\''),
        ({"num_threads": 0}, "`num_threads` must be a positive integer.*num_threads=0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        HashEncoder(**{"columns": {"x": 10}, **settings})


def test_too_wide():
    with pytest.raises(ValueError, match=r"splits=4 a group is at most 65536 wide.*width 65537"):
        published({"x": 65536**2 + 1})
    with pytest.raises(ValueError, match=r"splits=4 a group is at most 65536 wide.*width 65537"):
        HashEncoder({"x": 65537}, splits=4, buckets=4)
    with pytest.raises(ValueError, match="at most 65536 wide.*`collision_probability`"):
        published({"x": 10**9}, collision_probability=0.01)
    with pytest.raises(ValueError, match="splits=1 a group is at most 1073741824 wide"):
        published({"x": 10**6}, splits=1, collision_probability=0.01)
    columns = {f"x{number}": 2**32 for number in range(8192)}
    with pytest.raises(ValueError, match="at most 2147483647 of them.*need 2147483648"):
        published(columns)
    with pytest.raises(ValueError, match='need 2720000000. .*fewer `buckets`.*layout="published'):
        HashEncoder({"x": 17 * 10**7, "y": 17 * 10**7})


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"y": [1]}, ValueError, "columns 'x'. Received: a table with 'y'; missing: 'x'"),
        ({}, ValueError, "a table with no columns; missing: 'x'"),
        ({"x": [1], "z": [2]}, ValueError, "no others. Received: unknown columns 'z'.*others="),
        ({"x": []}, ValueError, "at least one row. Received: a table with no rows"),
        (pd.DataFrame([[1, 2]], columns=["x", "x"]), ValueError, "different names.*'x' more than"),
        ([1, 2], TypeError, r"A table must be.*table=\[1, 2\] \(of type builtins.list\)"),
        (pl.LazyFrame({"x": [1]}), TypeError, "A table must be.*Call `collect\\(\\)` on"),
        (None, TypeError, "table=None"),
        ("c.csv", TypeError, "table='c.csv'"),
        ({"x": [[1], [2]]}, TypeError, r"column 'x' of type list<item: int64>.*strings first"),
        (pl.DataFrame({"x": [[1]]}), TypeError, "column 'x' of type large_list"),
        ({"x": np.ones((2, 2))}, TypeError, r"one axis.*'x' of shape \(2, 2\)"),
        ({"x": "abc"}, TypeError, "a value for each row. Received: column 'x'='abc'"),
        ({"x": 3}, TypeError, "column 'x'=3. Put a single value into a list"),
        ({"x": [1, "a"]}, TypeError, "of one type.*'x' with values of type int, str"),
        ({"x": [1, 2.5]}, TypeError, "of one type.*values of type float, int. Cast it, to fl"),
        ({"x": [True, "a"]}, TypeError, "values of type bool, str"),
        ({"x": [2**70]}, TypeError, "'x' with values of type int: .*`.astype\\(str\\)`"),
        ({"x": ["\ud800"]}, TypeError, "surrogates not allowed"),
        ({"x": [object()]}, TypeError, "values of type object"),
        ({"x": np.array(["2020-01-01"], "M8[D]")}, TypeError, "'x' of type date32.*strings first"),
        ({"x": np.array([1 + 2j])}, TypeError, "values of type complex128"),
    ],
)
def test_bad_tables(bad, error, message):
    with pytest.raises(error, match=message):
        HashEncoder({"x": 10}).transform(bad)
    if isinstance(bad, dict) and "x" in bad:
        with pytest.raises(error, match=message):
            HashEncoder(["x"]).fit(bad)


@pytest.mark.parametrize("given", [3, "c.csv"])
def test_what_is_neither_a_table_nor_a_stream_of_them(given):
    with pytest.raises(TypeError, match=f"A table must be.*table={given!r} "):
        HashEncoder({"x": None}).fit(given)


def test_columns_of_different_length():
    with pytest.raises(ValueError, match=r"same number of rows. Received: \{'x': 1, 'y': 2\}"):
        HashEncoder({"x": 10, "y": 10}).transform({"x": [1], "y": [1, 2]})


def test_other_columns_can_be_ignored():
    encoder = published({"x": 10}, others="ignore")
    assert encoder.transform({"x": ["a"], "z": [[1]]}).tolist() == [[6, 9, 20, 27]]


def test_not_fitted_yet():
    for use in (lambda e: e.transform({"x": [1]}), lambda e: e.width, lambda e: e.fit([])):
        with pytest.raises(ValueError, match=r"must be known. Received: columns=\['x'\]. Call `fi"):
            use(HashEncoder(["x"]))


def test_places_that_are_not_there():
    encoder = published({"x": 10})
    for index in (-1, 32):
        with pytest.raises(ValueError, match=f"from 0 to 31. Received: index={index}"):
            encoder.explain(index)
    with pytest.raises(ValueError, match="must be an integer, or a name. Received: index=2.5"):
        encoder.explain(2.5)
    for name in ("y:0:0", "x:4:0", "x:0:8"):
        with pytest.raises(ValueError, match=f"4 splits.*'x' 8. Received: '{name}'"):
            encoder.explain(name)
    for name in ("x", "x:a:1", "x:-1:0"):
        with pytest.raises(ValueError, match=f"column:split:position.*Received: '{name}'"):
            encoder.explain(name)


def test_an_unknown_setting():
    with pytest.raises(ValueError, match=r"has the settings columns, splits.*Received: split=2"):
        HashEncoder({"x": 10}).set_params(split=2)


def test_files_that_were_not_written_by_an_encoder():
    encoder = HashEncoder({"x": 10})
    for text in ("", "[]", "{}", "3", '{"format": 1}'):
        with pytest.raises(ValueError, match="JSON that `to_json` or `save` wrote. Received:"):
            HashEncoder.from_json(text)
    with pytest.raises(ValueError, match="has format 3 and the settings.*Received: format 4"):
        HashEncoder.from_json(encoder.to_json().replace('"format": 3', '"format": 4'))
    with pytest.raises(ValueError, match="fingerprint that was saved.*Received: fingerprint='b"):
        HashEncoder.from_json(
            encoder.to_json().replace(encoder.fingerprint, "b" * 16).replace(": 10", ": 10000")
        )


@pytest.mark.slow
def test_without_the_extra():
    code = (
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'xxhash':\n"
        "            raise ModuleNotFoundError('No module', name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "import keras_multigpu\n"
        "print(keras_multigpu.layers.MultiHotDense)\n"
        "import keras_multigpu.sparse\n"
    )
    done = run_python("-c", code, KERAS_BACKEND="numpy")
    assert "MultiHotDense" in done.stdout
    assert "ImportError: keras_multigpu.sparse needs the library `xxhash`" in done.stderr
    assert "pip install '.[sparse]'` in a clone" in done.stderr


def test_the_public_names():
    assert keras_multigpu.sparse.__all__ == [
        "HashEncoder",
        "HashedDataset",
        "MultiHotDense",
        "collision_probability",
        "expected_collisions",
    ]


def test_objects_of_polars_are_refused():
    """They would be hashed by their addresses."""
    column = pl.Series([uuid.UUID(int=1), uuid.UUID(int=1)], dtype=pl.Object)
    with pytest.raises(TypeError, match="Received: column 'c'"):
        HashEncoder({"c": 100}).transform(pl.DataFrame({"c": column}))


@pytest.mark.parametrize("dtype", ["U", "S", ">U9", "S9"])
def test_texts_of_numpy_with_a_nul_in_them(dtype):
    """Arrow takes NumPy's texts to end at the first NUL."""
    texts = ["a\0b", "a\0c", "a", "\0a", "", "a\0\0b"]
    encoder = HashEncoder({"c": 1000})
    expected = encoder.transform({"c": texts})
    array = np.array(texts, dtype if "U" in dtype else None)
    array = array if "U" in dtype else np.array([text.encode() for text in texts], dtype)
    np.testing.assert_array_equal(encoder.transform({"c": array}), expected)
    np.testing.assert_array_equal(encoder.transform({"c": np.repeat(array, 2)[::2]}), expected)


@pytest.mark.parametrize("with_null", [True, False])
@pytest.mark.parametrize(
    ("kind", "count"),
    [(pa.int8(), 127), (pa.int8(), 128), (pa.uint8(), 255), (pa.uint8(), 256), (pa.int16(), 2**15)],
)
def test_dictionaries_whose_type_is_full(kind, count, with_null):
    rows = [0, count - 1, None if with_null else 1] * 70_000
    texts = [str(number) for number in range(count)]
    column = pa.DictionaryArray.from_arrays(pa.array(rows, kind), pa.array(texts))
    encoder = published({"c": 300})
    found = encoder.transform({"c": column})
    plain = [None if row is None else texts[row] for row in rows[:3]]
    assert found[:3].tolist() == encoder.transform({"c": plain}).tolist()
    assert (found.reshape(-1, 3, 4) == found[:3]).all()


def test_numbers_of_numpy_are_settings():
    encoder = HashEncoder({"c": np.int64(100)}, np.int64(2), np.float32(0.25))
    again = HashEncoder.from_json(encoder.to_json())
    assert again.fingerprint == encoder.fingerprint == HashEncoder({"c": 100}, 2, 0.25).fingerprint
