"""Text files, plain or compressed, in parts of whole lines or of whole rows of CSV.

In CSV, line ends inside quoted fields end no row.
"""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import csv as arrow_csv

from keras_multigpu.arguments import check_choice
from keras_multigpu.progress import ReadingBar
from keras_multigpu.sparse.sources import BadDataError, explaining_damage

_QUOTE, _NEWLINE, _RETURN = b'"\n\r'
_BYTE_ORDER_MARK = "\ufeff".encode()
_BLOCK_BYTES = 4 * 2**20
_READ_BYTES = 2**18
_LONGEST = 4 * 2**20  # bytes of a quoted field without an end; if it is longer, a mark is missing


class Rows(NamedTuple):
    """The byte after each row of a text; and where broken rows begin and end, `(rows, 2)`.

    A row is broken if a quoted field does not end before a delimiter or a line end.
    """

    ends: np.ndarray
    broken: np.ndarray


class Piece(NamedTuple):
    """Where in the file, once decompressed, some rows are; `broken` is as in `Rows`.

    `start` is the first byte, `line` the number of the first line, from 1.
    """

    start: int
    size: int
    line: int
    broken: np.ndarray


def open_decompressed(raw: BinaryIO, path: str) -> Any:
    """An open file, decompressed while it is read if its name ends in `.gz`."""
    return gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw


def check_file(path: Any, errors: Any) -> tuple[str, bool]:
    """A path as text, and whether to leave out bad lines."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"`path` must be the path of one file. Received: path={path!r}.")
    check_choice("errors", errors, "raise", "skip")
    return os.fspath(path), errors == "skip"


def read_lines(
    path: str, verbose: int = 0, size: int = _BLOCK_BYTES
) -> Iterator[tuple[int, bytes]]:
    """A file in blocks of whole lines, about `size` bytes each, with the first line's number.

    If it can't be read, a `BadDataError` says so. `verbose=1` shows a progress bar.
    """
    bar = ReadingBar([path], verbose)
    line = 1
    with explaining_damage(path), open(path, "rb") as raw, open_decompressed(raw, path) as file:
        while block := file.read(size) + file.readline():
            bar.show(0, raw.tell())
            yield line, block.removeprefix(_BYTE_ORDER_MARK) if line == 1 else block
            line += block.count(b"\n")
    bar.finish()


def explain_line(path: str, number: int, problem: str) -> BadDataError:
    """The error for a bad line."""
    return BadDataError(
        f'{path}, line {number}: {problem} Fix the file, or leave such lines out: errors="skip".'
    )


def cut_rows(file: BinaryIO, delimiter: str, count: int) -> Iterator[tuple[Piece, bytes]]:
    """A CSV file in pieces: first the header, then pieces of `count` rows; the last has fewer."""
    start, line, wanted = 0, 1, 1
    text, ends, broken = bytearray(), np.empty(0, int), np.empty((0, 2), int)  # of whole rows
    more = rest = file.read(_READ_BYTES)
    while len(ends) or rest:
        rows = find_rows(rest, delimiter, is_whole=not more)
        ends = np.concatenate([ends, rows.ends + len(text)])
        broken = np.concatenate([broken, rows.broken + len(text)])
        end = int(rows.ends[-1]) if len(rows.ends) else 0
        text += rest[:end]
        while len(ends) >= wanted or (len(ends) and not more):
            stop = int(ends[:wanted][-1])
            bad = np.searchsorted(broken[:, 0], stop)
            data = bytes(text[:stop])
            yield Piece(start, stop, line, broken[:bad]), data
            start, line = start + stop, line + count_lines(data)
            del text[:stop]
            ends, broken, wanted = ends[wanted:] - stop, broken[bad:] - stop, count
        more = file.read(max(_READ_BYTES, len(rest) - end))  # a long row is searched few times
        rest = rest[end:] + more


def read_fields(
    data: bytes, header: list[str], wanted: list[str], *, has_nulls: bool = True, **options: Any
) -> tuple[pa.Table, list[Any]]:
    """Columns of a text as bytes, and the rows that have too few or too many fields.

    Empty fields are nulls if it `has_nulls`. `options` are those of Arrow's `ParseOptions`.
    """
    malformed: list[Any] = []

    def skip(row: Any) -> str:
        malformed.append(row)
        return "skip"

    if not data.strip(b"\r\n"):
        return pa.table({name: pa.array([], pa.binary()) for name in wanted}), []
    if data.startswith(_BYTE_ORDER_MARK):
        data = _BYTE_ORDER_MARK + data  # Arrow drops one; after the header it belongs to a value
    table = arrow_csv.read_csv(
        pa.py_buffer(data),
        # One block, because Arrow does not join rows of two.
        arrow_csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=header),
        arrow_csv.ParseOptions(invalid_row_handler=skip, **options),
        arrow_csv.ConvertOptions(
            include_columns=wanted,
            column_types=dict.fromkeys(wanted, pa.binary()),
            null_values=[""],
            strings_can_be_null=has_nulls,
        ),
    )
    return table, malformed


def find_rows(data: bytes, delimiter: str, *, is_whole: bool) -> Rows:
    r"""Finds the rows of a text that begins with a row.

    Lines end with LF, CR LF or CR, as in Python's `csv`. A quotation mark opens a field if it is
    the field's first character (RFC 4180); elsewhere it is an ordinary character. A broken row
    ends at the end of the line in which the open field begins. Unless the text `is_whole`, its
    last row is not complete.
    """
    are_ends = _are_line_ends(data, is_whole)
    inside_all = _find_quoted(data, delimiter) if b'"' in data else np.zeros(1, dtype=bool)
    if inside_all is not None:
        ends = np.flatnonzero(are_ends & ~inside_all) + 1
        rest = len(data) - (int(ends[-1]) if len(ends) else 0)
        if not inside_all[-1] or not (is_whole or rest >= _LONGEST):
            return Rows(ends, np.empty((0, 2), int))
    return _find_rows_by_fields(data, delimiter, np.flatnonzero(are_ends) + 1, is_whole)


def count_lines(data: bytes) -> int:
    """How many line ends a text has."""
    return int(np.count_nonzero(_are_line_ends(data, is_whole=False))) + data.endswith(b"\r")


def _are_line_ends(data: bytes, is_whole: bool) -> np.ndarray:
    """Which bytes end a line."""
    text = np.frombuffer(data, "uint8")
    is_end = text == _NEWLINE
    if b"\r" in data:
        is_return = text == _RETURN
        is_return[:-1] &= ~is_end[1:]
        is_return[-1] = False  # LF may follow
        is_end |= is_return
    if is_whole and data:
        is_end[-1] = True
    return is_end


def _find_quoted(data: bytes, delimiter: str) -> np.ndarray | None:
    """Which bytes are inside quoted fields, in one fast pass; `None` if that can't be done.

    It works if every mark begins or ends a field, or is one of a pair inside a field, as in files
    that programs wrote. Then every other mark opens a field, or continues it after a pair.
    """
    text = np.frombuffer(data, "uint8")
    are_marks = text == _QUOTE
    are_bounds = are_marks | (text == ord(delimiter)) | (text == _NEWLINE) | (text == _RETURN)
    inside = np.bitwise_xor.accumulate(are_marks)
    opens_late = are_marks[1:] & inside[1:] & ~are_bounds[:-1]
    closes_early = are_marks[:-1] & ~inside[:-1] & ~are_bounds[1:]
    return None if opens_late.any() or closes_early.any() else inside


def _find_rows_by_fields(data: bytes, delimiter: str, lines: np.ndarray, is_whole: bool) -> Rows:
    """`find_rows` for any text, one quoted field after the other; several times slower.

    `lines` are the bytes after each line. A quoted field without an end is broken.
    """
    bound = re.escape(delimiter.encode()) + rb"\r\n"
    inside = rb'[^"]*(?:""[^"]*)*'  # two marks stand for one
    # Only bounds stand before the first mark of a field, and after its last one.
    fields = re.compile(rb'"(?<![^%b]")%b(?:"(?!")(?P<end>(?![^%b])))?' % (bound, inside, bound))
    closed = re.compile(rb'"%b"(?!")' % inside)
    stops_of_lines = np.append(lines, len(data))
    spans, broken, at = [(-1, -1)], [], 0
    while at < len(data):
        for field in fields.finditer(data, at):
            if field["end"] is None:
                break
            spans.append((field.start(), field.end() - 1))
        else:
            break
        begin = field.start()
        if not closed.match(data, begin) and not is_whole and len(data) - begin < _LONGEST:
            spans.append((begin, len(data)))
            break
        broken.append(begin)
        at = int(stops_of_lines[np.searchsorted(lines, begin, "right")])
    starts, stops = np.array(spans).T
    ends = lines[lines > stops[np.searchsorted(starts, lines - 1, "right") - 1]]
    bounds = np.concatenate([[0], ends])
    rows = np.searchsorted(ends, np.array(broken, int), "right")
    rows = rows[rows < len(ends)]
    return Rows(ends, np.stack([bounds[rows], bounds[rows + 1]], axis=1))
