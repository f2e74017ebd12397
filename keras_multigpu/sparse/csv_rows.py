"""Where the rows of CSV text end: line ends inside quoted fields end none."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

_QUOTE, _NEWLINE, _RETURN = b'"\n\r'
_READ_BYTES = 2**18
_LONGEST = 4 * 2**20  # bytes of a quoted field that has not ended yet: more is a lost mark
_FEW = 64  # runs of marks that are followed at first; then twice as many, and so on


class Rows(NamedTuple):
    """The rows of a text.

    Attributes:
        ends: the byte behind each row.
        broken: where rows begin and end in which a quoted field does not end before a delimiter
            or a line end; of shape `(rows, 2)`.
    """

    ends: np.ndarray
    broken: np.ndarray


def find_rows(data: bytes, delimiter: str, *, is_whole: bool) -> Rows:
    r"""Finds the rows of a text that begins with a row.

    Lines end with LF, CR LF or CR, as for Python's `csv`. A quotation mark opens a field if it is
    the field's first character (RFC 4180); elsewhere it is an ordinary character. A broken row
    ends where the line ends in which its field begins.

    Args:
        data: the text.
        delimiter: the ASCII character between fields.
        is_whole: whether the text ends here. Otherwise its last row is not complete.

    Example:
        >>> text = b'1,"Rome\nItaly"\n2,"Oslo\n3,"Bern"\n'
        >>> rows = find_rows(text, ",", is_whole=True)
        >>> rows.ends.tolist(), rows.broken.tolist()
        ([15, 23, 32], [[15, 23]])
    """
    are_ends = _are_line_ends(data, is_whole)
    inside_all = _inside(data, delimiter) if b'"' in data else np.zeros(1, dtype=bool)
    if inside_all is not None:
        ends = np.flatnonzero(are_ends & ~inside_all) + 1
        rest = len(data) - (int(ends[-1]) if len(ends) else 0)
        if not inside_all[-1] or not (is_whole or rest >= _LONGEST):
            return Rows(ends, np.empty((0, 2), int))
    return _find_rows_by_runs(data, delimiter, np.flatnonzero(are_ends) + 1, is_whole)


def _inside(data: bytes, delimiter: str) -> np.ndarray | None:
    """Which bytes are inside quoted fields; `None` if not all marks begin, end or are in one.

    If they do, as in files that programs wrote, every other mark opens, or continues behind a pair
    of marks that stands for one: one quick pass.
    """
    text = np.frombuffer(data, "uint8")
    are_marks = text == _QUOTE
    are_bounds = are_marks | (text == ord(delimiter)) | (text == _NEWLINE) | (text == _RETURN)
    inside = np.bitwise_xor.accumulate(are_marks)
    opens_late = are_marks[1:] & inside[1:] & ~are_bounds[:-1]
    closes_early = are_marks[:-1] & ~inside[:-1] & ~are_bounds[1:]
    return None if opens_late.any() or closes_early.any() else inside


def _find_rows_by_runs(data: bytes, delimiter: str, lines: np.ndarray, is_whole: bool) -> Rows:
    """See `find_rows`; for any text, and several times as slow as by `_inside`."""
    runs = _Runs.of(data, delimiter)
    inside = np.zeros(len(runs.begins) + 1, dtype=bool)  # the last one: before the first run
    broken, at = [], 0
    while (lost := runs.follow(at, inside)) is not None:
        begin = runs.begins[lost.opening]
        if lost.is_last and not is_whole and len(data) - begin < _LONGEST:
            break
        line = int(np.searchsorted(lines, begin, "right"))
        stop = lines[line] if line < len(lines) else len(data)
        at = int(np.searchsorted(runs.begins, stop))
        inside[lost.opening : at] = False
        broken.append(begin)
    ends = lines[~inside[np.searchsorted(runs.begins, lines) - 1]]
    bounds = np.concatenate([[0], ends])
    rows = np.searchsorted(ends, np.array(broken, int), "right")
    rows = rows[rows < len(ends)]
    return Rows(ends, np.stack([bounds[rows], bounds[rows + 1]], axis=1))


def count_lines(data: bytes) -> int:
    """How many line ends a text has."""
    return int(np.count_nonzero(_are_line_ends(data, is_whole=False))) + data.endswith(b"\r")


def read_rows(file: BinaryIO, delimiter: str) -> Iterator[tuple[bytes, Rows]]:
    """The text of a file in parts of whole rows, with their rows."""
    kept = b""
    while True:
        more = file.read(max(_READ_BYTES, len(kept)))  # so that a long row is searched few times
        kept += more
        rows = find_rows(kept, delimiter, is_whole=not more)
        if len(rows.ends):
            end = int(rows.ends[-1])
            yield kept[:end], rows
            kept = kept[end:]
        if not more:
            return


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


class _Lost(NamedTuple):
    """A quoted field that does not end.

    Attributes:
        opening: the number of the run that opens it.
        is_last: whether it goes on to the end of the text; otherwise a mark stands in it.
    """

    opening: int
    is_last: bool


@dataclasses.dataclass(frozen=True)
class _Runs:
    """The runs of adjacent quotation marks of a text.

    What a run does follows from whether its length is odd. Outside of a quoted field, a run at the
    beginning of a field opens one (odd) or is an empty one (even); others are ordinary characters.
    Inside, pairs of marks stand for one mark, and the last mark of an odd run ends the field.

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
        """The runs of a text."""
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

    def follow(self, first: int, inside: np.ndarray) -> _Lost | None:
        """Tells which runs are followed by text inside of quoted fields.

        Args:
            first: the run to begin with, outside of a quoted field.
            inside: bool, for each run; written from `first` on.

        Returns:
            The first field that does not end; `None` if all do.
        """
        at, count, is_open = first, _FEW, False
        while at < len(self.begins):
            part = slice(at, min(at + count, len(self.begins)))
            are_odd, at_begin = self.are_odd[part], self.at_begin[part]
            # An odd run at a begin turns outside to inside and back; any other ends in outside.
            turns = np.cumsum(are_odd & at_begin) + is_open
            turns_before = np.maximum.accumulate(np.where(are_odd & ~at_begin, turns, 0))
            after = (turns - turns_before) % 2 == 1
            before = np.concatenate([[is_open], after[:-1]])
            inside[part] = after
            is_wrong = ~self.at_end[part] & np.where(before, are_odd, at_begin & ~are_odd)
            if is_wrong.any():
                wrong = int(np.argmax(is_wrong))
                return _Lost(self._opening(first, at + wrong, inside), is_last=False)
            at, count, is_open = part.stop, 2 * count, bool(after[-1])
        return _Lost(self._opening(first, at, inside), is_last=True) if is_open else None

    def _opening(self, first: int, run: int, inside: np.ndarray) -> int:
        """The run that opens the field in which a run is; itself, if it is in none."""
        outside = np.flatnonzero(~inside[first:run])
        return first + int(outside[-1]) + 1 if len(outside) else first
