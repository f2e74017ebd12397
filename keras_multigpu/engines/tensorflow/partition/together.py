"""Devices of several joined processes: each writes its own devices' part of the same program.

What is whole, every process has. Sums and gathers cross by collective operations; copies and
slices of what is whole need none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.tensorflow.cluster.collectives import TYPES
from keras_multigpu.engines.tensorflow.cluster.joint_batches import JointBatches
from keras_multigpu.engines.tensorflow.cluster.peers import Peers
from keras_multigpu.engines.tensorflow.names import full_name
from keras_multigpu.engines.tensorflow.partition.crossings import combine
from keras_multigpu.engines.tensorflow.partition.emission import write
from keras_multigpu.engines.tensorflow.partition.layouts import Joined, Owned, Sharded, Split
from keras_multigpu.engines.tensorflow.partition.listing import listing_of
from keras_multigpu.engines.tensorflow.partition.local import Devices, Local, even
from keras_multigpu.engines.tensorflow.partition.program import Across, Program
from keras_multigpu.engines.tensorflow.weights.divided import parts_of


class JoinedDevices(Devices):
    """This process's devices among those of all.

    Args:
        names: the names of this process's devices.
        peers: the processes.
        counts: the rows that each process has, as a vector; `None` if all have the whole batch.
        batch, options: as for `Devices`.
    """

    is_joined = True

    def __init__(self, names: Sequence[str], peers: Peers, counts: Any, batch: Any, **options: Any):
        super().__init__(names, batch, **options)
        owners = list(peers.owners)
        self._peers = peers
        if counts is None:
            rows, begins = even(batch, len(owners))
            rows, begins = ([some[k] for k in peers.own] for some in (rows, begins))
        else:
            counts, number = tf.cast(counts, tf.int32), peers.collectives.number
            rows, begins = even(counts[number], len(names))
            before = tf.reduce_sum(counts[:number])
            begins = [before + one for one in begins]
        self.locals = [
            Local(batch, own, begin, place, len(owners), is_compiled=self.is_compiled)
            for own, begin, place in zip(rows, begins, peers.own)
        ]

    def complete(self, parts: Sequence[Any], layout: Split | Joined | Sharded | Owned) -> list[Any]:
        axis = layout.axis
        whole = tf.concat(parts, axis)
        every = [one for (one,) in self._of_processes([whole])]
        if whole.shape.rank is None:
            return every
        static = whole.shape.as_list()
        static[axis] = None
        return [tf.ensure_shape(one, static) for one in every]

    def combine(self, own: Sequence[Any], across: Sequence[Across], wire: tf.DType) -> list[Any]:
        kind = across[0].kind
        if kind in ("gather", "scatter"):
            exchange = self._peers.gather if kind == "gather" else self._peers.sum_own
            shares = [self._shares(one) for one in across]
            return exchange(own, [one.axis for one in across], shares, wire.name)
        if kind == "sum" and all(one.dtype in TYPES for one in own):
            return list(self._peers.sum(own, wire.name))
        every = self._of_processes(own)
        return [combine(kind, list(column)) for column in zip(*every)]

    def _shares(self, across: Across) -> list[int]:
        """How much each process has of an axis."""
        owners, (sizes, _) = self._peers.owners, even(across.dim, len(self._peers.owners))
        numbers = range(self._peers.collectives.count)
        return [sum(n for n, one in zip(sizes, owners) if one == number) for number in numbers]

    def of_process_0(self, wholes: Sequence[Any]) -> list[Any]:
        """What process 0 has of tensors."""
        return self._of_any_rank(wholes)[0]

    def _of_processes(self, tensors: Sequence[Any]) -> list[list[Any]]:
        """What each process has of tensors."""
        are_known = all(one.shape.rank is not None for one in tensors)
        return self._peers.of_processes(tensors) if are_known else self._of_any_rank(tensors)

    def _of_any_rank(self, tensors: Sequence[Any]) -> list[list[Any]]:
        """What each process has of tensors, whose ranks need not be known."""
        flat = [tf.reshape(one, [-1]) for one in tensors]
        every = self._peers.of_processes([*flat, *map(tf.shape, tensors)])
        return [list(map(tf.reshape, one[: len(flat)], one[len(flat) :])) for one in every]

    def cut(self, whole: Any, layout: Split | Joined | Sharded, dim: Any) -> list[Any]:
        """The slices of a whole tensor for this process's devices."""
        extents = [local.extent(dim, layout) for local in self.locals]
        first, sizes = extents[0][0], [size for _, size in extents]
        last = tf.shape(whole)[layout.axis] - first - sum(sizes)
        pieces = tf.split(whole, tf.stack([first, *sizes, last]), layout.axis, num=len(sizes) + 2)
        return pieces[1:-1]


@dataclasses.dataclass(frozen=True)
class Together:
    """A step that joined processes make together.

    Attributes:
        batches: the batches of the processes' steps.
        counts: the rows of each, as a vector.
        takes_own: whether a process gets its own rows of the results, if it gave its own.
        variables: gives the model's variables.
        names: of the devices of all processes, as users see them.
    """

    batches: JointBatches
    counts: Any
    takes_own: bool
    variables: Callable[[], Sequence[keras.Variable]]
    names: Sequence[str]

    @property
    def devices(self) -> Sequence[str]:
        """The names of the devices of all processes."""
        return list(map(full_name, self.names))

    @property
    def are_parts(self) -> bool:
        """Whether each process has its part of the batch."""
        return self.batches.are_parts

    @property
    def gives_own(self) -> bool:
        """Whether a process gets its own rows of the results."""
        return self.are_parts and self.takes_own

    def write(
        self,
        program: Program,
        traced: Any,
        devices: Sequence[str],
        width: int,
        count: Any,
        **options: Any,
    ) -> list[Any]:
        """Writes this process's part of a program; returns its outputs.

        `count`: the rows of the batch, if all have it. `devices`, `width`: as for `Where`.
        """
        batch, counts = count, None
        if self.are_parts:
            batch, counts = tf.cast(tf.reduce_sum(self.counts), tf.int32), self.counts
        options |= {"peers": self.batches.peers, "counts": counts, "batch": batch}
        scope = Devices.mesh(functools.partial(JoinedDevices, **options), devices, width)
        if not self.are_parts:
            return write(program, scope, traced.given())
        sizes = tf.stack([local.rows for local in scope.locals])
        slices = {
            id(one.tensor): tf.split(one.tensor, sizes, num=len(scope.locals))
            for one in traced.arguments
            if one.has_rows
        }
        return write(program, scope, traced.given(slices))

    def note(self, graph: Any) -> None:
        """Has the processes compare what a traced step computes, before they make it."""
        numbers = {id(one._value.handle): k for k, one in enumerate(self.variables())}
        for k, one in enumerate(self.variables()):
            numbers |= {id(part.handle): k for part in parts_of(one)}
        self.batches.note(*listing_of(graph, numbers))

    def whole(self, args: Any) -> Any:
        """The whole batch."""
        return self.batches.whole(args) if self.are_parts else args

    def own(self, result: Any, known: Sequence[Any] = ()) -> Any:
        """This process's rows of a result, some of whose tensors have no others."""
        if not self.gives_own:
            return result
        kept = set(map(id, known))
        return tf.nest.map_structure(
            lambda one: one if id(one) in kept else self.batches.own(one, self.counts), result
        )
