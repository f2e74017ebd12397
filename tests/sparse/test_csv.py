"""CSV files of a HashedDataset: rows, lines and quotation marks, compared with Python's `csv`."""

import collections
import csv
import glob
import gzip
import io
import os
import random
import re

import numpy as np
import pytest
from support.sparse_tables import CARDINALITIES, ENCODER, content, plain_codes

from keras_multigpu.sparse import HashedDataset, lines
from keras_multigpu.sparse.lines import count_lines, cut_rows, find_rows

pytestmark = pytest.mark.backend_free


def dataset(files, **options):
    options = {"label": "label", "batch_size": 16, "shuffle": False, **options}
    return HashedDataset(files, ENCODER, **options)


def write(path, data):
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def codes_of(rows):
    """The codes of rows of `label,city,age`; empty fields are missing values."""
    cities, ages = ([row[place] or "nan" for row in rows] for place in (1, 2))
    return plain_codes({"city": cities, "age": ages}, CARDINALITIES)


# Which rows a text has.


def plain_rows(data):
    """Where rows begin and end, and whether they are broken: character by character."""
    rows, start, at, begins = [], 0, 0, True
    line = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n|\Z)")
    field = re.compile(rb'"(?:[^"]|"")*"(?=[,\r\n]|\Z)')
    while at < len(data):
        if begins and data[at : at + 1] == b'"':
            # A longer match is never one of fewer marks: what follows the last mark is no mark.
            found = field.match(data, at)
            if found and data[found.end() : found.end() + 1] != b'"':
                at, begins = found.end(), False
                continue
            at = line.match(data, at).end()
            rows.append((start, at, True))
            start, begins = at, True
        elif data[at : at + 1] in (b"\r", b"\n"):
            at = line.match(data, at).end()
            rows.append((start, at, False))
            start, begins = at, True
        else:
            begins = data[at : at + 1] == b","
            at += 1
    return rows + ([(start, at, False)] if start < at else [])


@pytest.mark.parametrize("texts", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [1, 2, 64])
@pytest.mark.parametrize("weights", [[1, 1, 1, 1, 1, 1], [6, 1, 1, 5, 0, 1], [10, 1, 0, 4, 0, 4]])
def test_rows_of_any_text(seed, weights, texts, monkeypatch):
    draw = random.Random(seed)
    for _ in range(texts):
        tokens = [b"a", b'"', b"\r", b",", b"\n", b'","']
        data = b"".join(draw.choices(tokens, weights, k=draw.choice([5, 20, 60, 200])))
        expected = plain_rows(data)
        broken = [[start, stop] for start, stop, is_broken in expected if is_broken]
        rows = find_rows(data, ",", is_whole=True)
        assert rows.ends.tolist() == [stop for _, stop, _ in expected], data
        assert rows.broken.tolist() == broken, data
        monkeypatch.setattr(lines, "_READ_BYTES", draw.choice([1, 3, 17, 1000]))
        for count in (1, 3):
            ends, parts = [], []
            for piece, text in cut_rows(io.BytesIO(data), ",", count):
                ends.append(piece.start + piece.size)
                parts += (piece.broken + piece.start).tolist()
                assert text == data[piece.start : ends[-1]]
                assert piece.line == 1 + count_lines(data[: piece.start])
            stops = [stop for _, stop, _ in expected]
            assert ends == stops[:1] + stops[1:-1][count - 1 :: count] + stops[1:][-1:], data
            assert parts == broken, data
        assert count_lines(data) == len(re.findall(rb"\r\n|\r|\n", data))


def test_rows_of_quoted_text_are_found_in_one_pass(monkeypatch):
    monkeypatch.setattr(lines, "_find_rows_by_fields", None)  # the slow way
    text = b'"a","b, c",""\r\n1,"two\nlines","""x"", y"\r\n"",3,"""a"""\r' * 1000
    assert find_rows(text, ",", is_whole=True).ends.tolist() == [e for _, e, _ in plain_rows(text)]


def test_a_mark_that_is_lost_takes_in_a_few_mib_at_most(monkeypatch):
    monkeypatch.setattr(lines, "_LONGEST", 1000)
    monkeypatch.setattr(lines, "_READ_BYTES", 100)
    data = b'1,"lost\n' + b"2,a\n" * 5000
    file, at = io.BytesIO(data), 0
    for piece, _ in cut_rows(file, ",", 1):
        assert piece.start == at
        assert file.tell() < at + 4000
        at += piece.size
    assert at == len(data)


# Files, as Python's `csv` reads them.


def odd_file(draw):
    """A well-formed file with odd values, and its rows."""
    words = ["", "a", "Rome", ",", '"', '""', "\n", "\r"]
    words += ["\r\n", "é", " ", "x,", '5"', "\ufeff", "'"]
    quoting = draw.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
    end = draw.choice(["\n", "\r\n", "\r"])
    text = io.StringIO(newline="")
    if draw.random() < 0.3:
        text.write("\ufeff")

    def write_row(*row):
        line = io.StringIO(newline="")
        csv.writer(line, quoting=quoting).writerow(row)  # quotes CR and LF, whatever ends lines
        text.write(line.getvalue().removesuffix("\r\n") + end)

    write_row("label", "city", "age")
    for number in range(draw.choice([1, 3, 10, 40])):
        city = "".join(draw.choices(words, k=draw.choice([0, 1, 3])))
        write_row(number, city, draw.choice(["", "7", "41"]))
        if draw.random() < 0.1:
            text.write(end)
        if '"' not in city and draw.random() < 0.1:
            text.write(f'{number + 0.5},5" {draw.choice(["x", "pipe"])},8{end}')
    data = text.getvalue()
    data = data.removesuffix(end) if draw.random() < 0.3 else data
    rows = list(csv.reader(io.StringIO(data.removeprefix("\ufeff"), newline="")))
    return data.encode(), [row for row in rows[1:] if row]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))]
)
def test_files_as_pythons_csv_reads_them(tmp_path, seed, monkeypatch):
    draw = random.Random(seed)
    for number in range(60):
        data, rows = odd_file(draw)
        monkeypatch.setattr(lines, "_READ_BYTES", draw.choice([1, 11, 2**18]))
        path = write(tmp_path / f"{number}.csv{draw.choice(['', '.gz'])}", data)
        labels, indices = content(dataset(path, chunk_rows=draw.choice([1, 3, 1000])))
        assert labels == [float(row[0]) for row in rows], data
        np.testing.assert_array_equal(indices, codes_of(rows), str(data))


@pytest.mark.parametrize("seed", range(4))
def test_bad_rows_of_odd_files(tmp_path, seed):
    """Each error names the line of its row; without them all other rows are there."""
    draw = random.Random(seed)
    bad_rows = {"1,a": "2 fields", "1,a,b,c": "4 fields", "x,a,7": "'x'", '1,"a"b,7': '"a"b'}
    for number in range(40):
        end = draw.choice(["\n", "\r\n", "\r"])
        good = [f'{n},"city{end}""{n}""",7{end}' for n in range(draw.choice([2, 9]))]
        bad, message = draw.choice(list(bad_rows.items()))
        place = draw.randrange(len(good) + 1)
        text = f"label,city,age{end}" + draw.choice(["", end]) + "".join(good[:place])
        line = len(re.findall("\r\n|\r|\n", text)) + 1
        path = write(
            tmp_path / f"{number}.csv", (text + bad + end + "".join(good[place:])).encode()
        )
        chunk_rows = draw.choice([1, 2, 1000])
        with pytest.raises(ValueError, match=f"line {line}: .*Received.*{re.escape(message)}"):
            dataset(path, chunk_rows=chunk_rows)
        data = dataset(path, chunk_rows=chunk_rows, errors="skip")
        rows = [[str(n), f'city{end}"{n}"', "7"] for n in range(len(good))]
        labels, indices = content(data)
        assert labels == list(range(len(good)))
        np.testing.assert_array_equal(indices, codes_of(rows))
        assert sum(data.skipped.values()) == 1


def test_a_broken_row_of_several_lines_is_left_out_as_one(tmp_path):
    text = b'label,city,age\n1,"two\nlines","lost\n2,Rome,7\n3,"Oslo",7\n'
    with pytest.raises(ValueError, match="line 2: a field that begins with a quotation mark"):
        dataset(write(tmp_path / "a.csv", text))
    for chunk_rows in (1, 100):
        data = dataset(tmp_path / "a.csv", errors="skip", chunk_rows=chunk_rows)
        assert content(data)[0] == [2, 3]
        assert data.skipped == collections.Counter({"malformed": 1})


@pytest.mark.parametrize("end", [b"\r", b"\r\n", b"\n"])
@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_line_ends(tmp_path, end, suffix):
    rows = [[str(n), f"city {n % 9}", "7"] for n in range(1000)]
    text = end.join([b"label,city,age", *(",".join(row).encode() for row in rows), b""])
    labels, indices = content(dataset(write(tmp_path / f"a.{suffix}", text), chunk_rows=64))
    assert labels == list(range(1000))
    np.testing.assert_array_equal(indices, codes_of(rows))


def test_a_long_field_in_a_bad_row(tmp_path):
    """Longer than Python's `csv` takes."""
    text = "label,city,age\n" + f"x,{'a' * 200_000},7\n"
    with pytest.raises(ValueError, match="line 2: 'label' must be a finite number"):
        dataset(write(tmp_path / "a.csv", text.encode()))
    with pytest.raises(ValueError, match=r"a.csv must begin with a header.* Received: 'aaaa"):
        dataset(write(tmp_path / "a.csv", b"a" * 200_000))


# Files that change, and names.


def text_of(rows):
    return b"label,city,age\n" + b"".join(b"1,city %d,7\n" % number for number in rows)


def changed(path, how):
    if how == "shorter":
        write(path, text_of(range(500)))
    elif how == "other rows":
        write(path, text_of(reversed(range(1000))))
    elif how == "replaced":
        other = write(path.with_name("other" + path.suffix), text_of(range(900)))
        os.replace(other, path)
    elif how == "longer":
        with open(path, "ab") as file:
            file.write(b"1,Rome,7\n")
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["shorter", "other rows", "replaced", "longer", "gone"])
@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
@pytest.mark.parametrize("errors", ["raise", "skip"])
def test_a_file_that_changes_while_it_is_read(tmp_path, how, suffix, errors):
    path = write(tmp_path / f"a.{suffix}", text_of(range(1000)))
    os.utime(path, (1, 1))
    data = dataset(path, chunk_rows=100, errors=errors)
    data[0]
    changed(path, how)
    message = f"{re.escape(str(path))} must stay as it was when it was scanned.* Received: "
    with pytest.raises(ValueError, match=message):
        content(data)


def test_a_file_of_other_rows_with_the_same_time_and_size(tmp_path):
    path = write(tmp_path / "a.csv", text_of(range(100, 900)))
    os.utime(path, (1, 1))
    data = dataset(path, chunk_rows=100)
    write(path, text_of(range(100, 900)).replace(b"1,city 444,7\n", b"\n" * 13))
    os.utime(path, (1, 1))
    with pytest.raises(
        ValueError, match="a.csv must stay .* Received: 99 rows where there were 100"
    ):
        content(data)


def test_a_file_that_changes_while_it_is_scanned(tmp_path, monkeypatch):
    path = write(tmp_path / "a.csv", text_of(range(1000)))

    def cut(*arguments):
        for piece in cut_rows(*arguments):
            os.utime(path, (1, 1))
            yield piece

    monkeypatch.setattr("keras_multigpu.sparse.csv_source.cut_rows", cut)
    with pytest.raises(ValueError, match="a.csv must stay as it was when it was scanned"):
        dataset(path)


def test_a_path_that_exists_is_no_pattern(tmp_path):
    for name, number in (("x[1].csv", 1), ("x1.csv", 2), ("y?.csv", 3), ("y1.csv", 4)):
        write(tmp_path / name, b"label,city,age\n%d,Rome,7\n" % number)
    assert content(dataset(tmp_path / "x[1].csv"))[0] == [1]
    assert content(dataset(tmp_path / "y?.csv"))[0] == [3]
    assert content(dataset(tmp_path / "x[12].csv"))[0] == [2]
    assert content(dataset(glob.escape(str(tmp_path)) + "/x*.csv"))[0] == [2, 1]
    with pytest.raises(ValueError, match=r"Received: .*z\[1\].csv', which matches none, and no fi"):
        dataset(tmp_path / "z[1].csv")
