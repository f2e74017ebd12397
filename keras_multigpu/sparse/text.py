"""The text of a value: what is hashed.

It is what Python's `str` gives, as far as `str` gives one answer wherever the value comes from:

| value | text |
|---|---|
| string | itself |
| integer, of any width | its decimal digits: `7`, `-7` |
| float64 | Python's `str`: `7.0`, `0.1`, `1e+16`, `inf`; `0.0` for -0.0 too, which is equal |
| float32, float16 | that of the shortest decimal that is rounded to it: `0.1`, as of float64 |
| boolean | `True`, `False` |
| bytes | the bytes are hashed as they are, so those of UTF-8 text are that text's |
| missing: `None`, not-a-number, `NaT`, `pandas.NA`, a null | `nan`, unless chosen otherwise |
| category | the text of its value |

A column of integers with missing values is one of floats in pandas: the texts are `7.0`, not `7`.
Read it as `Int64`, or fill it, to have those of integers. Other types (dates, decimals, lists) are
refused: their texts differ from one library to the next.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MISSING = "nan"


def is_text(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type are hashed as they are stored."""
    return (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def has_text(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type have a text."""
    types = pa.types
    rules = (types.is_integer, types.is_floating, types.is_boolean, types.is_null)
    return is_text(kind) or any(rule(kind) for rule in rules)


def texts(values: pa.Array, missing: str = MISSING) -> pa.Array:
    """The texts of values, as Arrow strings or bytes.

    Args:
        values: an Arrow array without nulls, of a type that `has_text`. Where speed counts, give
            each distinct value once: floats are written one by one.
        missing: the text of not-a-number.

    Example:
        >>> texts(pa.array([0.1, 1e16, float("nan")])).to_pylist()
        ['0.1', '1e+16', 'nan']
        >>> texts(pa.array([0.1], pa.float32())).to_pylist()
        ['0.1']
        >>> texts(pa.array([True, False])).to_pylist()
        ['True', 'False']
        >>> texts(pa.array([7, -7])).to_pylist()
        ['7', '-7']
    """
    kind = values.type
    if is_text(kind):
        return values
    if pa.types.is_boolean(kind):
        return pc.if_else(values, "True", "False")
    if pa.types.is_floating(kind):
        to_double = float if pa.types.is_float64(kind) else _shortest
        doubles = map(to_double, values.to_numpy(zero_copy_only=False))
        return pa.array((missing if x != x else str(x + 0.0) for x in doubles), pa.string())
    return values.cast(pa.string())


def _shortest(number: np.floating) -> float:
    """The shortest decimal that is rounded to a number of fewer bits, as a float64."""
    return float(np.format_float_scientific(number, unique=True))
