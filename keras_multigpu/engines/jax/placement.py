"""How a batch's rows and a model's state are placed on the devices."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.sparse import JAXSparse
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_multigpu.engines.jax import devices, threads
from keras_multigpu.engines.jax.cluster.joint import Step
from keras_multigpu.engines.jax.cluster.processes import Group
from keras_multigpu.engines.jax.copies import Copies
from keras_multigpu.engines.shared import having, unchanged
from keras_multigpu.engines.values import Tensor

_current: contextvars.ContextVar[Placement | None] = contextvars.ContextVar(
    "placement", default=None
)


def current() -> Placement | None:
    """The placement for the call being traced, if its rows are to be spread."""
    return _current.get()


class Placement:
    """A mesh of a model's devices, and the shardings on it.

    Rows are spread if the number of devices divides them, because JAX has no uneven shards;
    otherwise each device gets the whole batch. (With rows spread over some devices and copied to
    the others, XLA computes wrong gradients of depthwise convolutions.) On processors no device
    gets a single row.

    Args:
        names: the devices' names.
        spread: whether to spread the rows of a batch; otherwise each device gets all.
        width: how many devices have large layers together, and the same rows.

    Attributes:
        mesh: the devices, with an axis for each prime factor of their number. All that a step gets
            is on it: JAX describes a result that XLA has spread by the mesh of the first argument,
            and fails if XLA has spread it over a part of an axis.
        factors: the lengths of the mesh's axes.
        axes: the mesh's axes of which a sharding, or a sum, is over all devices; with a `width`,
            over those that have other rows.
        wide_axes: those over which large layers are spread: the others, or all.
        width: over how many devices they are.
        count: how many parts of the rows there are.
        is_of_rows: whether the rows of a batch are spread.
        replicated: a copy on each device.
        sharded: a part of the first axis on each device.
        group: the processes that have the devices, `None` if this one has them all.
        copies: the copies on each device of weights that a step reads.
    """

    group: Group | None = None

    def __init__(self, names: Sequence[str], spread: bool, width: int = 1):
        self.count = len(names) // width
        of_rows, wide = prime_factors(self.count), prime_factors(width) if width > 1 else []
        self.factors = of_rows + wide
        axes = tuple(f"part{number}" for number in range(len(self.factors)))
        self.axes, self.wide_axes = axes[: len(of_rows)], axes[len(of_rows) :] or axes
        self.width = width if width > 1 else len(names)
        found = np.array([devices.find(name) for name in names]).reshape(self.factors)
        self.mesh = Mesh(found, axes)
        own = [device for device in self.mesh.local_devices if device.platform == "cpu"]
        threads.warn_of_few_threads(len(own))
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.sharded = NamedSharding(self.mesh, PartitionSpec(self.axes))
        self.is_of_rows = spread
        self.copies = Copies(self._put_on_all)
        on_processors = self.mesh.devices.flat[0].platform == "cpu"
        # On processors XLA's gradients of maxima are wrong for a single row, on one device, too: it
        # computes the row twice, rounds it in two ways, and does not find the maximum again
        # (jax-ml/jax#40564 is its like).
        self._least_rows = 2 * self.count if on_processors and self.count > 1 else 0
        self._joins_processors = on_processors and jax.distributed.is_initialized()

    @property
    def owners(self) -> list[int]:
        """Of joined processes, which of them has each device."""
        return [one.process_index for one in self.mesh.devices.flat if self.group is not None]

    def sum_part(self, value: Tensor, axis: int = 0) -> Tensor:
        """In a function on each device: the device's part, along an axis, of the devices' sum.

        On processors of joined processes without a reduce-scatter, whose sums of arrays of several
        MB are wrong there, every now and then (jax-ml/jax#40830). As many bytes cross.
        """
        if not self._joins_processors:
            return jax.lax.psum_scatter(value, self.axes, scatter_dimension=axis, tiled=True)
        parts = jax.lax.all_to_all(value, self.axes, axis, axis, tiled=True)
        shape = (*parts.shape[:axis], self.count, -1, *parts.shape[axis + 1 :])
        return parts.reshape(shape).sum(axis)

    @property
    def is_mesh(self) -> bool:
        """Whether several devices have the same rows, and large layers together."""
        return self.wide_axes != self.axes

    def of_wide(self, axis: int) -> NamedSharding:
        """The sharding of a weight of which devices have parts of an axis together."""
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, self.wide_axes))

    def of_rows(self, tensor: Any) -> NamedSharding:
        """The sharding of a tensor of a batch: its first axis is the rows.

        Sparse tensors have no axis of rows in memory: they are copied to every device.
        """
        if not self.is_of_rows or isinstance(tensor, JAXSparse) or not np.ndim(tensor):
            return self.replicated
        return self.sharded if self.divides(np.shape(tensor)[0]) else self.replicated

    def divides(self, rows: int) -> bool:
        """Whether the devices share so many rows; otherwise each gets all of them."""
        return not rows % self.count and rows >= self._least_rows

    def divided(self, rows: int) -> int:
        """The most rows that the devices share, up to `rows`; the fewest, if these are more."""
        return max(rows - rows % self.count, self._least_rows, self.count)

    def spread_rows(self, batch: Any) -> int:
        """The number of rows of a batch to spread; 0 if each device gets them all."""
        if self.count > 1:
            for part in jax.tree.leaves(batch, is_leaf=is_sparse):
                if self.of_rows(part) == self.sharded:
                    return int(np.shape(part)[0])
        return 0

    def compare(self, batch: Any, step: Step) -> list[int]:
        """Begins a step that all processes make; raises a `ClusterError` if one makes another.

        Returns:
            How many rows of the batch each process has.
        """
        return []

    def put_batch(self, batch: Any, counts: Sequence[int] = ()) -> Any:
        """A batch with each device's rows on that device; `counts` are what `compare` returns."""
        return jax.device_put(batch, jax.tree.map(self.of_rows, batch, is_leaf=is_sparse))

    def put_state(self, state: Any, read: Sequence[Any] = ()) -> Any:
        """A model's state for a step that donates it: a copy on every device.

        `read` are arrays whose copies the step reads, and does not donate.
        """
        seen = set(map(id, read))

        def put(value: Any) -> Any:
            if id(value) in seen:  # another variable has this array: XLA donates none twice
                return self.copies.take(jax.numpy.copy(value))
            seen.add(id(value))
            return self.copies.take(value)

        return jax.tree.map(put, state)

    def is_on_all(self, value: Any) -> bool:
        """Whether a value is on all devices, whole or in parts."""
        sharding = getattr(value, "sharding", None)
        is_there = sharding is not None and sharding.device_set == self.replicated.device_set
        return is_there and not (self.mesh.size == 1 and sharding != self.replicated)

    def _put_on_all(self, value: Any) -> Any:
        if self.is_on_all(value):
            return value
        return self._put_whole(value)

    def _put_whole(self, value: Any) -> Any:
        return jax.device_put(value, self.replicated)

    def bring(self, given: Any) -> Any:
        """Arrays of a call that runs eagerly: what is tied to other devices is copied to these."""

        def put(leaf: Any) -> Any:
            is_tied = isinstance(leaf, jax.Array) and not devices.is_traced(leaf) and leaf.committed
            return (
                jax.device_put(leaf, self.replicated)
                if is_tied and not self.is_on_all(leaf)
                else leaf
            )

        return jax.tree.map(put, given)

    def can_read(self, value: jax.Array) -> bool:
        """Whether a value can be read: a lost process's values never arrive."""
        return True

    def outputs(self, outputs: Any) -> Any:
        """The same arrays, whole in every process."""
        return outputs

    def at_rest(self, value: Any) -> Any:
        """An array that only some devices have in parts: in parts on all, or a copy on each.

        XLA partitions what a user computes with the former wrongly: gradients are as many times
        too large as there are copies (convolutions between large layers, for example).
        """
        if not isinstance(value, jax.Array) or devices.is_traced(value):
            return value
        if value.is_deleted() or value.sharding.is_fully_replicated:
            return value
        shape, own = value.shape, value.sharding.shard_shape(value.shape)
        axes = [axis for axis, size in enumerate(shape) if own[axis] != size]
        if math.prod(shape) == math.prod(own) * self.mesh.size:
            return value
        spec = PartitionSpec()
        if not shape[axes[0]] % self.mesh.size:
            spec = PartitionSpec(*[None] * axes[0], self.mesh.axis_names)
        return jax.device_put(value, NamedSharding(self.mesh, spec))

    def as_current(self) -> contextlib.AbstractContextManager[None]:
        """Scope in which this is the `current` placement."""
        return having(_current, self)

    def as_on_gpus(self) -> contextlib.AbstractContextManager[None]:
        """Scope in which processors get single rows, too: for programs that are only looked at."""
        return unchanged(self, "_least_rows", 0)

    def constrain(self, tensor: Tensor) -> Tensor:
        """Marks the rows of a traced tensor for the compiler to spread."""
        if not devices.is_traced(tensor):
            return tensor  # eager operations run where their operands are
        return jax.lax.with_sharding_constraint(tensor, self.of_rows(tensor))


def prime_factors(number: int) -> list[int]:
    """The prime factors of a number, the largest first; `[1]` for 1."""
    factors: list[int] = []
    divisor = 2
    while number > 1:
        while not number % divisor:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors[::-1] or [1]


def on_one_device(value: jax.Array) -> jax.Array:
    """The same values on JAX's default device, where they would be without a parallel model.

    Copies through the host: JAX ties any other copy to its device, and refuses to compute with
    arrays tied to different devices.
    """
    return jax.device_put(np.asarray(value))


def is_sparse(value: Any) -> bool:
    """Whether a tensor of a batch is several arrays, none of which has its rows."""
    return isinstance(value, JAXSparse)


def on_host() -> Any:
    """Scope in which new arrays are in the host's memory."""
    return jax.default_device(jax.local_devices(backend="cpu")[0])
