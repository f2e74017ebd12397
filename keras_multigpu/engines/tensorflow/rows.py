"""Sums of rows of a table, and the gradient of the table: dense, or of the rows touched."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_multigpu.engines.values import Tensor


def sum_rows(
    table: Tensor, indices: Tensor, weights: Tensor | None, sparse_gradient: bool
) -> Tensor:
    """`sum_j weights[:, j] * table[indices[:, j]]`, of shape `(rows, units)`.

    TensorFlow's own gradient of `tf.gather` names a row as often as it was taken, and Keras's
    optimizers take the square of each part where they should take that of the sum. Here each
    row comes once.
    """
    if weights is None and sparse_gradient:
        # The fast way, which makes no tensor of all the rows taken.
        rows, ones = tf.shape(indices)[0], tf.shape(indices)[1]
        of_row = tf.repeat(tf.range(rows), ones)
        taken = tf.reshape(indices, [-1])
        return tf.sparse.segment_sum(table, taken, of_row, num_segments=rows, sparse_gradient=True)
    gradient = _of_rows_touched if sparse_gradient else _of_all_rows
    if weights is None:

        @tf.custom_gradient
        def unweighted(table: Tensor) -> Any:
            def backward(upstream: Tensor) -> Tensor:
                parts = tf.repeat(upstream[:, None], tf.shape(indices)[1], axis=1)
                return gradient(parts, indices, table)

            return _sum(tf.gather(table, indices)), backward

        return unweighted(table)

    @tf.custom_gradient
    def weighted(table: Tensor, weights: Tensor) -> Any:
        taken = tf.gather(table, indices)

        def backward(upstream: Tensor) -> tuple[Tensor, Tensor]:
            parts = upstream[:, None] * weights[:, :, None]
            by_weights = tf.reduce_sum(taken * upstream[:, None], axis=2)
            return gradient(parts, indices, table), by_weights

        return _sum(taken * weights[:, :, None]), backward

    return weighted(table, weights)


def merge_rows(gradient: Any) -> Any:
    """A sparse gradient that names each row once."""
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def _of_all_rows(parts: Tensor, indices: Tensor, table: Tensor) -> Tensor:
    flat = tf.reshape(_wide(parts), [-1, table.shape[1]])
    total = tf.math.unsorted_segment_sum(flat, tf.reshape(indices, [-1]), table.shape[0])
    return tf.cast(total, table.dtype)


def _of_rows_touched(parts: Tensor, indices: Tensor, table: Tensor) -> tf.IndexedSlices:
    flat = tf.reshape(_wide(parts), [-1, table.shape[1]])
    merged = merge_rows(tf.IndexedSlices(flat, tf.reshape(indices, [-1]), tf.shape(table)))
    return tf.IndexedSlices(tf.cast(merged.values, table.dtype), merged.indices, tf.shape(table))


def _sum(taken: Tensor) -> Tensor:
    return tf.cast(tf.reduce_sum(_wide(taken), axis=1), taken.dtype)


def _wide(values: Tensor) -> Tensor:
    """Sums of many parts are formed in float32 at least, as products of matrices are."""
    return tf.cast(values, tf.float32) if values.dtype.size < 4 else values
