"""What the replicas of a call that is cut do between two segments, and the gradient of that.

Values and gradients have the `id` of their tensor in the traced graphs as their key.
"""

from __future__ import annotations

import abc
import collections
from collections.abc import Sequence

import tensorflow as tf

from keras_multigpu.engines.tensorflow.cluster.peers import Peers
from keras_multigpu.engines.tensorflow.tensors import add
from keras_multigpu.engines.tensorflow.tracing.segments import Boundary, RowsOf
from keras_multigpu.engines.tensorflow.tracing.sync import Merge
from keras_multigpu.engines.tensorflow.weights.lookups import Lookup, Table
from keras_multigpu.engines.values import Tensor

Found = collections.defaultdict[int, list[Tensor]]
"""The gradients of one replica's values, found so far."""


class Meeting(abc.ABC):
    """One exchange in a step.

    Args:
        boundary: where it is.
        devices: each replica's device.
    """

    def __init__(self, boundary: Boundary, devices: Sequence[str]):
        self._local = list(map(id, boundary.local))
        self._merged = id(boundary.merged)
        self._devices = devices

    @abc.abstractmethod
    def forward(self, values: Sequence[dict[int, Tensor]]) -> None:
        """Adds what the replicas go on with to their values."""

    def backward(self, found: Sequence[Found]) -> None:
        """Adds the gradients of what the replicas handed over, if there are any."""
        arrived = [own.pop(self._merged, []) for own in found]
        if not any(arrived):
            return
        for key, gradients in zip(self._local, zip(*self._gradients(arrived))):
            for own, gradient in zip(found, gradients):
                own[key] += [] if gradient is None else [gradient]

    @abc.abstractmethod
    def _gradients(self, arrived: Sequence[list[Tensor]]) -> list[list[Tensor | None]]:
        """Each replica's gradients of what it handed over."""


class Merging(Meeting):
    """Merges one tensor of each replica, on the first device, for all of them.

    Args:
        tape: an unused tape.
        is_differentiated: whether gradients may be asked for.
        peers: joined processes with more replicas.
    """

    def __init__(
        self,
        boundary: Boundary,
        merge: Merge,
        devices: Sequence[str],
        tape: tf.GradientTape,
        is_differentiated: bool,
        peers: Peers | None,
    ):
        super().__init__(boundary, devices)
        self._merge, self._tape, self._peers = merge, tape, peers
        self._is_differentiated = is_differentiated

    def forward(self, values: Sequence[dict[int, Tensor]]) -> None:
        (key,) = self._local
        with tf.device(self._devices[0]), self._tape:
            self._given = [tf.identity(own[key]) for own in values]
            if self._is_differentiated:
                self._tape.watch(self._given)
            self._made = self._merge(self._complete(self._given))
        for device, own in zip(self._devices, values):
            with tf.device(device):
                own[self._merged] = tf.identity(self._made)

    def _complete(self, local: list[Tensor]) -> list[Tensor]:
        """What all replicas hand over; the tape sees this process's only."""
        if self._peers is None:
            return local
        with self._tape.stop_recording():
            every = self._peers.complete(local)
        for place, one in zip(self._peers.own, local):
            every[place] = one
        return every

    def _gradients(self, arrived: Sequence[list[Tensor]]) -> list[list[Tensor | None]]:
        with tf.device(self._devices[0]), tf.name_scope("gradients"):
            upstream = tf.add_n([one for own in arrived for one in own])
            if self._peers is not None:
                (upstream,) = self._peers.sum([upstream])
            found = self._tape.gradient(self._made, self._given, output_gradients=upstream)
        return [[gradient] for gradient in found]


class LookingUp(Meeting):
    """Looks up rows of a table; the gradients of its parts stay where they are.

    Args:
        table: the table.
        by_tables: to where the gradients of its parts are added.
    """

    def __init__(
        self,
        boundary: Boundary,
        rows: RowsOf,
        devices: Sequence[str],
        table: Table,
        by_tables: collections.defaultdict[int, list[list[Tensor]]],
    ):
        super().__init__(boundary, devices)
        self._lookup = Lookup(table, rows.dtype, devices)
        self._table, self._by_tables = table, by_tables

    def forward(self, values: Sequence[dict[int, Tensor]]) -> None:
        indices, *weights = ([own[key] for own in values] for key in self._local)
        self._sums = self._lookup.forward(indices, weights[0] if weights else None)
        for own, one in zip(values, self._sums):
            own[self._merged] = one

    def _gradients(self, arrived: Sequence[list[Tensor]]) -> list[list[Tensor | None]]:
        upstream = []
        with tf.name_scope("gradients"):
            for device, own, total in zip(self._devices, arrived, self._sums):
                with tf.device(device):
                    upstream.append(add(own) if own else tf.zeros_like(total))
            by_parts, by_weights = self._lookup.backward(upstream)
        self._by_tables[id(self._table.variable)].append(by_parts)
        return (
            [[None]] * len(upstream) if by_weights is None else [[None, one] for one in by_weights]
        )
