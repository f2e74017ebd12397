"""Sums of table rows, with a gradient that is dense or has only the touched rows."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.tensors import add, gradient_order
from keras_multigpu.engines.values import Tensor

# The columns of indices in a block, and the largest number of blocks.
_COLUMNS, _MOST_BLOCKS = 16, 16

_by_rows_touched = contextvars.ContextVar[bool | None]("_by_rows_touched", default=None)


@contextlib.contextmanager
def by_rows_touched(is_allowed: bool = True) -> Iterator[None]:
    """Scope in which table gradients are sparse, also where the layer asked for dense ones.

    Replicas then send only the touched rows, which are summed where they arrive. With
    `is_allowed=False`, scopes within this one have no effect.
    """
    token = _by_rows_touched.set(is_allowed and _by_rows_touched.get() is not False)
    try:
        yield
    finally:
        _by_rows_touched.reset(token)


def sum_rows(
    table: Tensor, indices: Tensor, weights: Tensor | None, sparse_gradient: bool
) -> Tensor:
    """`sum_j weights[:, j] * table[indices[:, j]]`, of shape `(rows, units)`.

    TensorFlow's gradient of `tf.gather` repeats a row for every use, and Keras's optimizers
    would square each part instead of the sum. Here each row comes once.
    """
    if indices.dtype not in (tf.int32, tf.int64):
        indices = tf.cast(indices, tf.int64)
    # Dense for half precision, which is summed in float32 here, and for a tape in the template,
    # which may ask for second derivatives.
    may_touch = _by_rows_touched.get() is True and table.dtype.size >= 4
    sparse_gradient = sparse_gradient or (may_touch and not gradient_order([table]))
    # The gradient uses them in the graph of this call, wherever they come from.
    table, indices = tf.identity(table), tf.identity(indices)
    weights = None if weights is None else tf.identity(weights)
    gradient = _of_rows_touched if sparse_gradient else _of_all_rows
    if weights is None:

        @tf.custom_gradient
        def unweighted(table: Tensor) -> Any:
            def backward(upstream: Tensor) -> Tensor:
                return gradient(upstream, indices, None, table)

            return _sum(table, indices, None), backward

        return unweighted(table)

    @tf.custom_gradient
    def weighted(table: Tensor, weights: Tensor) -> Any:
        def backward(upstream: Tensor) -> tuple[Tensor, Tensor]:
            by_weights = tf.reduce_sum(tf.gather(table, indices) * upstream[:, None], axis=2)
            return gradient(upstream, indices, weights, table), by_weights

        return _sum(table, indices, weights), backward

    return weighted(table, weights)


def merge_rows(gradient: Any) -> Any:
    """Sums the repeated rows of a sparse gradient, so that each comes once."""
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def add_rows(one: Any, other: Any) -> Any:
    """Adds sparse gradients place by place if they name the same rows, else concatenates them."""

    def is_same() -> Tensor:
        return tf.reduce_all(tf.equal(one.indices, other.indices))

    def placewise() -> tuple[Tensor, Tensor]:
        return one.values + other.values, one.indices

    def concatenated() -> tuple[Tensor, Tensor]:
        both: Any = add([one, other])
        return both.values, both.indices

    has_equal_size = tf.equal(tf.size(one.indices), tf.size(other.indices))
    is_like = tf.cond(has_equal_size, is_same, lambda: tf.constant(False))
    values, indices = tf.cond(is_like, placewise, concatenated)
    return tf.IndexedSlices(values, indices, one.dense_shape)


def _sum(table: Tensor, indices: Tensor, weights: Tensor | None) -> Tensor:
    sums = []
    for numbers, own in _blocks(indices, weights):
        taken = tf.gather(table, numbers)
        taken = taken if own is None else taken * own[:, :, None]
        sums.append(tf.reduce_sum(wide(taken), axis=1))
    return tf.cast(tf.add_n(sums), table.dtype)


def _of_all_rows(
    upstream: Tensor, indices: Tensor, weights: Tensor | None, table: Tensor
) -> Tensor:
    total = tf.zeros(table.shape, wide(upstream).dtype)
    for numbers, own in _blocks(indices, weights):
        parts, places = _parts(upstream, numbers, own)
        total = tf.tensor_scatter_nd_add(total, places[:, None], parts)
    return tf.cast(total, table.dtype)


def _of_rows_touched(
    upstream: Tensor, indices: Tensor, weights: Tensor | None, table: Tensor
) -> tf.IndexedSlices:
    merged = merge_rows(tf.IndexedSlices(*_parts(upstream, indices, weights), tf.shape(table)))
    return tf.IndexedSlices(tf.cast(merged.values, table.dtype), merged.indices, tf.shape(table))


def _parts(upstream: Tensor, indices: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """What to add to the table, of shape `(rows * ones, units)`, and to which rows."""
    parts = tf.repeat(upstream[:, None], tf.shape(indices)[1], axis=1)
    parts = parts if weights is None else parts * weights[:, :, None]
    return tf.reshape(wide(parts), [-1, parts.shape[2]]), tf.reshape(indices, [-1])


def _blocks(indices: Tensor, weights: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Blocks of columns, small enough for their rows to stay in the processor's cache."""
    ones = indices.shape[1]
    step = max(_COLUMNS, -(-ones // _MOST_BLOCKS)) if ones else None
    for first in range(0, ones or 1, step or 1):
        block = slice(first, first + step if step else None)
        yield indices[:, block], None if weights is None else weights[:, block]


def wide(values: Tensor) -> Tensor:
    """Casts to float32 at least, for sums of many parts, as in matrix products."""
    return tf.cast(values, tf.float32) if values.dtype.size < 4 else values
