"""Sums of table rows, with a gradient that is dense or has only the touched rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.values import Tensor

# The columns of indices in a block, and the largest number of blocks.
_COLUMNS, _MOST_BLOCKS = 16, 16


def sum_rows(
    table: Tensor,
    indices: Tensor,
    weights: Tensor | None,
    sparse_gradient: bool,
    dtype: tf.DType | None = None,
    call: Callable[..., Any] = lambda name, run, *given: run(*given),
) -> Tensor:
    """`sum_j weights[:, j] * table[indices[:, j]]`, of shape `(rows, units)`, as `dtype`.

    TensorFlow's gradient of `tf.gather` repeats a row for every use, and Keras's optimizers
    would square each part instead of the sum. Here each row comes once. `call` calls each part.
    """
    kept, dtype = table.dtype, dtype or table.dtype
    if indices.dtype not in (tf.int32, tf.int64):
        indices = tf.cast(indices, tf.int64)
    # The gradient uses them in the graph of this call, wherever they come from.
    table, indices = tf.identity(table), tf.identity(indices)
    size, shape = tf.constant(table.shape.as_list(), tf.int64), table.shape

    def sums(table: Tensor, indices: Tensor, weights: Tensor | None = None) -> Tensor:
        return add_up(tf.cast(table, dtype), indices, weights)

    def dense(size: Tensor, upstream: Tensor, *given: Tensor) -> Tensor:
        return tf.cast(of_all_rows(upstream, *given, shape=shape, dtype=upstream.dtype), kept)

    def touched(size: Tensor, upstream: Tensor, *given: Tensor) -> list[Tensor]:
        found = of_rows_touched(upstream, *given, shape=shape, dtype=upstream.dtype)
        return [tf.cast(found.values, kept), found.indices]

    def by_weights(table: Tensor, upstream: Tensor, indices: Tensor) -> Tensor:
        return of_weights(tf.cast(table, dtype), upstream, indices)

    @tf.custom_gradient
    def summed(table: Tensor, *weights: Tensor) -> Any:
        def backward(upstream: Tensor) -> Any:
            if sparse_gradient:
                found = call("rows", touched, size, upstream, indices, *weights)
                rows = tf.constant(shape.as_list(), found[1].dtype)
                gradient: Any = tf.IndexedSlices(*found, rows)
            else:
                gradient = call("gradient", dense, size, upstream, indices, *weights)
            if not weights:
                return gradient
            return gradient, call("by_weights", by_weights, table, upstream, indices)

        return call("sums", sums, table, indices, *weights), backward

    return summed(table, *([] if weights is None else [tf.identity(weights)]))


def merge_rows(gradient: Any) -> Any:
    """Sums the repeated rows of a sparse gradient, so that each comes once."""
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def add_equal_rows(gradient: Any, count: int) -> Any:
    """The sum of `count` equal uses of a table, if a sparse gradient is that of them."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    values, rows = gradient.values, gradient.indices
    size = tf.size(rows) // count

    def is_equal() -> Tensor:
        uses = tf.reshape(rows, [count, size])
        return tf.reduce_all(tf.equal(uses, uses[:1]))

    def summed() -> tuple[Tensor, Tensor]:
        of_use = tf.reshape(values, tf.concat([[count, size], tf.shape(values)[1:]], 0))
        return tf.reduce_sum(of_use, axis=0), rows[:size]

    is_whole = tf.equal(size * count, tf.size(rows))
    is_sum = tf.cond(is_whole, is_equal, lambda: tf.constant(False))
    values, rows = tf.cond(is_sum, summed, lambda: (values, rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def add_up(table: Tensor, indices: Tensor, weights: Tensor | None) -> Tensor:
    """The sums of rows."""
    sums = []
    for numbers, own in _blocks(indices, weights):
        taken = tf.gather(table, numbers)
        taken = taken if own is None else taken * own[:, :, None]
        sums.append(tf.reduce_sum(wide(taken), axis=1))
    return tf.cast(tf.add_n(sums), table.dtype)


def of_weights(table: Tensor, upstream: Tensor, indices: Tensor) -> Tensor:
    """The gradient of the weights."""
    return tf.reduce_sum(tf.gather(table, indices) * upstream[:, None], axis=2)


def of_all_rows(
    upstream: Tensor, indices: Tensor, weights: Any = None, *, shape: Any, dtype: tf.DType
) -> Tensor:
    """The gradient of a table of this shape and type."""
    total = tf.zeros(shape, wide(upstream).dtype)
    for numbers, own in _blocks(indices, weights):
        parts, places = _parts(upstream, numbers, own)
        total = tf.tensor_scatter_nd_add(total, places[:, None], parts)
    return tf.cast(total, dtype)


def of_rows_touched(
    upstream: Tensor, indices: Tensor, weights: Any = None, *, shape: Any, dtype: tf.DType
) -> tf.IndexedSlices:
    """The gradient's rows that are touched, each once."""
    shape = tf.constant(list(shape), tf.int32)
    merged = merge_rows(tf.IndexedSlices(*_parts(upstream, indices, weights), shape))
    return tf.IndexedSlices(tf.cast(merged.values, dtype), merged.indices, shape)


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
