"""Tables of any kind as Arrow columns, and the text of a value, which is what is hashed.

The text is Python's `str` of the value, made the same for every library:

| value | text |
|---|---|
| string | itself |
| integer, of any width | its decimal digits: `7`, `-7` |
| float64 | Python's `str`: `7.0`, `0.1`, `1e+16`, `inf`; -0.0 equals 0.0 and has its text |
| float32, float16 | the shortest decimal that rounds to it: `0.1`, as for float64 |
| boolean | `True`, `False` |
| bytes | hashed as they are: UTF-8 bytes have the hash of their text |
| missing: `None`, not-a-number, `NaT`, `pandas.NA`, a null | `nan`, or the text that you choose |
| category | the text of its value |

A text is missing too if it is one of the encoder's `missing_values`.

pandas turns integers with missing values into floats, whose texts are `7.0`, not `7`: a warning
says so. Read such a column as `Int64`, or fill it, to get the texts of integers. Other types
(dates, decimals, lists) are refused: their texts differ between libraries.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keras_multigpu.arguments import short

_KINDS = "a pandas or polars DataFrame, a pyarrow Table, or a dict from names to arrays"
Columns = dict[str, pa.ChunkedArray]


def is_text(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type are hashed as they are stored."""
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def has_text(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type have a text."""
    types = pa.types
    rules = (types.is_integer, types.is_floating, types.is_boolean, types.is_null)
    return is_text(kind) or any(rule(kind) for rule in rules)


def to_texts(values: pa.Array) -> pa.Array:
    """The texts of values; those of nulls and of not-a-number are null.

    Pass distinct values where speed counts: floats are converted one by one.
    """
    kind = values.type
    if is_text(kind):
        return values
    if pa.types.is_boolean(kind):
        return pc.if_else(values, "True", "False")
    if pa.types.is_floating(kind):
        to_double = float if pa.types.is_float64(kind) else _shortest
        doubles = map(to_double, values.to_numpy(zero_copy_only=False))
        return pa.array((None if x != x else str(x + 0.0) for x in doubles), pa.string())
    return values.cast(pa.string())


def _shortest(number: np.floating) -> float:
    """The shortest decimal that rounds to a number of fewer bits, as a float64."""
    return float(np.format_float_scientific(number, unique=True))


def is_table(value: Any) -> bool:
    """Whether a value is one table, rather than a stream of tables."""
    frames = [_find_class("pandas", "DataFrame"), _find_class("polars", "DataFrame")]
    return isinstance(value, (pa.Table, pa.RecordBatch, Mapping, *filter(None, frames)))


def find_names(table: Any) -> list[str]:
    """The names of a table's columns, in order."""
    if not is_table(table):
        raise TypeError(
            f"A table must be {_KINDS}. Received: table={short(table)} (of type "
            f"{type(table).__module__}.{type(table).__name__}). Name the columns: "
            '`{"city": array, ...}`. Call `collect()` on a polars LazyFrame.'
        )
    if isinstance(table, (pa.Table, pa.RecordBatch)):
        return list(table.schema.names)
    return list(table) if isinstance(table, Mapping) else list(table.columns)


def to_columns(table: Any, names: Sequence[str], *, others: str = "error") -> Columns:
    """The named columns of a table as Arrow arrays of plain text or numbers, or dictionaries.

    `others="ignore"` accepts a table with other columns.
    """
    found = find_names(table)
    _check_names(found, names, others)
    columns = {name: _to_arrow(table[name], name) for name in names}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"All columns must have the same number of rows. Received: {lengths}.")
    if not any(lengths.values()):
        raise ValueError(
            "A table must have at least one row. Received: a table with no rows. Leave empty "
            "tables out of the stream."
        )
    return columns


def _check_names(found: Sequence[str], names: Sequence[str], others: str) -> None:
    missing, unknown, twice = compare_names(found, names)
    if missing:
        raise ValueError(
            f"A table must have the columns {list_names(names)}. Received: a table with "
            f"{list_names(found) or 'no columns'}; missing: {missing}."
        )
    if unknown and others == "error":
        raise ValueError(
            f"A table must have the columns {list_names(names)} and no others. "
            f"Received: unknown columns {unknown}. Leave them out, or create "
            'the encoder with `others="ignore"`.'
        )
    if twice:
        raise ValueError(
            f"A table's columns must have different names. Received: {twice} more than once."
        )


def compare_names(found: Sequence[str], wanted: Sequence[str]) -> tuple[str, str, str]:
    """The wanted names that are missing, the names not wanted, the wanted ones found twice."""
    missing = [name for name in wanted if name not in found]
    unknown = [name for name in found if name not in wanted]
    twice = [name for name in wanted if list(found).count(name) > 1]
    return list_names(missing), list_names(unknown), list_names(twice)


def list_names(names: Iterable[str]) -> str:
    """Names for a message."""
    return ", ".join(map(repr, names))


def _to_arrow(values: Any, name: str) -> pa.ChunkedArray:
    if not isinstance(values, (pa.Array, pa.ChunkedArray)):
        values = _from_python(values, name)
    return _to_plain(pa.chunked_array([values]) if isinstance(values, pa.Array) else values, name)


def _from_python(values: Any, name: str) -> Any:
    polars_series = _find_class("polars", "Series")
    if polars_series is not None and isinstance(values, polars_series):
        if values.dtype != sys.modules["polars"].Object:
            return values.to_arrow()
        values = values.to_numpy()  # `to_arrow` would give the addresses of Python's objects
    _warn_of_integers(values, name)
    array = _as_vector(values, name)
    if array.dtype.kind in "US":
        array = array.astype(object)  # Arrow ends NumPy's texts at the first NUL
    try:
        arrow = pa.array(array, from_pandas=array.dtype == object or None)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        raise TypeError(
            "The values of a column must be of one type that Arrow has. Received: column "
            f"{name!r} with {_types_in(array)}: {error}. Cast it, for example with "
            "`.astype(str)`."
        ) from error
    if array.dtype == object and pa.types.is_floating(arrow.type):
        # Arrow converts integers among floats to floats, whose texts differ.
        kinds = {type(value) for value in array}
        if any(issubclass(kind, (int, np.integer)) for kind in kinds):
            raise TypeError(
                f"The values of a column must be of one type. Received: column {name!r} with "
                f"{_types_in(array)}. Cast it, to floats or to integers."
            )
    return arrow


def _warn_of_integers(values: Any, name: str) -> None:
    """Warns of a pandas column that was integers before it got missing values."""
    series = _find_class("pandas", "Series")
    if series is None or not isinstance(values, series) or values.dtype != np.float64:
        return
    numbers = values.to_numpy()
    rest = numbers[~np.isnan(numbers)]
    finite = rest[np.isfinite(rest)]
    if len(rest) < len(numbers) and finite.size and (rest == np.rint(rest)).all():
        warnings.warn(
            f"A value of column {name!r} has the text '{finite[0]}', not '{finite[0]:.0f}', which "
            "the same value has in a CSV file or as an integer: pandas turns integers into floats "
            "where values are missing. Received: whole numbers, and missing ones, of type "
            "float64. If they are names, read the column as `Int64` or `str`; if not, ignore this.",
            stacklevel=2,
        )


def _as_vector(values: Any, name: str) -> Any:
    """An array of NumPy or pandas; a list becomes an array of objects."""
    array = values
    if not hasattr(values, "dtype"):
        if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise TypeError(
                "A column must be an array or a list, with a value for each row. Received: column "
                f"{name!r}={short(values)}. Put a single value into a list."
            )
        rows = list(values)
        array = np.empty(len(rows), dtype=object)
        array[:] = rows
    if array.ndim != 1:
        raise TypeError(
            "A column must have one axis, the rows. Received: column "
            f"{name!r} of shape {tuple(array.shape)}. Make each of its columns a separate one."
        )
    return array


def _to_plain(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """A column in one of the Arrow layouts that can be hashed."""
    kind = column.type
    is_dictionary = pa.types.is_dictionary(kind)
    values = kind.value_type if is_dictionary else kind
    for is_other, plain in (
        (pa.types.is_string_view, pa.large_string()),
        (pa.types.is_binary_view, pa.large_binary()),
        (pa.types.is_fixed_size_binary, pa.binary()),
        (pa.types.is_null, pa.string()),
    ):
        if is_other(values):
            values = plain
            column = column.cast(pa.dictionary(kind.index_type, plain) if is_dictionary else plain)
    if not has_text(values):
        raise TypeError(
            "A column must hold strings, integers, floats, booleans, bytes or categories of "
            f"these. Received: column {name!r} of type {kind}. Cast it to strings first, in the "
            "form that you want to hash."
        )
    return column


def _types_in(array: Any) -> str:
    kinds = sorted({type(value).__name__ for value in array})
    return f"values of type {', '.join(kinds)}"


def _find_class(module: str, name: str) -> Any:
    """A class of a library, if that library has been imported: else nothing can be of it."""
    return getattr(sys.modules.get(module), name, None)
