"""Text files in parts of whole rows; in CSV, line ends inside quoted fields end no row."""

from __future__ import annotations

import dataclasses
import gzip
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

_QUOTE, _NEWLINE, _RETURN = b'"\n\r'
_READ_BYTES = 2**18
_LONGEST = 4 * 2**20  # bytes of a quoted field without an end; if it is longer, a mark is missing
_FEW = 64  # runs of marks to follow at first; then twice as many, and so on


class Rows(NamedTuple):
    """The rows of a text.

    Attributes:
        ends: the byte behind each row.
        broken: the first byte of each broken row, and the byte behind it, of shape `(rows, 2)`. A
            row is broken if a quoted field does not end before a delimiter or a line end.
    """

    ends: np.ndarray
    broken: np.ndarray


def decompressed(raw: BinaryIO, path: str) -> Any:
    """An open file, decompressed while it is read if its name ends in `.gz`."""
    return gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw


def read_parts(
    file: BinaryIO, size: int, cut: Callable[[bytes, bool], tuple[int, Any]]
) -> Iterator[tuple[bytes, Any]]:
    """The text of a file in parts of whole rows.

    `cut` gets a text, and whether the file ends there. It returns where the last whole row ends,
    and anything that is to be yielded with these rows.
    """
    kept = b""
    while True:
        more = file.read(max(size, len(kept)))  # a long row is searched few times
        kept += more
        end, found = cut(kept, not more)
        if end:
            yield kept[:end], found
            kept = kept[end:]
        if not more:
            return


def read_rows(file: BinaryIO, delimiter: str) -> Iterator[tuple[bytes, Rows]]:
    """The text of a CSV file in parts of whole rows, with their rows."""

    def cut(data: bytes, is_whole: bool) -> tuple[int, Rows]:
        rows = find_rows(data, delimiter, is_whole=is_whole)
        return (int(rows.ends[-1]) if len(rows.ends) else 0), rows

    return read_parts(file, _READ_BYTES, cut)


def find_rows(data: bytes, delimiter: str, *, is_whole: bool) -> Rows:
    r"""Finds the rows of a text that begins with a row.

    Lines end with LF, CR LF or CR, as in Python's `csv`. A quotation mark opens a field if it is
    the field's first character (RFC 4180); elsewhere it is an ordinary character. A broken row
    ends at the end of the line in which the open field begins.

    Args:
        data: the text.
        delimiter: the ASCII character between fields.
        is_whole: whether the text is complete. Otherwise its last row is not.

    Example:
        >>> text = b'1,"Rome\nItaly"\n2,"Oslo\n3,"Bern"\n'
        >>> rows = find_rows(text, ",", is_whole=True)
        >>> rows.ends.tolist(), rows.broken.tolist()
        ([15, 23, 32], [[15, 23]])
    """
    are_ends = _are_line_ends(data, is_whole)
    inside_all = _find_quoted(data, delimiter) if b'"' in data else np.zeros(1, dtype=bool)
    if inside_all is not None:
        ends = np.flatnonzero(are_ends & ~inside_all) + 1
        rest = len(data) - (int(ends[-1]) if len(ends) else 0)
        if not inside_all[-1] or not (is_whole or rest >= _LONGEST):
            return Rows(ends, np.empty((0, 2), int))
    return _find_rows_by_runs(data, delimiter, np.flatnonzero(are_ends) + 1, is_whole)


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


def _find_rows_by_runs(data: bytes, delimiter: str, lines: np.ndarray, is_whole: bool) -> Rows:
    """`find_rows` for any text; several times slower than `_find_quoted`."""
    runs = _Runs.of(data, delimiter)
    inside = np.zeros(len(runs.begins) + 1, dtype=bool)  # the last one: before the first run
    broken, at = [], 0
    while (open_field := runs.follow(at, inside)) is not None:
        begin = runs.begins[open_field.run]
        if open_field.is_last and not is_whole and len(data) - begin < _LONGEST:
            break
        line = int(np.searchsorted(lines, begin, "right"))
        stop = lines[line] if line < len(lines) else len(data)
        at = int(np.searchsorted(runs.begins, stop))
        inside[open_field.run : at] = False
        broken.append(begin)
    ends = lines[~inside[np.searchsorted(runs.begins, lines) - 1]]
    bounds = np.concatenate([[0], ends])
    rows = np.searchsorted(ends, np.array(broken, int), "right")
    rows = rows[rows < len(ends)]
    return Rows(ends, np.stack([bounds[rows], bounds[rows + 1]], axis=1))


class _OpenField(NamedTuple):
    """A quoted field without an end: the run that opens it, and whether no other run follows."""

    run: int
    is_last: bool


@dataclasses.dataclass(frozen=True)
class _Runs:
    """The runs of adjacent quotation marks of a text.

    The effect of a run depends on whether its length is odd. Outside of a quoted field, a run at
    the beginning of a field opens one (odd) or is an empty one (even); other runs are ordinary
    characters. Inside, a pair of marks stands for one mark, and the last mark of an odd run ends
    the field.

    Attributes:
        begins: the first byte of each run.
        are_odd: whether its length is odd.
        at_begin: whether it is at the beginning of a field.
        at_end: whether it is at the end of a field, or of the text.
    """

    begins: np.ndarray
    are_odd: np.ndarray
    at_begin: np.ndarray
    at_end: np.ndarray

    @classmethod
    def of(cls, data: bytes, delimiter: str) -> _Runs:
        """Finds the runs of a text."""
        text = np.frombuffer(data, "uint8")
        marks = np.flatnonzero(text == _QUOTE)
        is_first = np.ones(len(marks), dtype=bool)
        is_first[1:] = np.diff(marks) > 1
        first = np.flatnonzero(is_first)
        begins = marks[first]
        ends = marks[np.append(first[1:], len(marks)) - 1] + 1
        is_bound = np.zeros(256, dtype=bool)
        is_bound[[ord(delimiter), _NEWLINE, _RETURN]] = True
        at_begin, at_end = is_bound[text[begins - 1]], is_bound[text[ends % len(text)]]
        at_begin[0] |= begins[0] == 0
        at_end[-1] |= ends[-1] == len(text)
        return cls(begins, (ends - begins) % 2 == 1, at_begin, at_end)

    def follow(self, first: int, inside: np.ndarray) -> _OpenField | None:
        """Writes, from run `first` on, which runs are followed by text inside of quoted fields.

        The text before `first` ends outside of a quoted field. Returns the first field without an
        end; `None` if every field ends.
        """
        at, count, is_open = first, _FEW, False
        while at < len(self.begins):
            part = slice(at, min(at + count, len(self.begins)))
            are_odd, at_begin = self.are_odd[part], self.at_begin[part]
            # An odd run at a begin switches outside and inside; any other odd run leads outside.
            turns = np.cumsum(are_odd & at_begin) + is_open
            turns_before = np.maximum.accumulate(np.where(are_odd & ~at_begin, turns, 0))
            after = (turns - turns_before) % 2 == 1
            before = np.concatenate([[is_open], after[:-1]])
            inside[part] = after
            is_wrong = ~self.at_end[part] & np.where(before, are_odd, at_begin & ~are_odd)
            if is_wrong.any():
                wrong = int(np.argmax(is_wrong))
                return _OpenField(self._opening(first, at + wrong, inside), is_last=False)
            at, count, is_open = part.stop, 2 * count, bool(after[-1])
        return _OpenField(self._opening(first, at, inside), is_last=True) if is_open else None

    def _opening(self, first: int, run: int, inside: np.ndarray) -> int:
        """The run that opens the field around a run; the run itself outside of fields."""
        outside = np.flatnonzero(~inside[first:run])
        return first + int(outside[-1]) + 1 if len(outside) else first
