"""Sums of rows of a table, of which a device adds up those that it has, for the whole batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import Sharded
from keras_multigpu.engines.tensorflow.weights.rows import merge_rows, wide


@dataclasses.dataclass(frozen=True)
class _Own:
    """What a device adds up, all of the same length.

    Attributes:
        rows: the rows of its part that the batch uses.
        sums: the rows of the batch to whose sums they belong.
        places: their places among all indices of the batch.
    """

    rows: Any
    sums: Any
    places: Any


class Lookup:
    """The lookups of a device, in its part of a table, for all rows of the batch.

    Args:
        local: the device.
        table: the table's height and width.
        dtype: the type of the result.
        name: of the layer, for errors.
        indices: the batch's, of shape `(rows, ones)`.
        weights: likewise; `None` for ones.

    Attributes:
        local: the argument.
    """

    def __init__(
        self,
        local: Any,
        table: Sequence[int],
        dtype: tf.DType,
        name: str,
        indices: Any,
        weights: Any = None,
    ):
        self.local, self._dtype, self._weights = local, dtype, weights
        self._height, self._units = table
        self._begin, self._count = local.extent(self._height, Sharded(0))
        self._indices = self._checked(indices, name)
        self._own = self._find_own()

    def sums(self, part: Any) -> Any:
        """What it adds to the sum of each row, in the type in which sums are added up."""
        own, count = self._own, tf.shape(self._indices)[0]
        weights = self._own_weights()
        if weights is None and part.dtype == self._dtype and self._dtype.size >= 4:
            # Faster: makes no tensor of all the rows taken.
            return tf.sparse.segment_sum(part, own.rows, own.sums, num_segments=count)
        taken = tf.cast(tf.gather(part, own.rows), self._dtype)
        taken = taken if weights is None else taken * weights
        return tf.math.unsorted_segment_sum(wide(taken), own.sums, count)

    def gradient(self, upstream: Any) -> Any:
        """The gradient of its part of the table."""
        total = tf.math.unsorted_segment_sum(self._values(upstream), self._own.rows, self._count)
        return tf.cast(tf.cast(total, upstream.dtype), self._dtype)

    def touched(self, upstream: Any) -> tuple[Any, Any]:
        """The gradient's touched rows that it has, and their numbers."""
        rows = self._own.rows
        shape = tf.constant([self._count, self._units], rows.dtype)
        merged = merge_rows(tf.IndexedSlices(self._values(upstream), rows, shape))
        numbers = merged.indices + tf.constant(self._begin, rows.dtype)
        entries = tf.cast(tf.cast(merged.values, upstream.dtype), self._dtype)
        return entries, tf.cast(numbers, self._indices.dtype)

    def of_weights(self, part: Any, upstream: Any) -> Any:
        """The gradient of those weights by which rows of its part are multiplied."""
        own, shape = self._own, tf.shape(self._indices)
        taken = tf.cast(tf.gather(part, own.rows), self._dtype)
        values = tf.reduce_sum(taken * tf.gather(upstream, own.sums), axis=1)
        size = tf.size(self._indices, tf.int64)
        return tf.reshape(tf.scatter_nd(own.places[:, None], values, [size]), shape)

    def _checked(self, indices: Any, name: str) -> Any:
        """The indices; the step fails if the table has not all of their rows."""
        number = tf.cast(indices, tf.int64)
        check = tf.debugging.Assert(
            tf.reduce_all((number >= 0) & (number < self._height)),
            [
                f"Indices must be from 0 to {self._height - 1}, the last row of the table of "
                f"{name!r}. Received: indices from",
                tf.reduce_min(number),
                "to",
                tf.reduce_max(number),
                "Give the layer the `width` of the encoder, or `padding` for what is no index.",
            ],
        )
        with tf.control_dependencies([check]):
            return tf.identity(indices)

    def _find_own(self) -> _Own:
        is_large = self._height > tf.int32.max or self._indices.dtype.size > 4
        dtype = tf.int64 if is_large else tf.int32
        rows = tf.reshape(tf.cast(self._indices, dtype), [-1]) - tf.constant(self._begin, dtype)
        places = tf.where((rows >= 0) & (rows < self._count))[:, 0]
        ones = tf.shape(self._indices, tf.int64)[1]
        return _Own(tf.gather(rows, places), places // tf.maximum(ones, 1), places)

    def _own_weights(self) -> Any:
        if self._weights is None:
            return None
        return tf.gather(tf.reshape(self._weights, [-1]), self._own.places)[:, None]

    def _values(self, upstream: Any) -> Any:
        arrived, weights = tf.gather(upstream, self._own.sums), self._own_weights()
        return wide(arrived if weights is None else arrived * weights)
