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
    stored, kept = table._value.read_value(), table._value.dtype
    dtype = tf.as_dtype(dtype or table.dtype)
    if indices.dtype not in (tf.int32, tf.int64):
        indices = tf.cast(indices, tf.int64)
    shape = tf.constant(stored.shape.as_list(), tf.int64)
    indices, weighted = tf.identity(indices), [] if weights is None else [tf.identity(weights)]

    @tf.custom_gradient
    def looked_up(stored: Tensor, *weights: Tensor) -> Any:
        def backward(upstream: Tensor) -> Any:
            if table.names_rows_once:
                found = _call(
                    ROWS, _touched(stored.shape, kept), shape, upstream, indices, *weights
                )
                gradient = tf.IndexedSlices(
                    *found, tf.constant(stored.shape.as_list(), indices.dtype)
                )
            else:
                gradient = _call(
                    GRADIENT, _dense(stored.shape, kept), shape, upstream, indices, *weights
                )
            if not weights:
                return gradient
            return gradient, _call(BY_WEIGHTS, _by_weights(dtype), stored, upstream, indices)

        return _call(SUMS, _sums(dtype), stored, indices, *weights), backward

    return looked_up(stored, *weighted)


def _call(name: str, run: Callable[..., Any], *tensors: Tensor) -> Any:
    run.__name__ = name
    return tf.function(run, autograph=False)(*tensors)


def _sums(dtype: tf.DType) -> Callable[..., Any]:
    def run(stored: Tensor, indices: Tensor, weights: Tensor | None = None) -> Tensor:
        return rows.add_up(tf.cast(stored, dtype), indices, weights)

    return run


def _dense(shape: tf.TensorShape, kept: tf.DType) -> Callable[..., Any]:
    def run(
        size: Tensor, upstream: Tensor, indices: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        gradient = rows.of_all_rows(upstream, indices, weights, shape, upstream.dtype)
        return tf.cast(gradient, kept)

    return run


def _touched(shape: tf.TensorShape, kept: tf.DType) -> Callable[..., Any]:
    def run(
        size: Tensor, upstream: Tensor, indices: Tensor, weights: Tensor | None = None
    ) -> list[Tensor]:
        found = rows.of_rows_touched(upstream, indices, weights, shape, upstream.dtype)
        return [tf.cast(found.values, kept), found.indices]

    return run


def _by_weights(dtype: tf.DType) -> Callable[..., Any]:
    def run(stored: Tensor, upstream: Tensor, indices: Tensor) -> Tensor:
        return rows.of_weights(tf.cast(stored, dtype), upstream, indices)

    return run
