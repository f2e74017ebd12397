"""The rules that merge the replicas' values into the whole batch's: a mean, a sum, ...

A loss or a new state is a number that does not show how it was computed. So it is computed on
made-up rows: for all rows together, and for two parts of them. `find_kinds` returns the rules that
merge the parts' values into the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

Values = Sequence[np.ndarray]

SAME, MEAN, SUM, MAXIMUM, MINIMUM, ROWS = "same", "mean", "sum", "maximum", "minimum", "rows"


_LEAST = 30  # rounding errors of a value


def find_kinds(
    whole: Any, parts: Values, counts: Sequence[int], before: Any = None, is_half: bool = False
) -> set[str]:
    """The rules that merge the parts' values into the value of the whole."""
    whole, parts = np.asarray(whole), [np.asarray(part) for part in parts]
    found = {ROWS} if _are_rows(whole, parts, is_half) else set()
    if any(part.shape != whole.shape for part in parts):
        return found
    start, floor = np.zeros_like(whole), np.zeros(())
    if before is not None and all(map(_is_finite, (before, whole, *parts))):
        # A large counter hardly changes, so its changes are compared, not its values.
        start = np.asarray(before)
        if whole.dtype.kind == "f":
            sizes = np.max([np.abs(one) for one in (start, whole, *parts)], axis=0)
            floor = _LEAST * np.finfo(whole.dtype).eps * sizes

    def is_close(first: Any, second: Any) -> bool:
        return _is_close(first - start, second - start, is_half, floor)

    rules: dict[str, Callable[[], Any]] = {
        SAME: lambda: parts[0],
        MEAN: lambda: sum(n * part for n, part in zip(counts, parts)) / sum(counts),
        SUM: lambda: start + sum(part - start for part in parts),
        MAXIMUM: lambda: np.maximum(*parts),
        MINIMUM: lambda: np.minimum(*parts),
    }
    if whole.dtype.kind not in "fiuc":
        same = [np.array_equal(part, whole) for part in parts]
        return found | ({SAME} if all(same) else set())
    for kind, rule in rules.items():
        needs_all = kind == SAME and not is_close(parts[0], parts[1])
        if not needs_all and is_close(whole, rule()):
            found.add(kind)
    return found


def _is_finite(value: Any) -> bool:
    value = np.asarray(value)
    return value.dtype.kind in "iu" or (value.dtype.kind == "f" and bool(np.isfinite(value).all()))


def _is_close(first: Any, second: Any, is_half: bool, floor: Any = 0.0) -> bool:
    """Whether two arrays are equal within rounding; NaN equals NaN, infinity infinity."""
    first, second = np.asarray(first), np.asarray(second)
    if first.shape != second.shape:
        return False
    if first.dtype.kind in "fc":
        odd = ~np.isfinite(first)
        if not np.array_equal(odd, ~np.isfinite(second)):
            return False
        if not np.array_equal(first[odd], second[odd], equal_nan=True):
            return False
    if first.dtype.kind not in "fc" and second.dtype.kind not in "fc":
        return bool(np.all(first == second))
    first, second = (np.nan_to_num(values, posinf=0.0, neginf=0.0) for values in (first, second))
    size = np.maximum(np.abs(first), np.abs(second))
    # Relative to the largest value of the column, plus a little of the largest of all: a small
    # column is judged by itself, apart from the rounding of large numbers.
    relative, absolute = _tolerances(first.dtype, is_half)
    column = size.max(axis=0, initial=0.0) if size.ndim else size
    within = relative * column + absolute * size.max(initial=0.0) + floor
    return bool(np.all(np.abs(first - second) <= within))


def combine(kind: str, values: Sequence[Any], shares: Sequence[Any], before: Any = None) -> Any:
    """The value of the whole batch, merged from the replicas' values.

    `shares` are the replicas' parts of the rows, 0 for a replica that only has a copy of a row;
    `before` is the old value of a state.
    """
    first, *others = values
    if kind == SAME:
        return first
    if kind in (MAXIMUM, MINIMUM):
        choose = keras.ops.maximum if kind == MAXIMUM else keras.ops.minimum
        for other in others:
            first = choose(first, other)
        return first
    if kind == SUM:
        start = keras.ops.zeros_like(first) if before is None else before
        counted = [keras.ops.cast(keras.ops.sign(share), first.dtype) for share in shares]
        return start + sum(one * (value - start) for one, value in zip(counted, values))
    # Differences from the first value: a state that is equal in all replicas does not drift.
    weights = [keras.ops.cast(share, _wide(first.dtype)) for share in shares[1:]]
    wide = [keras.ops.cast(value, _wide(first.dtype)) for value in values]
    moved = sum((w * (value - wide[0]) for w, value in zip(weights, wide[1:])), 0.0)
    return keras.ops.cast(wide[0] + moved, first.dtype)


def _are_rows(whole: np.ndarray, parts: Values, is_half: bool) -> bool:
    if not whole.ndim or any(part.ndim != whole.ndim for part in parts):
        return False
    if any(part.shape[1:] != whole.shape[1:] for part in parts):
        return False
    joined = np.concatenate(parts)
    if whole.dtype.kind in "OSU":
        return joined.shape == whole.shape and bool(np.all(joined == whole))
    return _is_close(whole, joined, is_half)


def _wide(dtype: Any) -> str:
    name = keras.backend.standardize_dtype(dtype)
    return "float32" if name in ("float16", "bfloat16") else name


def _tolerances(dtype: Any, is_half: bool) -> tuple[float, float]:
    """The largest rounding error, relative to the largest values of a column and of all."""
    # In deep models it is some thousand times the rounding error of one operation.
    if is_half or dtype.itemsize == 2:
        return 5e-2, 1e-2
    return (1e-3, 1e-5) if dtype.itemsize == 4 else (1e-7, 1e-12)
