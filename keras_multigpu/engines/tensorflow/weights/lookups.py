"""Sums of rows of a table that the devices have in parts, as calls of functions with known names.

Each does what `rows.py` does. A partitioner that knows the names (`partition/rules/tables.py`)
computes them where the rows are; so only indices and sums cross, however large the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.tensorflow.weights import rows
from keras_multigpu.engines.tensorflow.weights.divided import division_of, in_trace
from keras_multigpu.engines.values import Tensor

SUMS, GRADIENT, ROWS, BY_WEIGHTS = (
    f"keras_multigpu_{one}" for one in ("sums", "gradient", "rows", "by_weights")
)
"""The sums; the table's gradient, dense or of the touched rows; and that of the weights."""


def look_up(
    table: keras.Variable, indices: Tensor, weights: Tensor | None, dtype: str | None
) -> Tensor | None:
    """`sum_rows` of a table whose rows are spread; `None` if it has to be read whole."""
    division = division_of(table)
    if division is None or division.axis or not in_trace():
        return None
    stored, kind = table._value.read_value(), tf.as_dtype(dtype or table.dtype)
    return rows.sum_rows(stored, indices, weights, table.names_rows_once, kind, _call)


def _call(name: str, run: Callable[..., Any], *tensors: Tensor) -> Any:
    run.__name__ = f"keras_multigpu_{name}"
    return tf.function(run, autograph=False)(*tensors)
