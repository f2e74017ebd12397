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

    def of_first(self, own: Sequence[Tensor]) -> list[Tensor] | None:
        """The tensors of process 0; `None` if some differ by more than rounding in any process."""
        every = self.of_processes(own)
        is_close = all(_are_close(*pair) for tensors in every for pair in zip(tensors, every[0]))
        return every[0] if is_close else None

    def of_processes(self, own: Sequence[Tensor]) -> list[list[Tensor]]:
        """The tensors of all processes, process by process, from those of this one.

        A process's place is filled with zeros by all others, and the places are summed.
        """
        number, found = self.collectives.number, [[*own] for _ in range(self.collectives.count)]
        with tf.device(self.collectives.device):
            shapes = self._shapes(own)
            for dtype in TYPES:
                places = [k for k, one in enumerate(own) if crosses_as(one) == dtype]
                if not places:
                    continue
                sizes = [tf.reduce_prod(row[k]) for row in shapes for k in places]
                parts = [tf.zeros([size], dtype) for size in sizes]
                mine = slice(number * len(places), (number + 1) * len(places))
                parts[mine] = [packed(own[k], size) for k, size in zip(places, sizes[mine])]
                total = self.collectives.sum(tf.concat(parts, 0))
                pieces = iter(tf.split(total, sizes, num=len(sizes)))
                for process, (row, shape) in enumerate(zip(found, shapes)):
                    for k in places:
                        piece = next(pieces)
                        if process != number:
                            row[k] = tf.reshape(unpacked(piece, own[k].dtype), shape[k])
        return found

    def sum(self, tensors: Sequence[Tensor], wire_dtype: str | None = None) -> list[Tensor]:
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

    def sum_own(
        self,
        tensors: Sequence[Tensor],
        axes: Sequence[int],
        shares: Sequence[Sequence[int]],
        wire_dtype: str,
    ) -> list[Tensor]:
        """This process's shares of the sums of dense tensors over all processes.

        `shares`: how much of a tensor's axis each process has, tensor by tensor.
        """
        pieces = [tf.split(t, own, axis) for t, own, axis in zip(tensors, shares, axes)]
        found = [one[self.collectives.number] for one in pieces]
        for places in buckets(tensors):
            sent = [[pieces[k][number] for k in places] for number in range(self.collectives.count)]
            shapes = [[found[k].shape for k in places]] * self.collectives.count
            for k, column in zip(places, zip(*self._exchange(sent, shapes, wire_dtype))):
                found[k] = tf.add_n(column)
        return found

    def gather(
        self,
        own: Sequence[Tensor],
        axes: Sequence[int],
        shares: Sequence[Sequence[int]],
        wire_dtype: str,
    ) -> list[Tensor]:
        """Whole tensors, of which each process has its own share of an axis."""
        found, shapes = list(own), []
        for one, axis, sizes in zip(own, axes, shares):
            before, after = one.shape[:axis], one.shape[axis + 1 :]
            shapes.append([tf.TensorShape([*before, size, *after]) for size in sizes])
        wholes = [
            tf.TensorSpec([*s[0][:axis], sum(sizes), *s[0][axis + 1 :]], one.dtype)
            for one, s, axis, sizes in zip(own, shapes, axes, shares)
        ]
        for places in buckets(wholes):
            sent = [[own[k] for k in places]] * self.collectives.count
            arriving = [[shapes[k][number] for k in places] for number in range(len(sent))]
            for k, column in zip(places, zip(*self._exchange(sent, arriving, wire_dtype))):
                found[k] = tf.concat(column, axes[k])
        return found

    def _exchange(
        self,
        sent: Sequence[Sequence[Tensor]],
        shapes: Sequence[Sequence[tf.TensorShape]],
        wire_dtype: str,
    ) -> list[list[Tensor]]:
        """What each process has sent to this one, of these shapes, from what it gets from here.

        All tensors have one type, and cross as `wire_dtype`, if that has fewer bits.
        """
        dtype, found = sent[0][0].dtype, []
        wire, given = crosses_as(sent[0][0]), tf.as_dtype(wire_dtype)
        wire = given if dtype.is_floating and given.size < wire.size else wire
        sizes = [[one.num_elements() for one in row] for row in shapes]
        lengths = [sum(one.shape.num_elements() for one in row) for row in sent]
        most = max(*lengths, *map(sum, sizes))  # the same in all processes
        with tf.device(self.collectives.device):
            flat = [[tf.cast(packed(one, size_of(one)), wire) for one in row] for row in sent]
            vectors = [tf.concat(row, axis=0) for row in flat]
            for row, own, shaped in zip(self.collectives.exchange(vectors, most), sizes, shapes):
                pieces = tf.split(row[: sum(own)], own, num=len(own))
                found.append(
                    [tf.reshape(unpacked(piece, dtype), s) for piece, s in zip(pieces, shaped)]
                )
        return found

    def _shapes(self, own: Sequence[Tensor]) -> list[list[Tensor]]:
        """The shapes of all processes' tensors."""
        ranks, count = [one.shape.rank for one in own], self.collectives.count
        shapes = [tf.shape(one) for one in own]
        if not sum(ranks):
            return [shapes] * count
        rows = [tf.zeros([sum(ranks)], tf.int32)] * count
        rows[self.collectives.number] = tf.concat(shapes, axis=0)
        known = self.collectives.sum(tf.concat(rows, axis=0))
        return [tf.split(row, ranks) for row in tf.split(known, count)]


def _are_close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal but for rounding, and what rounding may become in a call."""
    if not one.dtype.is_floating:
        return bool(tf.reduce_all(one == other))
    gap, size = tf.cast(one - other, tf.float64), tf.cast(other, tf.float64)
    return bool(tf.reduce_all(tf.abs(gap) <= rounding_of(one.dtype) * tf.norm(size)))
