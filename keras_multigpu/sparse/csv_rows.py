"""Where the rows of CSV text end: newlines inside quoted fields end none."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

import numpy as np

_NEWLINE = ord("\n")
_LONGEST = 4 * 2**20  # bytes of a quoted field; one that is longer has lost its second mark


class Rows(NamedTuple):
    """The rows of a text.

    Attributes:
        ends: behind which bytes rows end.
        broken: the lines, as slices, in which a quoted field begins that does not end before a
            delimiter or at the end of a line.
    """

    ends: np.ndarray
    broken: list[slice]


def find_rows(data: bytes, delimiter: str, *, is_whole: bool) -> Rows:
    r"""Finds the rows of a text that begins with a row.

    A quotation mark opens a field if it is the field's first character (RFC 4180); elsewhere it
    is a character like others. A broken line is a row of its own.

    Args:
        data: the text.
        delimiter: what stands between fields.
        is_whole: whether nothing follows; otherwise a quoted field may go on behind it.

    Example:
        >>> text = b'1,"Rome\nItaly"\n2,"Oslo\n3,"Bern"\n'
        >>> ends, broken = find_rows(text, ",", is_whole=True)
        >>> ends.tolist(), text[broken[0]]
        ([15, 23, 32], b'2,"Oslo\n')
    """
    ends = np.flatnonzero(np.frombuffer(data, "uint8") == _NEWLINE)
    if b'"' not in data:
        return Rows(ends + 1, [])
    opening, field, unfinished = _patterns(delimiter)
    inside = np.zeros(len(ends), dtype=bool)
    broken, at = [], 0
    while found := opening.search(data, at):
        start = found.end() - 1
        if whole := field.match(data, start):
            at = whole.end()
            inside[np.searchsorted(ends, start) : np.searchsorted(ends, at)] = True
        elif not is_whole and len(data) - start < _LONGEST and unfinished.match(data, start):
            inside[np.searchsorted(ends, start) :] = True
            break
        else:
            at = data.find(b"\n", start) + 1 or len(data)
            broken.append(slice(data.rfind(b"\n", 0, start) + 1, at))
    return Rows(ends[~inside] + 1, broken)


@functools.cache
def _patterns(delimiter: str) -> tuple[re.Pattern[bytes], ...]:
    """A mark that opens a field; such a field; one that has not ended where the text does."""
    between = re.escape(delimiter.encode())
    body = rb'"[^"]*(?:""[^"]*)*'
    return (
        re.compile(rb'(?:\A|(?<=\n)|(?<=%s))"' % between),
        re.compile(body + rb'"(?=%s|\r?\n|\r?\Z)' % between),
        re.compile(body + rb'"?\Z'),
    )
