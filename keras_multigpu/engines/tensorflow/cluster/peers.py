"""What joined processes exchange in a step, by TensorFlow's collective operations.

Every process computes its devices' part of a step. Sums of addends cross, and slices that an
operation without a rule needs whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.cluster.collectives import (
    TYPES,
    Collectives,
    buckets,
    crosses_as,
    packed,
    rank_of,
    size_of,
    unpacked,
)
from keras_multigpu.engines.values import Tensor


def rounding_of(dtype: tf.DType) -> float:
    """What steps may make of rounding, as a part of a weight's norm, before it is set right."""
    return 1e-9 if dtype == tf.float64 else 1e-3


class Peers:
    """The processes that share a model's replicas, as one of them sees them.

    Args:
        owners: the process that has each replica.
        collectives: the operations of this process.

    Attributes:
        own: the replicas of this process.
        owners, collectives: the arguments.
    """

    def __init__(self, owners: Sequence[int], collectives: Collectives):
        self.owners, self.collectives = tuple(owners), collectives
        self.own = [place for place, one in enumerate(owners) if one == collectives.number]

    def pick(self, values: Sequence[Any]) -> list[Any]:
        """The values of this process's replicas, from those of all."""
        return [values[place] for place in self.own]

    def of_first(self, own: Sequence[Tensor]) -> list[Tensor] | None:
        """The tensors of process 0; `None` if some differ by more than rounding in any process."""
        every = self.of_processes(own)
        is_close = all(_are_close(*pair) for tensors in every for pair in zip(tensors, every[0]))
        return every[0] if is_close else None

    def of_processes(self, own: Sequence[Tensor]) -> list[list[Tensor]]:
        """The tensors of all processes, process by process, from those of this one."""
        return self._gather([list(own)], range(self.collectives.count))

    def sum(
        self, tensors: Sequence[Tensor | None], wire_dtype: str | None = None
    ) -> list[Tensor | None]:
        """The sums of dense tensors over all processes, several in one operation.

        They cross as `wire_dtype`, if their own type has more bits.
        """
        collectives, found = self.collectives, list(tensors)
        for places in buckets(tensors):
            parts: list[Any] = [tensors[place] for place in places]
            with tf.device(collectives.device):
                flat = tf.concat([tf.reshape(one, [-1]) for one in parts], axis=0)
                if wire_dtype is not None and tf.as_dtype(wire_dtype).size < flat.dtype.size:
                    total = collectives.sum_narrow(flat, tf.as_dtype(wire_dtype))
                else:
                    total = collectives.sum(flat)
                pieces = tf.split(total, [size_of(one) for one in parts], num=len(parts))
            for place, part, piece in zip(places, parts, pieces):
                shaped = tf.reshape(piece, tf.shape(part))
                shaped.set_shape(part.shape)
                found[place] = shaped
        return found

    def _gather(self, own: Sequence[Sequence[Tensor]], owners: Sequence[int]) -> list[list[Tensor]]:
        """The tensors of all owners.

        An owner's place is filled with zeros by all others, and the places are summed.
        """
        owned = iter(own)
        given = [next(owned) if owner == self.collectives.number else None for owner in owners]
        found: list[list[Any]] = [list(one or [None] * len(own[0])) for one in given]
        with tf.device(self.collectives.device):
            shapes = self._shapes(own[0], given)
            for dtype in TYPES:
                places = [k for k, one in enumerate(own[0]) if crosses_as(one) == dtype]
                if not places:
                    continue
                sizes = [tf.reduce_prod(row[k]) for row in shapes for k in places]
                lengths = iter(sizes)
                parts = [
                    packed(one[k], next(lengths)) if one else tf.zeros([next(lengths)], dtype)
                    for one in given
                    for k in places
                ]
                pieces = iter(
                    tf.split(self.collectives.sum(tf.concat(parts, 0)), sizes, num=len(sizes))
                )
                for one, row, shape in zip(given, found, shapes):
                    for k in places:
                        piece = next(pieces)
                        if one is None:
                            row[k] = tf.reshape(unpacked(piece, own[0][k].dtype), shape[k])
        return found

    def _shapes(
        self, example: Sequence[Tensor], given: Sequence[Sequence[Tensor] | None]
    ) -> list[list[Tensor]]:
        """The shapes of all owners' tensors."""
        ranks = [rank_of(one) for one in example]
        if not sum(ranks):
            return [[tf.shape(one) for one in example]] * len(given)
        rows = [
            tf.concat([tf.shape(one) for one in tensors], axis=0)
            if tensors
            else tf.zeros([sum(ranks)], tf.int32)
            for tensors in given
        ]
        known = self.collectives.sum(tf.concat(rows, axis=0))
        return [tf.split(row, ranks) for row in tf.split(known, len(rows))]


def _are_close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal but for rounding, and what rounding may become in a call."""
    if not one.dtype.is_floating:
        return bool(tf.reduce_all(one == other))
    gap, size = tf.cast(one - other, tf.float64), tf.cast(other, tf.float64)
    return bool(tf.reduce_all(tf.abs(gap) <= rounding_of(one.dtype) * tf.norm(size)))
