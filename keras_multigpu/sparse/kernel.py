"""The hash code of a value, computed by numba from the bytes that Arrow stores.

An implementation of xxh64 (Collet, "xxHash fast digest algorithm", 2012 to 2023, version 0.1.1,
section XXH64) with seed 0. It gives the same bits as the library `xxhash`, several times as fast
for short texts, because it makes no Python object for a value. Needs the extra `sparse-numba`.

Positions are unsigned: numba would otherwise support negative ones, and LLVM could no longer load
eight bytes at once. Every number is of an explicit type: numba adds uint64 and int64 as floats.
"""

from __future__ import annotations

import numba
import numpy as np

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
_0, _1, _4, _8, _16, _24, _32 = map(np.uint64, (0, 1, 4, 8, 16, 24, 32))


@numba.njit(nogil=True, cache=True)
def write_codes(data, offsets, out, start, group, bits):  # type: ignore[no-untyped-def]
    """Writes the indices of texts into `out`, int32 of shape `(texts, splits)`.

    `data` are the bytes of all texts, `offsets` where each one begins and the last one ends.
    `start` and `group` are as in `Code`; each group takes so many `bits` of the hash.
    """
    splits = out.shape[1]
    for row in range(out.shape[0]):
        code = _xxh64(data, np.uint64(offsets[row]), np.uint64(offsets[row + 1]))
        if bits == 64:
            out[row, 0] = start + np.int64(code % np.uint64(group))
        else:
            mask = (_1 << np.uint64(bits)) - _1
            for split in range(splits):
                digits = np.uint32((code >> np.uint64((splits - 1 - split) * bits)) & mask)
                # A division of 32 bits is faster.
                out[row, split] = start + split * group + np.int64(digits % np.uint32(group))


@numba.njit(nogil=True, inline="always")
def _xxh64(data, begin, end):  # type: ignore[no-untyped-def]
    at = begin
    if end - begin >= _32:
        first, second, third, fourth = _P1 + _P2, _P2, _0, _0 - _P1
        while at + _32 <= end:
            first = _round(first, _read(data, at, 8))
            second = _round(second, _read(data, at + _8, 8))
            third = _round(third, _read(data, at + _16, 8))
            fourth = _round(fourth, _read(data, at + _24, 8))
            at += _32
        code = _turn(first, 1) + _turn(second, 7) + _turn(third, 12) + _turn(fourth, 18)
        for lane in (first, second, third, fourth):
            code = (code ^ _round(_0, lane)) * _P1 + _P4
    else:
        code = _P5
    code += end - begin
    while at + _8 <= end:
        code = _turn(code ^ _round(_0, _read(data, at, 8)), 27) * _P1 + _P4
        at += _8
    if at + _4 <= end:
        code = _turn(code ^ (_read(data, at, 4) * _P1), 23) * _P2 + _P3
        at += _4
    while at < end:
        code = _turn(code ^ (np.uint64(data[at]) * _P5), 11) * _P1
        at += _1
    code = (code ^ (code >> np.uint64(33))) * _P2
    code = (code ^ (code >> np.uint64(29))) * _P3
    return code ^ (code >> _32)


@numba.njit(nogil=True, inline="always")
def _round(lane, word):  # type: ignore[no-untyped-def]
    return _turn(lane + word * _P2, 31) * _P1


@numba.njit(nogil=True, inline="always")
def _turn(word, bits):  # type: ignore[no-untyped-def]
    return (word << np.uint64(bits)) | (word >> np.uint64(64 - bits))


@numba.njit(nogil=True, inline="always")
def _read(data, at, count):  # type: ignore[no-untyped-def]
    """The `count` bytes at a position as a little-endian number."""
    word = _0
    for byte in range(count):
        word |= np.uint64(data[at + np.uint64(byte)]) << np.uint64(8 * byte)
    return word
