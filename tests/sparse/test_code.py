"""The code of a value, bit for bit; the texts; collisions; cardinalities."""

import math
import types

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripts import run_python
from support.sparse_tables import in_every_library, plain_code, plain_codes

import keras_multigpu.sparse
from keras_multigpu.sparse import HashEncoder, collision_probability, expected_collisions, hashing
from keras_multigpu.sparse.cardinality import Cardinality
from keras_multigpu.sparse.code import Code, group_width

pytestmark = pytest.mark.backend_free

COMPILED = hashing.find_kernel()


def published(columns, **settings):
    return HashEncoder(columns, layout="published", **settings)


@pytest.fixture(params=["xxhash", "numba"])
def way(request, monkeypatch):
    """Either of the two ways to the same bits."""
    assert isinstance(COMPILED, types.ModuleType)
    monkeypatch.setattr(
        hashing, "find_kernel", lambda: COMPILED if request.param == "numba" else None
    )


# Computed by the library xxhash, and cut by hand.
KNOWN = {
    "": ("ef46db3751d8e999", [6, 15, 16, 25]),
    "a": ("d24ec4f1a98c6e5b", [6, 9, 20, 27]),
    "7.0": ("763c22f06c28e3c4", [4, 8, 16, 28]),
    "Rome": ("f56804e558b0db3c", [0, 13, 16, 28]),
    "nan": ("122d48494d0abd37", [5, 9, 18, 31]),
}


@pytest.mark.parametrize("text", KNOWN)
def test_known_values(way, text):
    digest, indices = KNOWN[text]
    assert f"{hashing.hash_texts(pa.array([text]))[0]:016x}" == digest
    encoder = published({"x": 10}, missing_values=[])
    assert encoder.transform({"x": [text]}).tolist() == [indices]


def test_the_bucket():
    """max(32, 4 x ceil(sqrt(cardinality))), all groups together, also where floats round."""
    for cardinality in (1, 2, 63, 64, 65, 81, 82, 10_000, 10_001, 100_000, 2**32):
        expected = max(32, 4 * math.ceil(math.sqrt(cardinality)))
        assert [group_width(cardinality, n, "published") * n for n in (1, 2, 4)] == [expected] * 3
    large = 94_906_267**2  # its root as a float64 is right, that of the next number is not
    assert math.ceil(math.sqrt(large + 1)) == 94_906_267
    assert group_width(large + 1, 1, "published") == 4 * 94_906_268


strings = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
values = st.one_of(
    st.lists(strings, min_size=1, max_size=30),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30),
    st.lists(st.floats(allow_nan=False), min_size=1, max_size=30),
    st.lists(st.booleans(), min_size=1, max_size=5),
)


@settings(max_examples=60, deadline=None)
@given(values, st.sampled_from([1, 2, 4]), st.integers(1, 10**6), st.booleans())
def test_the_recipe(column, splits, cardinality, compiled):
    """Against the recipe written plainly: `str` of every value, digit by digit."""
    before = hashing.find_kernel
    hashing.find_kernel = lambda: COMPILED if compiled else None
    try:
        encoder = published({"x": cardinality}, splits=splits, missing_values=[])
        found = encoder.transform({"x": column})
    finally:
        hashing.find_kernel = before
    texts = ["0.0" if value == 0 and isinstance(value, float) else str(value) for value in column]
    expected = [plain_code(text, cardinality, splits) for text in texts]
    assert found.dtype == np.int32
    assert found.tolist() == expected


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=80), min_size=1, max_size=20))
def test_bytes_are_hashed_as_they_are(column):
    encoder = published({"x": 100}, missing_values=[])
    found = encoder.transform({"x": pa.array(column, pa.binary())})
    assert found.tolist() == [plain_code(value, 100) for value in column]


@pytest.mark.parametrize("length", [0, 1, 3, 4, 7, 8, 15, 31, 32, 33, 63, 64, 100, 1000])
def test_every_length_of_text(way, length):
    column = ["x" * length, "é" * length, "0123456789"[:length]]
    found = published({"x": 100_000}, missing_values=[]).transform({"x": column})
    assert found.tolist() == [plain_code(value, 100_000) for value in column]


COLUMNS = {
    "strings": (["Rome", "", "Zürich", "東京", "Rome"], ["Rome", "", "Zürich", "東京", "Rome"]),
    "missing strings": (["a", None, "nan"], ["a", "nan", "nan"]),
    "integers": ([7, -7, 0, 2**40], ["7", "-7", "0", "1099511627776"]),
    "floats": ([7.0, 0.1, 1e16, -0.0, 0.0], ["7.0", "0.1", "1e+16", "0.0", "0.0"]),
    "booleans": ([True, False, True], ["True", "False", "True"]),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_equal_in_every_library(way, name):
    column, texts = COLUMNS[name]
    expected = plain_codes({"x": texts}, {"x": 1000})
    for library, table in in_every_library(column).items():
        found = published({"x": 1000}, missing_values=[]).transform(table)
        np.testing.assert_array_equal(found, expected, err_msg=library)


def test_missing_values_of_every_kind(way):
    import pandas as pd
    import polars as pl

    missing = [None, float("nan"), pd.NA, pd.NaT]
    tables = [
        {"x": ["a", *missing]},
        {"x": pd.Series([1, *missing], dtype="object")},
        {"x": np.array([1.5, np.nan, np.nan, np.nan, np.nan], "float32")},
        {"x": pd.Series([True, None, None, None, None], dtype="boolean")},
        {"x": pl.Series([1, None, None, None, None])},
        {"x": pd.Categorical(["a", None, None, None, None])},
        {"x": pa.nulls(5)},
        {"x": pa.DictionaryArray.from_arrays([0, 1, 1, None, None], ["a", None])},
    ]
    for table in tables:
        found = published({"x": 50}).transform(table)
        assert found[1:].tolist() == [plain_code("nan", 50)] * 4
        found = published({"x": 50}, missing="?").transform(table)
        assert found[1:].tolist() == [plain_code("?", 50)] * 4


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "uint64", "int64"])
def test_integers_of_every_width(dtype):
    column = np.array([0, 7, 100, np.iinfo(dtype).max], dtype)
    found = published({"x": 50}).transform({"x": column})
    assert found.tolist() == [plain_code(str(int(value)), 50) for value in column]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_short_floats_have_the_text_of_the_shortest_decimal(dtype):
    column = np.array([0.1, 2.5, 1e4, 3e-5, np.inf, -0.0], dtype)
    found = published({"x": 50}).transform({"x": column})
    texts = ["0.1", "2.5", "10000.0", "3e-05", "inf", "0.0"]
    assert found.tolist() == [plain_code(text, 50) for text in texts]


def test_a_dictionary_longer_than_its_chunk_and_one_that_comes_again(way):
    words = [f"word {number}" for number in range(1000)]
    indices = pa.array([3, None, 999, 3], pa.int32())
    long = pa.DictionaryArray.from_arrays(indices, pa.array(words))
    stream = published({"x": 1000}).stream()
    expected = plain_codes({"x": ["word 3", "nan", "word 999", "word 3"]}, {"x": 1000})
    np.testing.assert_array_equal(stream({"x": long}), expected)
    for first in (0, 500, 0, 990):
        short = pa.DictionaryArray.from_arrays(pa.array([1, 0]), pa.array(words[first:][:2]))
        expected = plain_codes({"x": [words[first + 1], words[first]]}, {"x": 1000})
        np.testing.assert_array_equal(stream({"x": short}), expected)


# Collisions.


def test_the_published_width_and_the_wide_one():
    assert collision_probability(100_000, layout="published") == pytest.approx(1 - 0.61, abs=0.005)
    assert expected_collisions(100_000, layout="published") == pytest.approx(0.5, abs=0.01)
    wide = group_width(100_000, 4, "published", probability=0.01)
    assert wide / math.sqrt(100_000) == pytest.approx(2.7, abs=0.05)
    chances = [collision_probability(100_000, group, 4) for group in (wide, wide - 1)]
    assert chances[0] <= 0.01 < chances[1]
    assert collision_probability(100_000, splits=1, layout="published") == pytest.approx(1)
    encoder = published({"x": 100_000}, collision_probability=0.01)
    assert encoder.width == 4 * wide
    assert published({"x": 2}, collision_probability=0.01).width == 32
    assert collision_probability(1) == 0


@pytest.mark.parametrize(("group", "splits"), [(6, 4), (40, 2), (900, 1), (5, 4)])
def test_collisions_by_simulation(group, splits):
    """Hashes drawn at random, counted; 400 columns of 30 values."""
    rng, count, trials = np.random.default_rng(5), 30, 400
    code = Code(0, group, splits)
    pairs = []
    for _ in range(trials):
        codes = code.indices(rng.integers(2**64, size=count, dtype="uint64"))
        _, repeats = np.unique(codes, axis=0, return_counts=True)
        pairs.append(sum(repeats * (repeats - 1) // 2))
    expected = expected_collisions(count, group, splits)
    assert np.mean(pairs) == pytest.approx(expected, abs=4 * math.sqrt(expected / trials))
    chance = collision_probability(count, group, splits)
    seen = np.mean(np.array(pairs) > 0)
    assert seen == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / trials) + 0.02)


def test_groups_that_are_far_from_uniform():
    """16 bits modulo 40,000: remainders below 25,536 come up twice as often."""
    often = (25_536 * 4 + 14_464) / 2**32
    assert expected_collisions(2, 40_000, 4) == pytest.approx(often**4)


def test_probabilities_that_no_width_gives():
    for probability in (1e-300, 5e-324, 1e-18):
        with pytest.raises(ValueError, match="at most 65536 wide.*`collision_probability`"):
            group_width(10**5, 4, "published", probability=probability)
    assert group_width(1, 4, "published", probability=5e-324) == 8


# Numba that is there and doesn't work.


class Broken(types.SimpleNamespace):
    """A kernel whose compiled function fails, or gives other codes."""

    def __init__(self, error):
        super().__init__(error=error)

    def write_codes(self, *arguments):
        if self.error:
            raise self.error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("cannot cache function: no locator available"),
        OSError(30, "Read-only file system"),
        SystemError("LLVM"),
        None,
    ],
)
def test_a_kernel_that_fails_is_left_out(monkeypatch, error):
    monkeypatch.setattr(keras_multigpu.sparse, "kernel", Broken(error))
    hashing.find_kernel.cache_clear()
    name = type(error).__name__ if error else "RuntimeError: it gave"
    try:
        with pytest.warns(UserWarning, match=f"numba is installed, but.*Received: {name}") as told:
            found = [published({"x": 10}).transform({"x": ["Rome"]}).tolist() for _ in range(3)]
    finally:
        hashing.find_kernel.cache_clear()
    assert found == [[KNOWN["Rome"][1]]] * 3
    assert len(told) == 1


RAISE = """
import sys
class Raise:
    def find_spec(self, name, path=None, target=None):
        if name == "numba":
            raise {}
sys.meta_path.insert(0, Raise())
"""
# What numba has tried where neither the package's folder nor the user's can be written to.
NO_CACHE = """
from numba.core import caching
caching.CacheImpl._locator_classes = []
"""
TRANSFORM = """
from keras_multigpu.sparse import HashEncoder
encoder = HashEncoder({"x": 1000, "y": 10})
table = {"x": ["Rome", None], "y": [1.5, 2.0]}
print(encoder.transform(table).tolist(), encoder.fingerprint)
"""


@pytest.mark.parametrize(
    ("before", "message"),
    [
        pytest.param(
            RAISE.format("ImportError('needs NumPy 2.2')"),
            "ImportError: needs NumPy 2.2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            RAISE.format("AttributeError('no such')"),
            "AttributeError: no such",
            marks=pytest.mark.slow,
        ),
        (RAISE.format("ModuleNotFoundError('none', name='numba')"), ""),
        pytest.param(NO_CACHE, "RuntimeError: cannot cache function", marks=pytest.mark.slow),
    ],
)
def test_another_process_and_numba_that_can_not_be_used(before, message):
    done = run_python("-c", before + TRANSFORM, KERAS_BACKEND="numpy")
    assert done.returncode == 0, done.stderr
    encoder = HashEncoder({"x": 1000, "y": 10})
    here = encoder.transform({"x": ["Rome", None], "y": np.array([1.5, 2])}).tolist()
    assert done.stdout.strip() == f"{here} {encoder.fingerprint}"
    assert done.stderr.count("numba is installed, but") == bool(message)
    assert message in done.stderr


# Cardinalities.


@pytest.mark.parametrize(
    "count", [1, 10, 1000, 60_000, pytest.param(400_000, marks=pytest.mark.slow)]
)
def test_cardinalities(count):
    seen, again = Cardinality(), Cardinality()
    hashes = np.array([xxhash.xxh64_intdigest(b"%d" % i) for i in range(count)], "uint64")
    seen.add(hashes)
    for part in np.array_split(np.concatenate([hashes, hashes]), 3):
        again.add(part)
    assert seen.estimate() == again.estimate()
    assert abs(seen.estimate() - count) <= 3 * 0.0081 * count
    assert Cardinality().estimate() == 0
