"""Sums of rows of a table, added up at the devices that have the rows, for the whole batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import Sharded
from keras_multigpu.engines.tensorflow.weights.rows import merge_rows, wide


@dataclasses.dataclass(frozen=True)
class _Own:
    """What one device adds up, all of the same length.

    Attributes:
        rows: the rows of its part that the batch uses.
        sums: the rows of the batch to whose sums they belong.
        places: their places among all indices of the batch.
    """

    rows: Any
    sums: Any
    places: Any


class Lookup:
    """Each device adds the rows that it has, and each the devices' sums of its own batch rows.

    Args:
        devices: the devices.
        table: the table's height and width.
        dtype: the type of the result.
        name: of the layer, for errors.
        indices: each device's rows of the batch's indices.
        weights: likewise; `None` for ones.
    """

    def __init__(
        self,
        devices: Any,
        table: Sequence[int],
        dtype: tf.DType,
        name: str,
        indices: Sequence[Any],
        weights: Sequence[Any] | None = None,
    ):
        self._devices, self._dtype = devices, dtype
        self._height, self._units = table
        self._indices = [self._checked(*one, name) for one in zip(devices.names, indices)]
        self._weights = weights
        self._counts = [tf.shape(one)[0] for one in indices]

    def sums(self, parts: Sequence[Any]) -> list[Any]:
        """Each device's rows of the sums."""
        pieces = []
        for number, (name, part) in enumerate(zip(self._devices.names, parts)):
            with tf.device(name):
                added = self._sum(part, self._own(number))
                pieces.append(tf.split(added, tf.stack(self._counts), num=len(parts)))
        found = []
        for name, one in zip(self._devices.names, zip(*pieces)):
            with tf.device(name):
                found.append(tf.cast(tf.add_n(list(one)), self._dtype))
        return found

    def gradient(self, upstream: Sequence[Any]) -> list[Any]:
        """The gradient of each device's part of the table."""
        found = []
        for number, name in enumerate(self._devices.names):
            with tf.device(name):
                own, count = self._own(number), self._extent(number)[1]
                values = self._values(upstream, own)
                total = tf.math.unsorted_segment_sum(values, own.rows, count)
                found.append(tf.cast(tf.cast(total, upstream[0].dtype), self._dtype))
        return found

    def touched(self, upstream: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The gradient's touched rows that each device has, and their numbers."""
        entries, numbers = [], []
        for number, name in enumerate(self._devices.names):
            with tf.device(name):
                own, (begin, count) = self._own(number), self._extent(number)
                shape = tf.constant([count, self._units], own.rows.dtype)
                values = self._values(upstream, own)
                merged = merge_rows(tf.IndexedSlices(values, own.rows, shape))
                entries.append(tf.cast(tf.cast(merged.values, upstream[0].dtype), self._dtype))
                rows = merged.indices + tf.constant(begin, own.rows.dtype)
                numbers.append(tf.cast(rows, self._indices[0].dtype))
        return entries, numbers

    def of_weights(self, parts: Sequence[Any], upstream: Sequence[Any]) -> list[Any]:
        """The gradient of each device's weights."""
        pieces, sizes = [], [tf.size(one) for one in self._indices]
        for number, (name, part) in enumerate(zip(self._devices.names, parts)):
            with tf.device(name):
                own = self._own(number)
                arrived = tf.gather(tf.concat(list(upstream), 0), own.sums)
                taken = tf.cast(tf.gather(part, own.rows), self._dtype)
                values, total = tf.reduce_sum(taken * arrived, axis=1), tf.add_n(sizes)
                flat = tf.scatter_nd(own.places[:, None], values, tf.cast([total], tf.int64))
                pieces.append(tf.split(flat, tf.stack(sizes), num=len(parts)))
        found = []
        for name, indices, one in zip(self._devices.names, self._indices, zip(*pieces)):
            with tf.device(name):
                found.append(tf.reshape(tf.add_n(list(one)), tf.shape(indices)))
        return found

    def _extent(self, number: int) -> tuple[int, int]:
        return self._devices.locals[number].extent(self._height, Sharded(0))

    def _checked(self, device: str, indices: Any, name: str) -> Any:
        """The indices; the step fails if the table has not all of their rows."""
        with tf.device(device):
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

    def _own(self, number: int) -> _Own:
        begin, count = self._extent(number)
        is_large = self._height > tf.int32.max or self._indices[0].dtype.size > 4
        dtype = tf.int64 if is_large else tf.int32
        flat = tf.concat([tf.reshape(tf.cast(one, dtype), [-1]) for one in self._indices], 0)
        rows = flat - tf.constant(begin, dtype)
        places = tf.where((rows >= 0) & (rows < count))[:, 0]
        owners = tf.gather(_rows_of(self._indices), places)
        return _Own(tf.gather(rows, places), owners, places)

    def _own_weights(self, own: _Own) -> Any:
        if self._weights is None:
            return None
        flat = tf.concat([tf.reshape(one, [-1]) for one in self._weights], 0)
        return tf.gather(flat, own.places)[:, None]

    def _sum(self, part: Any, own: _Own) -> Any:
        weights, count = self._own_weights(own), tf.add_n(self._counts)
        if weights is None and part.dtype == self._dtype and self._dtype.size >= 4:
            # Faster: makes no tensor of all the rows taken.
            return tf.sparse.segment_sum(part, own.rows, own.sums, num_segments=count)
        taken = tf.cast(tf.gather(part, own.rows), self._dtype)
        taken = taken if weights is None else taken * weights
        return tf.math.unsorted_segment_sum(wide(taken), own.sums, count)

    def _values(self, upstream: Sequence[Any], own: _Own) -> Any:
        arrived = tf.gather(tf.concat(list(upstream), 0), own.sums)
        weights = self._own_weights(own)
        return wide(arrived if weights is None else arrived * weights)


def _rows_of(indices: Sequence[Any]) -> Any:
    """The row of the batch that each index belongs to, of all devices' flat indices."""
    shapes = [tf.unstack(tf.shape(one)) for one in indices]
    ones = tf.concat([tf.fill([rows], ones) for rows, ones in shapes], 0)
    return tf.repeat(tf.range(tf.size(ones)), ones)
