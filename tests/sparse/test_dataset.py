"""HashedDataset: what is in its batches, their order, processes, resuming, and bad files."""

import collections
import gzip
import re

import keras
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.parity import difference
from support.sparse_tables import CARDINALITIES, ENCODER, plain_codes

from keras_multigpu import make_parallel
from keras_multigpu.sparse import HashedDataset, HashEncoder
from keras_multigpu.zoo.wide import wide

ROWS = 100


def frame(first=0, rows=ROWS):
    """A table whose label is the number of the row; some cities have commas, quotes, newlines."""
    numbers = np.arange(first, first + rows)
    cities = [f"city {n % 7}" for n in numbers]
    cities[1], cities[3], cities[5] = 'Rome, "Eternal"', "New\nYork", None
    return pd.DataFrame({"label": numbers, "city": cities, "age": numbers % 50, "other": 1.5})


def write(path, table):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pandas(table), path, row_group_size=40)
    else:
        table.to_csv(path, index=False)
    return str(path)


def two_files(folder, suffix):
    """Two files of 100 rows."""
    paths = [folder / f"part_{number}.{suffix}" for number in range(2)]
    return [write(path, frame(ROWS * number)) for number, path in enumerate(paths)]


@pytest.fixture(params=["csv", "csv.gz", "parquet"])
def files(request, tmp_path):
    """Two files in each of the formats."""
    return two_files(tmp_path, request.param)


def expected():
    table = pd.concat([frame(), frame(ROWS)])
    texts = {"city": table["city"].fillna("nan"), "age": table["age"].map(str)}
    return plain_codes(texts, CARDINALITIES)


def dataset(files, **options):
    options = {"label": "label", "batch_size": 32, "chunk_rows": 15, **options}
    return HashedDataset(files, ENCODER, **options)


def labels_of(data):
    return np.concatenate([data[number][1][:, 0] for number in range(len(data))]).astype(int)


def test_in_order(files):
    data = dataset(files, shuffle=False)
    assert (len(data), data.rows, data.left_out) == (7, 200, 0)
    assert not data.skipped
    batches = [data[number] for number in range(7)]
    assert [batch[0].shape for batch in batches] == [(32, 8)] * 6 + [(8, 8)]
    assert {batch[0].dtype for batch in batches} == {np.dtype("int32")}
    assert {batch[1].dtype for batch in batches} == {np.dtype("float32")}
    np.testing.assert_array_equal(np.concatenate([batch[0] for batch in batches]), expected())
    assert labels_of(data).tolist() == list(range(200))


def test_progress_is_shown_on_demand(files, capsys):
    dataset(files)
    assert capsys.readouterr().out == ""
    dataset(files, verbose=1)
    assert "1/1" in capsys.readouterr().out


def test_batches_in_any_order(files):
    data = dataset(files, shuffle=False, chunk_rows=5, batch_size=5)
    for number in (7, 0, 5, 2, 39, 6, 1):
        assert data[number][1][:, 0].tolist() == list(range(5 * number, 5 * number + 5))


def test_shuffled_by_chunk_and_within(files):
    data = dataset(files, seed=3)
    data.on_epoch_begin()
    data.on_epoch_begin()  # of the same epoch: none of its batches was asked for
    first = labels_of(data)
    rows = np.concatenate([data[number][0] for number in range(len(data))])
    np.testing.assert_array_equal(rows, expected()[first])
    assert sorted(first) == list(range(200))
    assert (np.diff(first) == 1).mean() < 0.2
    data.on_epoch_begin()
    second = labels_of(data)
    assert sorted(second) == list(range(200))
    assert first.tolist() != second.tolist()
    again = dataset(files, seed=3)
    assert labels_of(again).tolist() == first.tolist()
    assert labels_of(dataset(files, seed=4)).tolist() != first.tolist()
    again.resume(1)
    assert labels_of(again).tolist() == second.tolist()


def test_the_order_of_the_files_is_drawn_for_every_epoch(files):
    data, begins = dataset(files, seed=3), set()
    for epoch in range(8):
        data.resume(epoch)
        begins.add(labels_of(data)[0] // ROWS)
    assert begins == {0, 1}


@pytest.mark.parametrize("processes", [2, 3])
def test_shared_among_processes(files, processes):
    parts = [dataset(files, process=p, processes=processes) for p in range(processes)]
    assert len({len(part) for part in parts}) == 1
    rows = [labels_of(part) for part in parts]
    assert {len(one) for one in rows} == {200 // processes}
    together = np.concatenate(rows)
    assert len(set(together)) == len(together) == 200 - parts[0].left_out
    assert parts[0].left_out == 200 % processes
    assert set(together) == set(range(200 - parts[0].left_out))


def test_resumed_at_a_batch(files):
    whole, data = dataset(files, seed=1), dataset(files, seed=1)
    data.resume(2, 3)
    for _ in range(2):  # two epochs, which end in the middle of one
        data.on_epoch_begin()
        for number in range(7):
            whole.resume(*divmod(data.epoch * 7 + 3 + number, 7))
            for ours, other in zip(data[number], whole[0]):
                np.testing.assert_array_equal(ours, other)
    assert (data.epoch, len(data)) == (3, 7)


def test_weights_and_several_labels(files):
    with pytest.warns(UserWarning, match="The label 'age' is also a column of the encoder"):
        data = dataset(files, label=["label", "age"], weight="other", shuffle=False)
    indices, labels, weights = data[0]
    assert labels[:3].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert (labels.shape, weights.tolist()) == ((32, 2), [1.5] * 32)
    (alone,) = dataset(files, label=None, shuffle=False)[0]
    np.testing.assert_array_equal(alone, indices)


def test_patterns_and_delimiters(tmp_path):
    frame().to_csv(tmp_path / "a.csv", index=False, sep=";")
    frame(100).to_csv(tmp_path / "b.csv", index=False, sep=";")
    data = dataset(str(tmp_path / "*.csv"), delimiter=";", shuffle=False)
    assert labels_of(data).tolist() == list(range(200))
    assert labels_of(dataset(tmp_path / "a.csv", delimiter=";", shuffle=False))[0] == 0


def model_of(**options):
    return wide(ENCODER, optimizer="adam", loss="mse", jit_compile=False, **options)


@pytest.mark.parametrize("devices", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_fit(tmp_path, devices):
    """As on the arrays."""
    files = two_files(tmp_path, "parquet" if devices else "csv")
    data = dataset(files, shuffle=False)
    model, plain = model_of(), model_of()
    plain.set_weights(model.get_weights())
    arrays = expected(), np.arange(200, dtype="float32")[:, None]
    if devices:
        model = make_parallel(model, devices)
    model.fit(data, epochs=2, verbose=0)
    history = plain.fit(*arrays, batch_size=32, shuffle=False, epochs=2, verbose=0)
    assert difference(model.get_weights(), plain.get_weights()) < 2e-5
    assert data.epoch == 1
    scores = model.evaluate(dataset(files, shuffle=False), verbose=0)
    assert scores == pytest.approx(plain.evaluate(*arrays, verbose=0), rel=1e-4)
    assert np.isfinite(history.history["loss"]).all()


def test_training_goes_on_where_it_stopped(tmp_path):
    files = two_files(tmp_path, "csv.gz")
    whole, parts = model_of(), model_of()
    parts.set_weights(whole.get_weights())
    whole.fit(dataset(files, seed=5), epochs=3, verbose=0)
    first = dataset(files, seed=5)
    for number in range(3):
        parts.train_on_batch(*first[number])
    second = dataset(files, seed=5)
    second.resume(0, 3)
    parts.fit(second, epochs=2, verbose=0)
    for number in range(4):
        second.resume(2, 3 + number)
        parts.train_on_batch(*second[0])
    assert difference(parts.get_weights(), whole.get_weights()) < 1e-6


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_of_keras(files, workers):
    data = dataset(files, seed=2, workers=workers, batch_size=8)
    model = keras.Sequential([keras.layers.Lambda(lambda x: x * 1.0)])
    np.testing.assert_array_equal(model.predict(data, verbose=0), expected())


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="tf.data is TensorFlow's")
def test_tf_data(files):
    data = dataset(files, seed=2)
    stream = data.to_tf_data()
    assert [spec.shape.as_list() for spec in stream.element_spec] == [[None, 8], [None, 1]]
    for epoch in range(2):
        found = np.concatenate([labels.numpy()[:, 0] for _, labels in stream]).astype(int)
        again = dataset(files, seed=2)
        again.resume(epoch)
        assert found.tolist() == labels_of(again).tolist()


@pytest.mark.skipif(keras.backend.backend() == "tensorflow", reason="what TensorFlow has")
def test_no_tf_data(files):
    with pytest.raises(RuntimeError, match="Keras backend 'tensorflow'. Received: .*='jax'"):
        dataset(files).to_tf_data()


def test_reading_in_disorder_is_told(files):
    data = dataset(files)
    with pytest.warns(UserWarning, match=r"in disorder.*fit\(..., shuffle=False\)"):
        collections.deque(data[number] for number in [0, 3, 6] * 3)


def test_a_model_of_another_encoder(files):
    other = HashedDataset(files, HashEncoder({"age": 50, "city": 300}), label="label")
    with pytest.raises(ValueError, match=f"Received: fingerprint='{other.fingerprint}'"):
        model_of().fit(other)


# Bad data.

GOOD = "label,city,age\n1,Rome,3\n"
BAD_LINES = {
    "too few fields": ("2,Paris\n", r"line 5: a row must have 3 fields.*2 fields, '2,Paris'"),
    "too many fields": ("2,a,3,4\n", "line 5: a row must have 3 fields.*4 fields, '2,a,3,4'"),
    "no number": ("x,a,3\n", "line 5: 'label' must be a finite number. Received: 'x'"),
    "not-a-number": ("nan,a,3\n", "line 5: 'label' must be a finite number. Received: 'nan'"),
    "infinite": ("inf,a,3\n", "line 5: .*Received: 'inf'"),
    "no label": (",a,3\n", "line 5: .*Received: ''"),
    "ends in mid-line": ("2,Par", "line 5: a row must have 3 fields.*2 fields, '2,Par'"),
}


@pytest.mark.parametrize("name", BAD_LINES)
@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_bad_lines(tmp_path, name, suffix):
    line, message = BAD_LINES[name]
    text = GOOD + '2,"two\nlines",4\n' + line + ("" if "mid" in name else "7,Oslo,3\n")
    path = tmp_path / f"bad.{suffix}"
    data = text.encode()
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    with pytest.raises(ValueError, match=f'{re.escape(str(path))}, {message}.*errors="skip"'):
        dataset(path)
    data = dataset(path, errors="skip", shuffle=False)
    assert labels_of(data).tolist() == ([1, 2] if "mid" in name else [1, 2, 7])
    reason = "malformed" if "fields" in name or "mid" in name else "no finite label or weight"
    assert data.skipped == collections.Counter({reason: 1})


def test_a_quoted_field_that_never_ends(tmp_path):
    (tmp_path / "cut.csv").write_text(GOOD + '2,"Par')
    message = "cut.csv, line 3: a field that begins with a quotation .* Received: b'2,\"Par'"
    with pytest.raises(ValueError, match=message):
        dataset(tmp_path / "cut.csv")


@pytest.mark.parametrize("bad", ['"bad,3,0', '"bad" x,3,0', '0,3,"bad'])
@pytest.mark.parametrize("count", [1, 2])
def test_a_mark_that_is_not_closed_takes_in_no_other_rows(tmp_path, bad, count):
    good = [f'"city ""{number}""\nor so",3,{number}' for number in range(20)]
    more = [bad] * (count - 1)
    lines = ["city,age,label", *good[:5], bad, *good[5:15], *more, *good[15:], '5" x,3,20']
    path = tmp_path / "marks.csv"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"marks.csv, line 12: a field that begins with a quot"):
        dataset(path)
    for chunk_rows in (4, 1000):
        data = dataset(path, errors="skip", shuffle=False, chunk_rows=chunk_rows)
        assert labels_of(data).tolist() == list(range(21))
        assert data.skipped == collections.Counter({"malformed": count})


def test_a_number_too_large_for_float32(tmp_path):
    path = tmp_path / "large.csv"
    path.write_text("city,age,label\nRome,3,1e39\nOslo,3,2\n")
    with pytest.raises(ValueError, match="line 2: 'label' must be a finite.*Received: '1e39'"):
        dataset(path)
    assert labels_of(dataset(path, errors="skip")).tolist() == [2]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("column", ["label", "other"])
def test_bad_numbers_in_parquet(tmp_path, value, column):
    table = frame().astype({"label": float})
    table.loc[50, column] = value
    path = write(tmp_path / "bad.parquet", table)
    with pytest.raises(ValueError, match=f"bad.parquet, row group 1, row 11: '{column}' must be a"):
        dataset(path, weight="other")
    data = dataset(path, weight="other", errors="skip", shuffle=False)
    assert labels_of(data).tolist() == [*range(50), *range(51, 100)]
    np.testing.assert_array_equal(data[1][0][18], expected()[51])
    assert data.skipped["no finite label or weight"] == 1


def unreadable(tmp_path, kind):
    if kind == "truncated gzip":
        whole = gzip.compress(frame(0, 5000).to_csv(index=False).encode())
        (tmp_path / "b.csv.gz").write_bytes(whole[: len(whole) // 2])
        return "b.csv.gz"
    if kind == "no gzip":
        (tmp_path / "b.csv.gz").write_bytes(b"label,city,age\n")
        return "b.csv.gz"
    if kind == "truncated parquet":
        whole = (tmp_path / "a.parquet").read_bytes()
        (tmp_path / "b.parquet").write_bytes(whole[: len(whole) // 2])
        return "b.parquet"
    if kind == "missing":
        return "b.csv"
    (tmp_path / "b.csv").write_text("" if kind == "empty" else "label,town,age\n1,Rome,3\n")
    return "b.csv"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated gzip", "must be a readable file. Received: EOFError"),
        ("no gzip", "must be a readable file. Received: BadGzipFile"),
        ("truncated parquet", "must be a readable Parquet file"),
        ("missing", "must be a readable file. Received: FileNotFoundError"),
        ("empty", "must have the columns 'city', 'age', 'label'. Received: no columns"),
        ("other columns", "Received: 'label', 'town', 'age'; missing: 'city'"),
    ],
)
def test_an_unreadable_file_among_many(tmp_path, kind, message):
    good = write(tmp_path / "a.parquet", frame())
    bad = str(tmp_path / unreadable(tmp_path, kind))
    with pytest.raises(ValueError, match=f"{re.escape(bad)} .*{message}"):
        dataset([good, bad])
    data = dataset([bad, good], errors="skip", shuffle=False)
    assert labels_of(data).tolist() == list(range(100))
    assert data.skipped == {"unreadable files": 1}


def test_the_range_of_the_labels_is_that_of_the_rows_read(tmp_path):
    table = frame().assign(label=lambda found: found["label"] / 10)
    good = [write(tmp_path / name, table) for name in ("a.csv", "a.parquet")]
    for path in good:
        data = dataset(path)
        labels = np.concatenate([data[number][1] for number in range(len(data))])
        assert data.label_range == (float(labels.min()), float(labels.max()))
    bad = tmp_path / "bad.parquet"
    write(bad, table.assign(label=1000.0 + table["label"]))
    last = pq.ParquetFile(bad).metadata.row_group(2).column(1)
    content = bytearray(bad.read_bytes())
    content[last.data_page_offset : last.data_page_offset + 20] = b"\xff" * 20
    bad.write_bytes(content)
    data = dataset([bad, good[0]], errors="skip")
    assert data.skipped == {"unreadable files": 1}
    assert data.label_range[1] < 10


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"A pattern must match files. Received: .*\*.csv'"):
        dataset(str(tmp_path / "*.csv"))
    with pytest.raises(ValueError, match=r"at least one file. Received: files=\[\]"):
        dataset([])
    with pytest.raises(TypeError, match=r"a path, a pattern, or a list .* type NoneType. Give"):
        dataset(None)
    with pytest.raises(TypeError, match=r"of type DataFrame. Use `encoder.transform\(table\)`"):
        dataset(pd.DataFrame({"city": ["Rome"]}))
    with pytest.raises(ValueError, match=r"named .csv, .csv.gz, .parquet or .pq. Received: 'x.txt"):
        dataset("x.txt")
    (tmp_path / "none.csv").write_text("label,city,age\n")
    with pytest.raises(ValueError, match="Received: 1 file with 0 good rows for 1 process,"):
        dataset(tmp_path / "none.csv")
    (tmp_path / "one.csv").write_text(GOOD + "x,Rome,3\n")
    with pytest.raises(ValueError, match="1 good row for 2 processes, skipped: {'no finite label"):
        dataset(tmp_path / "one.csv", processes=2, errors="skip")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be a positive integer. Received: batch_size=0"),
        ({"chunk_rows": 1.5}, "`chunk_rows` must be.*chunk_rows=1.5"),
        ({"processes": True}, "`processes` must be.*processes=True"),
        ({"seed": -1}, "`seed` must be a positive integer, or 0. Received: seed=-1"),
        ({"errors": "ignore"}, '`errors` must be "raise" or "skip".*errors=\'ignore\''),
        ({"process": 2, "processes": 2}, "`process` must be an integer from 0 to 1.*process=2"),
        ({"process": 1.0, "processes": 2}, "`process` must be an integer from 0 to 1.*process=1.0"),
        ({"workers": -1}, "`workers` must be a positive integer, or 0. Received: workers=-1"),
        ({"max_queue_size": 0}, "`max_queue_size` must be a positive.*max_queue_size=0"),
        ({"shuffle": "yes"}, "`shuffle` must be True, False or None. Received: shuffle='yes'"),
        ({"label": 3}, "`label` must be the name of a column, a list.*Received: label=3"),
        ({"label": ["label", None]}, "`label` must be.*Received: label="),
        ({"label": ["label", "label"]}, "must be different columns.*label=.'label', 'label'"),
        ({"weight": "label"}, "must be different columns. Received: label='label', weight='label'"),
        ({"weight": 0}, "`weight` must be the name of a column, or None. Received: weight=0"),
        ({"label": None, "weight": "w"}, "`weight` needs a `label`.*label=None, weight='w'"),
        ({"encoder": None}, "`encoder` must be a .*HashEncoder`. Received: encoder=None"),
        ({"encoder": HashEncoder(["city"])}, "cardinalities of the columns must be known"),
        ({"delimiter": ""}, "`delimiter` must be one ASCII character.*delimiter=''"),
        ({"delimiter": "::"}, "delimiter='::'"),
        ({"delimiter": "é"}, "delimiter='é'"),
        ({"delimiter": '"'}, "delimiter='\"'"),
        ({"delimiter": "\n"}, r"delimiter='\\n'"),
        ({"delimiter": b","}, "delimiter=b','"),
        ({"delimiter": None}, "delimiter=None"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        HashedDataset("x.csv", **{"encoder": ENCODER, "label": "label", **options})


def test_integers_of_numpy(files):
    numbers = {"batch_size": 50, "chunk_rows": 15, "seed": 3, "process": 1, "processes": 2}
    own = {name: np.int64(number) for name, number in numbers.items()}
    data, same = dataset(files, **own), dataset(files, **numbers)
    assert labels_of(data).tolist() == labels_of(same).tolist()
    encoder = HashEncoder({"age": np.int64(50)}, splits=np.int8(2), num_threads=np.int64(2))
    assert HashEncoder.from_json(encoder.to_json()).fingerprint == encoder.fingerprint


@pytest.mark.parametrize("twice", ["label", "city", "other"])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_column_that_is_there_twice(tmp_path, suffix, twice):
    path = tmp_path / f"twice.{suffix}"
    names = ["label", "city", "age", "other", twice]
    if suffix == "csv":
        path.write_text(",".join(names) + "\n1,Rome,3,1.5,0\n")
    else:
        columns = [[1], ["Rome"], [3], [1.5], ["0"] if twice == "city" else [0]]
        pq.write_table(pa.table(columns, names=names), path)
    if twice == "other":  # that column is not asked for
        assert dataset(path)[0][1].tolist() == [[1]]
        return
    with pytest.raises(ValueError, match=f"twice.{suffix} must have each of its.*'{twice}' more"):
        dataset(path)


@pytest.mark.parametrize("value", [2**53, 2**53 + 1, -(2**63), 2**60])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_integers_that_floats_do_not_tell_apart(tmp_path, suffix, value):
    table = frame()
    table.loc[50, "label"] = value
    path = write(tmp_path / f"large.{suffix}", table)
    with pytest.raises(
        ValueError, match=f"large.{suffix}, .*Received: '?{value}'?. Integers must be"
    ):
        dataset(path)
    data = dataset(path, errors="skip", shuffle=False)
    assert labels_of(data).tolist() == [*range(50), *range(51, 100)]
    for good in (2**53 - 1, 1e30):
        table = frame().astype({"label": type(good)})
        table.loc[50, "label"] = good
        write(tmp_path / f"large.{suffix}", table)
        assert dataset(path, shuffle=False)[1][1][18, 0] == np.float32(good)


def test_batches_that_are_not_there(files):
    data = dataset(files)
    for number in (-1, 7):
        with pytest.raises(IndexError, match=f"from 0 to 6. Received: index={number}"):
            data[number]
    for epoch, batch, received in ((-1, 0, "epoch=-1"), ("1", 2, "epoch='1'"), (0, 7, ".*batch=7")):
        with pytest.raises(ValueError, match=f"(or|to) .*Received: {received}"):
            data.resume(epoch, batch)
