"""Parquet files of a HashedDataset: encodings, many distinct values, damage, types, changes."""

import datetime
import os
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.sparse_tables import CARDINALITIES, ENCODER, content, plain_codes

from keras_multigpu.sparse import HashedDataset
from keras_multigpu.sparse.parquet_source import ParquetSource
from keras_multigpu.sparse.sources import BadDataError, Chunk, Schema

pytestmark = pytest.mark.backend_free

ROWS = 1000
ARROW = int(pa.__version__.split(".")[0])


def dataset(files, **options):
    options = {"label": "label", "batch_size": 64, "shuffle": False, "chunk_rows": 70, **options}
    return HashedDataset(files, ENCODER, **options)


def cities(kind):
    """A thousand cities; the file's row groups have 300 rows."""
    few, many = [f"few {n % 9}" for n in range(ROWS)], [f"many {n}" for n in range(ROWS)]
    several = [f"several {n % 60}" for n in range(ROWS)]
    values = {
        "few": few,
        "many": many,
        "few, then many": few[:500] + many[500:],
        "many, then few": many[:500] + few[500:],
        "almost a chunk, then more": several[:450] + many[450:],
    }[kind]
    values[7] = values[650] = None
    return values


def check(path, values, chunk_rows=70):
    """Whether a file gives the codes of its cities, in order and in disorder."""
    ages = [str(n % 50) for n in range(ROWS)]
    expected = plain_codes(
        {"city": ["nan" if v is None else str(v) for v in values], "age": ages}, CARDINALITIES
    )
    labels, indices = content(dataset(path, chunk_rows=chunk_rows))
    assert labels == list(range(ROWS))
    np.testing.assert_array_equal(indices, expected)
    data = dataset(path, chunk_rows=chunk_rows, shuffle=True)
    for epoch in range(2):
        data.resume(epoch)
        labels, indices = content(data)
        assert sorted(labels) == list(range(ROWS))
        np.testing.assert_array_equal(indices, expected[np.array(labels, int)])


def write(path, city, **options):
    table = pa.table({"label": np.arange(ROWS), "city": city, "age": np.arange(ROWS) % 50})
    pq.write_table(table, path, row_group_size=300, **options)
    return path


KINDS = ["few", "many", "few, then many", "many, then few", "almost a chunk, then more"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [100, 2**20])
@pytest.mark.parametrize("chunk_rows", [7, 70, 1000])
def test_dictionaries_of_any_length(tmp_path, kind, limit, chunk_rows):
    """Those longer than a chunk, and those that the writer gave up after `limit` bytes."""
    options = {"dictionary_pagesize_limit": limit, "data_page_size": 64, "write_batch_size": 10}
    path = write(tmp_path / "a.parquet", cities(kind), **options)
    check(path, cities(kind), chunk_rows)


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("category", [False, True])
def test_encodings(tmp_path, encoding, version, category):
    values = cities("few, then many")
    city = pa.array(values).dictionary_encode() if category else pa.array(values)
    path = tmp_path / "a.parquet"
    write(
        path,
        city,
        use_dictionary=False,
        data_page_version=version,
        column_encoding={"city": encoding},
    )
    check(path, values)


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pytest.param(
            pa.string_view(), marks=pytest.mark.skipif(ARROW < 21, reason="Arrow casts to none")
        ),
        pa.dictionary(pa.int16(), pa.string()),
        pa.dictionary(pa.int32(), pa.large_string()),
    ],
    ids=str,
)
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_types_of_text(tmp_path, kind, version):
    values = cities("few, then many")
    path = tmp_path / "a.parquet"
    options = {"dictionary_pagesize_limit": 500, "data_page_version": version}
    check(write(path, pa.array(values).cast(kind), **options), values)


def test_categories_of_integers(tmp_path):
    values = [n % 11 for n in range(ROWS)]
    check(write(tmp_path / "a.parquet", pa.array(values).dictionary_encode()), values)


def test_categories_beside_columns_that_arrow_writes_in_another_way(tmp_path):
    values = cities("many, then few")
    times = [datetime.datetime(2020, 1, 1)] * ROWS
    columns = {"city": pa.array(values).dictionary_encode(), "label": np.arange(ROWS)}
    table = pa.table({**columns, "age": np.arange(ROWS) % 50, "time": times})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    check(tmp_path / "a.parquet", values)


def most_bytes(path, names):
    """The most memory that Arrow holds between the chunks of a file, scanned and read."""
    source = ParquetSource(str(path), Schema(names, ("label",)), chunk_rows=2048, skips=False)
    before, chunks, held = pa.total_allocated_bytes(), [], []
    for one in source.scan():
        chunks.append(Chunk(0, *one))
        held.append(pa.total_allocated_bytes() - before)
    for chunk in chunks:
        source.read(chunk)
        held.append(pa.total_allocated_bytes() - before)
    source.close()
    return max(held)


@pytest.mark.skipif(ARROW < 23, reason="Arrow reads whole dictionaries")
def test_memory_does_not_grow_with_the_distinct_values(tmp_path):
    names, peaks = ("a", "b", "c"), []
    for rows in (30_000, 240_000):
        texts = {name: [f"{name}, value {n}" for n in range(rows)] for name in names}
        table = pa.table({**texts, "label": np.zeros(rows)})
        options = {
            "compression": "none",
            "dictionary_pagesize_limit": 2**16,
            "row_group_size": rows,
        }
        pq.write_table(table, tmp_path / "a.parquet", **options)
        del table
        peaks.append(most_bytes(tmp_path / "a.parquet", names))
    assert peaks[1] < 1.2 * peaks[0]
    assert peaks[1] < 3 * 2**20  # of a file of 14 MiB


def test_a_column_is_text_from_where_its_dictionary_is_longer_than_a_chunk(tmp_path):
    values = cities("almost a chunk, then more")
    options = {"dictionary_pagesize_limit": 300, "data_page_size": 64, "write_batch_size": 10}
    path = write(tmp_path / "a.parquet", values, **options)
    source = ParquetSource(str(path), Schema(("city",), ("label",)), chunk_rows=100, skips=False)
    kinds = []
    for _, _, place in source.scan():
        kinds.append((place, list(source._encoded)))
    assert kinds[0] == ((0, 0), ["city"])
    assert kinds[-1] == ((3, 0), [])
    check(path, values, chunk_rows=100)


def test_few_values_are_hashed_once(tmp_path, monkeypatch):
    """The dictionary of a row group comes with each of its chunks, and is not decoded."""
    from keras_multigpu.sparse.hashing import ColumnHasher

    hashed = []
    with_missing = ColumnHasher._with_missing
    monkeypatch.setattr(
        ColumnHasher,
        "_with_missing",
        lambda self, values: hashed.append(len(values)) or with_missing(self, values),
    )
    data = dataset(write(tmp_path / "a.parquet", ["Rome", "Oslo"] * 500), label=None)
    hashed.clear()
    for number in range(len(data)):
        data[number]
    assert hashed.count(2) <= 4  # row groups


def test_metadata_are_read_once_for_all_row_groups(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", cities("few"))
    read, calls = pq.read_metadata, []
    monkeypatch.setattr(pq, "read_metadata", lambda *args: calls.append(args) or read(*args))
    data = dataset(path, batch_size=ROWS)
    for _ in range(2):
        data.on_epoch_begin()
        data[0]
    assert len(calls) == 2  # to scan, and to read


def test_batches_that_are_shorter_than_chunks(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", cities("few, then many"))
    batches = pq.ParquetFile.iter_batches

    def shorter(*args, **options):
        for batch in batches(*args, **options):
            yield batch.slice(0, 20)
            yield batch.slice(20)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", shorter)
    check(path, cities("few, then many"))


# What is refused when the dataset is made.


def damaged(path, table, column, **options):
    """A file with a few bytes of a column's pages overwritten."""
    pq.write_table(table, path, **options)
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(column)
    data = bytearray(path.read_bytes())
    at = chunk.data_page_offset + 30
    data[at : at + 40] = b"\xff" * 40
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"compression": "none", "write_page_checksum": True}])
def test_damaged_pages(tmp_path, column, options):
    draw = random.Random(0)
    values = [f"{draw.random()}" for _ in range(5000)]
    table = pa.table({"label": [draw.random() for _ in values], "city": values, "age": values})
    path = damaged(tmp_path / "bad.parquet", table, column, **options)
    with pytest.raises(ValueError, match="bad.parquet must be a readable Parquet file. Received: "):
        dataset(path)
    good = write(tmp_path / "good.parquet", cities("few"))
    data = dataset([path, good], errors="skip")
    assert (data.rows, data.skipped) == (ROWS, {"unreadable files": 1})


@pytest.mark.parametrize("files", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_random_damage_is_found_or_gives_other_values_only(tmp_path, files):
    draw = random.Random(1)
    path = write(tmp_path / "a.parquet", cities("few, then many"), dictionary_pagesize_limit=500)
    whole = path.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    outcomes = set()
    for _ in range(files):
        data = bytearray(whole)
        for _ in range(draw.choice([1, 10])):
            data[draw.randrange(len(whole) - footer)] = draw.randrange(256)
        path.write_bytes(data)
        try:
            found = dataset(path)
        except BadDataError:
            outcomes.add("refused")
        else:
            outcomes.add("read")
            assert len(content(found)[0]) == ROWS
    assert outcomes == {"refused", "read"}


@pytest.mark.parametrize(
    ("city", "kind"),
    [
        ([["a"]], "list<"),
        ([{"x": 1}], "struct<"),
        ([datetime.date(2020, 1, 1)], "date32"),
        (pa.array([["a"]], pa.large_list(pa.string())), "large_list<"),
    ],
)
def test_columns_without_text_are_refused_before_training(tmp_path, city, kind):
    table = pa.table({"label": [1.0], "city": city, "age": [1]})
    pq.write_table(table, tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match=rf"bad.parquet: .*Received: column 'city' of type {kind}"):
        dataset(tmp_path / "bad.parquet")
    good = write(tmp_path / "good.parquet", cities("few"))
    data = dataset([tmp_path / "bad.parquet", good], errors="skip")
    assert (data.rows, data.skipped) == (ROWS, {"unreadable files": 1})


def test_a_label_that_is_a_list_is_refused(tmp_path):
    pq.write_table(pa.table({"label": [[1.0]], "city": ["a"], "age": [1]}), tmp_path / "a.parquet")
    message = "a.parquet: a label or a weight must be a column of numbers. Received: .*'label' of"
    for errors in ("raise", "skip"):
        with pytest.raises(ValueError, match=message if errors == "raise" else "0 good rows"):
            dataset(tmp_path / "a.parquet", errors=errors)


def test_a_row_group_without_all_its_rows(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", cities("few"))
    batches = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile,
        "iter_batches",
        lambda *args, **options: list(batches(*args, **options))[:-1],
    )
    for chunk_rows in (30, 299, 300):
        with pytest.raises(ValueError, match="a.parquet must have as many rows .* in row group 0"):
            dataset(path, chunk_rows=chunk_rows)


# Files that change.


@pytest.mark.parametrize("how", ["fewer rows", "other rows", "replaced", "gone"])
@pytest.mark.parametrize("errors", ["raise", "skip"])
def test_a_file_that_changes_while_it_is_read(tmp_path, how, errors):
    path = write(tmp_path / "a.parquet", cities("few"))
    os.utime(path, (1, 1))
    data = dataset(path, errors=errors)
    data[0]
    if how == "fewer rows":
        pq.write_table(pq.read_table(path)[:500], path)
    elif how == "other rows":
        write(path, cities("many"))
    elif how == "replaced":
        os.replace(write(tmp_path / "other", cities("many")), path)
    else:
        path.unlink()
    with pytest.raises(ValueError, match="a.parquet must stay as it was when it was scanned"):
        content(data)


def test_a_file_that_can_no_longer_be_read(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", cities("few"))
    data = dataset(path)

    def fail(*args, **options):
        raise OSError("Input/output error")

    monkeypatch.setattr(pq, "ParquetFile", fail)
    with pytest.raises(ValueError, match="a.parquet must be a readable Parquet file.*OSError: Inp"):
        data[0]
