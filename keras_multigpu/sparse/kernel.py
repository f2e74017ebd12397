"""The code of a value, straight from the bytes that Arrow stores: compiled by numba.

An implementation of xxh64 (Collet, "xxHash fast digest algorithm", 2012 to 2023, version 0.1.1,
section XXH64) with seed 0. It gives the bits of the library `xxhash`, several times as fast where
a column repeats few values, since no object is made for a value. Needs the extra `sparse-numba`.
"""

from __future__ import annotations

import numba
import numpy as np

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
_ZERO = np.uint64(0)


@numba.njit(nogil=True, cache=True)
def write_codes(data, offsets, out, start, group, bits):  # type: ignore[no-untyped-def]
    """Writes the indices of texts.

    Args:
        data: the bytes of all texts, uint8.
        offsets: where each text begins, and where the last one ends, of shape `(texts + 1,)`.
        out: int32, of shape `(texts, splits)`, to be written.
        start: the column's first index.
        group: the width of a group.
        bits: of the hash, in each group.
    """
    width, splits = np.uint64(group), out.shape[1]
    mask = ~_ZERO if bits == 64 else (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for row in range(out.shape[0]):
        code = _xxh64(data, offsets[row], offsets[row + 1])
        for split in range(splits):
            digits = (code >> np.uint64((splits - 1 - split) * bits)) & mask
            out[row, split] = start + split * group + np.int64(digits % width)


@numba.njit(nogil=True, inline="always")
def _xxh64(data, begin, end):  # type: ignore[no-untyped-def]
    at = begin
    if end - begin >= 32:
        first, second, third, fourth = _P1 + _P2, _P2, _ZERO, _ZERO - _P1
        while at + 32 <= end:
            first = _round(first, _read(data, at, 8))
            second = _round(second, _read(data, at + 8, 8))
            third = _round(third, _read(data, at + 16, 8))
            fourth = _round(fourth, _read(data, at + 24, 8))
            at += 32
        code = _turn(first, 1) + _turn(second, 7) + _turn(third, 12) + _turn(fourth, 18)
        for lane in (first, second, third, fourth):
            code = (code ^ _round(_ZERO, lane)) * _P1 + _P4
    else:
        code = _P5
    code += np.uint64(end - begin)
    while at + 8 <= end:
        code = _turn(code ^ _round(_ZERO, _read(data, at, 8)), 27) * _P1 + _P4
        at += 8
    if at + 4 <= end:
        code = _turn(code ^ (_read(data, at, 4) * _P1), 23) * _P2 + _P3
        at += 4
    while at < end:
        code = _turn(code ^ (np.uint64(data[at]) * _P5), 11) * _P1
        at += 1
    code = (code ^ (code >> np.uint64(33))) * _P2
    code = (code ^ (code >> np.uint64(29))) * _P3
    return code ^ (code >> np.uint64(32))


@numba.njit(nogil=True, inline="always")
def _round(lane, word):  # type: ignore[no-untyped-def]
    return _turn(lane + word * _P2, 31) * _P1


@numba.njit(nogil=True, inline="always")
def _turn(word, bits):  # type: ignore[no-untyped-def]
    return (word << np.uint64(bits)) | (word >> np.uint64(64 - bits))


@numba.njit(nogil=True, inline="always")
def _read(data, at, count):  # type: ignore[no-untyped-def]
    """So many bytes as a little-endian number."""
    word = _ZERO
    for byte in range(count):
        word |= np.uint64(data[at + byte]) << np.uint64(8 * byte)
    return word
