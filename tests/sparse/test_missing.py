"""Which values are missing: the same ones in every kind of file and table."""

import csv
import pickle

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sklearn.base
from support.sparse_tables import in_every_library

from keras_multigpu.sparse import HashedDataset, HashEncoder
from keras_multigpu.sparse import encoder as encoders

pytestmark = pytest.mark.backend_free

TEXTS = ["Rome", "", "NA", "a, b", "", "Rome", "nan", "?"]
NUMBERS = [7, -1, 0, 7, 41]


def code(text, **settings):
    """The code of a text that is no missing value."""
    table = {"x": pa.array([text], pa.string())}
    return HashEncoder({"x": 300}, **{**settings, "missing_values": []}).transform(table)[0]


def read(path, encoder, **options):
    data = HashedDataset(path, encoder, batch_size=3, shuffle=False, **options)
    return np.concatenate([data[number][0] for number in range(len(data))])


def from_every_source(folder, column, encoder):
    """A column's codes, by where it was read: as each library holds it, and from files."""
    found = {name: encoder.transform(t) for name, t in in_every_library(column).items()}
    for name, quoting in {"plain": csv.QUOTE_MINIMAL, "quoted": csv.QUOTE_ALL}.items():
        for ending in ("csv", "csv.gz"):
            path = folder / f"{name}.{ending}"
            frame = pd.DataFrame({"x": column, "y": range(len(column))})
            frame.to_csv(path, index=False, quoting=quoting)
            for rows in (1, 3, 100):
                found[f"{path.name} {rows}"] = read(path, encoder, label="y", chunk_rows=rows)
    for dictionary in (True, False):
        path = folder / f"dictionary {dictionary}.parquet"
        pq.write_table(pa.table({"x": column}), path, use_dictionary=dictionary)
        found[path.name] = read(path, encoder)
    return found


@pytest.mark.parametrize("way", ["xxhash", "numba"])
@pytest.mark.parametrize("layout", ["wide", "published"])
@pytest.mark.parametrize(
    "missing_values", [[], [""], ["NA"], ("", "?", "NA"), ["NA", "nan", "Rome"]]
)
def test_equal_texts_have_equal_codes_from_every_source(
    tmp_path, way, layout, missing_values, monkeypatch
):
    if way == "xxhash":
        monkeypatch.setattr("keras_multigpu.sparse.hashing.find_kernel", lambda: None)
    settings = {"layout": layout, "missing": "none"}
    encoder = HashEncoder({"x": 300}, missing_values=missing_values, **settings)
    expected = [code("none" if one in missing_values else one, **settings) for one in TEXTS]
    for source, found in from_every_source(tmp_path, TEXTS, encoder).items():
        np.testing.assert_array_equal(found, expected, err_msg=source)


def test_numbers_that_are_missing(tmp_path):
    encoder = HashEncoder({"x": 300}, missing_values=["-1"])
    expected = [code("nan" if one == -1 else str(one)) for one in NUMBERS]
    for source, found in from_every_source(tmp_path, NUMBERS, encoder).items():
        np.testing.assert_array_equal(found, expected, err_msg=source)


def test_a_table_and_its_csv_file_agree_about_what_is_missing(tmp_path):
    frame = pd.DataFrame({"x": ["Rome", None, "", "Paris"], "y": 1})
    frame.to_csv(tmp_path / "a.csv", index=False)
    encoder = HashEncoder({"x": 300}, others="ignore")
    expected = encoder.transform(frame)
    assert (expected[1] == expected[2]).all()
    np.testing.assert_array_equal(read(tmp_path / "a.csv", encoder), expected)
    again = encoder.transform(pd.read_csv(tmp_path / "a.csv"))
    np.testing.assert_array_equal(again, expected)


def test_an_empty_label_is_no_number_whatever_is_missing(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\nRome,1\n,\nParis,0\n")
    for missing_values in ([], [""]):
        encoder = HashEncoder({"x": 300}, missing_values=missing_values)
        with pytest.raises(
            ValueError, match="line 3: 'y' must be a finite number. Received: (b'|')"
        ):
            HashedDataset(tmp_path / "a.csv", encoder, label="y")
        data = HashedDataset(tmp_path / "a.csv", encoder, label="y", errors="skip")
        assert (data.rows, data.skipped) == (2, {"no finite label or weight": 1})


def test_estimates_count_no_missing_value():
    for table in ({"x": ["", "NA", "a", "b", None]}, {"x": pd.Categorical(["", "a", "b", None])}):
        encoder = HashEncoder(missing_values=["", "NA"]).fit(table)
        assert encoder.cardinalities_ == {"x": 2}
    floats = [0.5, float("nan"), 1.5, 1.5]
    for table in in_every_library([None if x != x else x for x in floats]).values():
        assert HashEncoder().fit(table).cardinalities_ == {"x": 2}
    assert HashEncoder().fit({"x": np.array(floats)}).cardinalities_ == {"x": 2}


# What was saved before there was a choice.

OLD_FILE = """{
 "format": 2, "columns": {"city": 50, "age": 20}, "splits": 2, "collision_probability": null,
 "missing": "nan", "output": "indices", "others": "error", "num_threads": 1, "layout": "wide",
 "buckets": 8, "fingerprint": "5d78836f195ca1de"
}"""
OLD_CODES = [[117, 268, 422, 503], [63, 273, 422, 503], [113, 231, 422, 503]]


def old_encoders():
    """An encoder of an earlier version: from its file, and from a pickle of it."""
    loaded = HashEncoder.from_json(OLD_FILE)
    state = {name: one for name, one in vars(loaded).items() if "missing_values" not in name}
    del state["_missing"]
    layout = state["_layout"] = object.__new__(type(loaded.layout_))
    vars(layout).update({**vars(loaded.layout_), "missing": "nan"})
    pickled = HashEncoder.__new__(HashEncoder)
    pickled.__setstate__(state)
    return loaded, pickled


@pytest.mark.parametrize("place", [0, 1], ids=["file", "pickle"])
def test_encoders_of_earlier_versions_keep_their_codes(tmp_path, place):
    encoder = old_encoders()[place]
    (tmp_path / "a.csv").write_text('city,age\nRome,7\n,7\n"",7\n')
    copies = [
        encoder,
        HashEncoder.from_json(encoder.to_json()),
        pickle.loads(pickle.dumps(encoder)),
        encoders.copy_encoder(encoder),
        sklearn.base.clone(encoder),
    ]
    for one in copies:
        table = {"city": ["Rome", "", None], "age": [7, 7, 7]}
        assert one.transform(table).tolist() == OLD_CODES
        found = read(tmp_path / "a.csv", one)
        assert found.tolist() == [OLD_CODES[0], OLD_CODES[2], OLD_CODES[2]]
        assert one.fingerprint == "5d78836f195ca1de"
        assert one.missing_values == "empty fields"


def test_the_choice_is_part_of_the_fingerprint_and_of_the_file():
    rules = [[], [""], ["", "NA"], "empty fields"]
    made = [HashEncoder({"x": 300}, missing_values=rule) for rule in rules]
    assert len({one.fingerprint for one in made}) == 4
    for one in made:
        assert HashEncoder.from_json(one.to_json()).missing_values == one.missing_values
    assert HashEncoder({"x": 300}).fingerprint == made[1].fingerprint
    same = HashEncoder({"x": 300}, missing_values=("NA", "", ""))
    assert same.fingerprint == made[2].fingerprint


@pytest.mark.parametrize("missing_values", ["NA", b"NA", [None], ["", 3], 0, {""}])
def test_what_is_no_list_of_texts(missing_values):
    with pytest.raises(ValueError, match="must be a list of texts, such as.*Received: missing_v"):
        HashEncoder({"x": 3}, missing_values=missing_values)
