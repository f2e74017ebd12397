"""A table of any kind as columns of Arrow: pandas, polars, pyarrow, or a dict of arrays."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from keras_multigpu.sparse.text import has_text

Columns = dict[str, pa.ChunkedArray]
"""The columns of a table, by name; each has a text, or is a dictionary of values that have."""

_KINDS = "a pandas or polars DataFrame, a pyarrow Table, or a dict from names to arrays"


def is_table(value: Any) -> bool:
    """Whether a value is a table, and not a stream of them."""
    frames = [_loaded("pandas", "DataFrame"), _loaded("polars", "DataFrame")]
    return isinstance(value, (pa.Table, pa.RecordBatch, Mapping, *filter(None, frames)))


def column_names(table: Any) -> list[str]:
    """The names of a table's columns, in order.

    Raises:
        TypeError: if it is no table.

    Example:
        >>> column_names({"city": ["Rome"], "age": [3]})
        ['city', 'age']
    """
    if not is_table(table):
        raise TypeError(
            f"A table must be {_KINDS}. Received: table={_shorten(table)} (of type "
            f"{type(table).__module__}.{type(table).__name__}). Name the columns: "
            '`{"city": array, ...}`; of a polars LazyFrame, `collect()` it.'
        )
    if isinstance(table, (pa.Table, pa.RecordBatch)):
        return list(table.schema.names)
    return list(table) if isinstance(table, Mapping) else list(table.columns)


def to_columns(table: Any, names: Sequence[str], *, others: str = "error") -> Columns:
    """Some columns of a table, as Arrow arrays.

    Args:
        table: a pandas or polars DataFrame, a pyarrow Table or RecordBatch, or a dict from names
            to arrays (NumPy, pandas, polars, pyarrow) or lists.
        names: the columns to take, in this order.
        others: `"error"` to refuse a table with other columns, `"ignore"` to leave them out.

    Raises:
        ValueError: if columns are missing, unknown or of different length, or there are no rows.
        TypeError: if it is no table, or a column's values are of mixed types or have no text.

    Example:
        >>> to_columns({"city": ["Rome", None], "age": [3, 4]}, ["age"], others="ignore")["age"]
        ... # doctest: +ELLIPSIS
        <pyarrow.lib.ChunkedArray object at ...>
        [
          [
            3,
            4
          ]
        ]
    """
    _check_names(column_names(table), names, others)
    columns = {name: _to_arrow(_column(table, name), name) for name in names}
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
    missing = [name for name in names if name not in found]
    unknown = [name for name in found if name not in names]
    if missing:
        raise ValueError(
            f"A table must have the columns {', '.join(map(repr, names))}. Received: a table with "
            f"{', '.join(map(repr, found)) or 'no columns'}; missing: "
            f"{', '.join(map(repr, missing))}."
        )
    if unknown and others == "error":
        raise ValueError(
            f"A table must have the columns {', '.join(map(repr, names))} and no others. "
            f"Received: unknown columns {', '.join(map(repr, unknown))}. Leave them out, or create "
            'the encoder with `others="ignore"`.'
        )
    twice = sorted({name for name in names if list(found).count(name) > 1})
    if twice:
        raise ValueError(
            f"A table's columns must have different names. Received: {', '.join(map(repr, twice))} "
            "more than once."
        )


def _column(table: Any, name: str) -> Any:
    return table.column(name) if isinstance(table, (pa.Table, pa.RecordBatch)) else table[name]


def _to_arrow(values: Any, name: str) -> pa.ChunkedArray:
    if isinstance(values, pa.ChunkedArray):
        chunked = values
    elif isinstance(values, pa.Array):
        chunked = pa.chunked_array([values])
    else:
        array = _from_python(values, name)
        chunked = array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])
    return _plain(chunked, name)


def _from_python(values: Any, name: str) -> Any:
    polars_series = _loaded("polars", "Series")
    if polars_series is not None and isinstance(values, polars_series):
        if values.dtype != sys.modules["polars"].Object:
            return values.to_arrow()
        values = values.to_numpy()  # Python's objects, of which Arrow would be given addresses
    array = _as_vector(values, name)
    if _has_inner_nul(array):
        array = array.astype(object)  # Arrow ends NumPy's texts at the first NUL
    try:
        arrow = pa.array(array, from_pandas=array.dtype == object or None)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        raise TypeError(
            "The values of a column must be of one type that Arrow has. Received: column "
            f"{name!r} with {_types_in(array)}: {error}. Cast it: to strings, say, by "
            "`.astype(str)`."
        ) from error
    if array.dtype == object and pa.types.is_floating(arrow.type):
        # Arrow takes integers among floats to be floats, whose text is another one.
        kinds = {type(value) for value in array}
        if any(issubclass(kind, (int, np.integer)) for kind in kinds):
            raise TypeError(
                f"The values of a column must be of one type. Received: column {name!r} with "
                f"{_types_in(array)}. Cast it, to floats or to integers."
            )
    return arrow


def _as_vector(values: Any, name: str) -> Any:
    """A column of NumPy or pandas, or a list as an array of objects."""
    array = values
    if not hasattr(values, "dtype"):
        if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise TypeError(
                "A column must be an array or a list, with a value for each row. Received: column "
                f"{name!r}={_shorten(values)}. Put a single value into a list."
            )
        rows = list(values)
        array = np.empty(len(rows), dtype=object)
        array[:] = rows
    if array.ndim != 1:
        raise TypeError(
            "A column must have one axis, that of the rows. Received: column "
            f"{name!r} of shape {tuple(array.shape)}. Make each of its columns one of the table."
        )
    return array


def _has_inner_nul(array: Any) -> bool:
    """Whether a text of a NumPy array has a NUL before its last character."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "US" or not array.itemsize:
        return False
    unit = "uint32" if array.dtype.kind == "U" else "uint8"
    characters = np.ascontiguousarray(array).view(unit).reshape(len(array), -1)
    return bool(((characters[:, :-1] == 0) & (characters[:, 1:] != 0)).any())


def _plain(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """A column whose values have a text, in one of the layouts that are hashed."""
    kind = column.type
    is_dictionary = pa.types.is_dictionary(kind)
    values = kind.value_type if is_dictionary else kind
    for is_view, plain in (
        (pa.types.is_string_view, pa.large_string()),
        (pa.types.is_binary_view, pa.large_binary()),
        (pa.types.is_fixed_size_binary, pa.binary()),
    ):
        if is_view(values):
            values = plain
            column = column.cast(pa.dictionary(kind.index_type, plain) if is_dictionary else plain)
    if not has_text(values):
        raise TypeError(
            "A column must hold strings, integers, floats, booleans, bytes or categories of "
            f"these. Received: column {name!r} of type {kind}. Cast it to strings first, in the "
            "form that it is to be hashed in."
        )
    return column


def _types_in(array: Any) -> str:
    kinds = sorted({type(value).__name__ for value in array})
    return f"values of type {', '.join(kinds)}"


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _loaded(module: str, name: str) -> Any:
    """A class of a library that is not imported for it: what is of that class has imported it."""
    return getattr(sys.modules.get(module), name, None)
