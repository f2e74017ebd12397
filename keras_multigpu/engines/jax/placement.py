"""Where the rows of a batch, and the state of a model, are among a model's devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental.sparse import JAXSparse
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_multigpu.engines.base import Tensor
from keras_multigpu.engines.jax import devices


@functools.cache
def placement(names: tuple[str, ...]) -> Placement:
    """The placement on the devices of these names."""
    return Placement(names)


class Placement:
    """A mesh of a model's devices, and the shardings on it.

    The rows of a batch are spread over as many of the devices as divide them evenly, since JAX
    has no uneven shards: over all devices, over some of them with copies on the others, or, for
    5 rows on 4 devices, a copy of the batch on each. To name such subsets the mesh has an axis
    for every prime factor of the number of devices.

    Args:
        names: the devices' names.

    Attributes:
        replicated: a copy on each device.
    """

    def __init__(self, names: tuple[str, ...]):
        found = np.array([devices.find(name) for name in names])
        factors = list(_prime_factors(len(names)))
        axes = tuple(f"rows_{index}" for index in range(len(factors)))
        self._mesh = Mesh(found.reshape(factors), axes) if factors else Mesh(found, ("rows",))
        self.replicated = NamedSharding(self._mesh, PartitionSpec())
        self._by_share = {}
        for share in range(1, len(names) + 1):
            if len(names) % share == 0:
                self._by_share[share] = NamedSharding(self._mesh, self._split(share))

    def _split(self, share: int) -> PartitionSpec:
        """The spec that cuts the first axis into so many shards, a divisor of the devices."""
        chosen = []
        for axis, size in self._mesh.shape.items():
            if share % size == 0 and size > 1:
                chosen.append(axis)
                share //= size
        return PartitionSpec(tuple(chosen)) if chosen else PartitionSpec()

    def of_rows(self, tensor: Any) -> NamedSharding:
        """The sharding of a part of a batch, whose first axis is that of the rows.

        Sparse tensors have no axis of rows in memory: they are copied to every device.
        """
        if isinstance(tensor, JAXSparse) or not np.ndim(tensor):
            return self.replicated
        return self._by_share[math.gcd(np.shape(tensor)[0], self._mesh.size)]

    def put_batch(self, batch: Any) -> Any:
        """A batch with each device's rows on that device."""
        shardings = jax.tree.map(self.of_rows, batch, is_leaf=_is_sparse)
        return jax.device_put(batch, shardings)

    def put_state(self, state: Any) -> Any:
        """A model's state with a copy on every device; what is there already stays."""
        return jax.tree.map(
            lambda value: (
                value
                if getattr(value, "sharding", None) == self.replicated
                else jax.device_put(value, self.replicated)
            ),
            state,
        )

    def constrain(self, tensor: Tensor) -> Tensor:
        """A tensor of a traced computation whose rows the compiler is to spread."""
        if not isinstance(tensor, jax.core.Tracer):
            return tensor  # eager operations run where their operands are
        return jax.lax.with_sharding_constraint(tensor, self.of_rows(tensor))


def on_one_device(value: jax.Array) -> jax.Array:
    """The same values on JAX's default device, where they would be without a parallel model.

    By way of the host: JAX ties every other copy to its device, and refuses to compute with it
    together with what is tied to others.
    """
    return jax.device_put(np.asarray(value))


def _is_sparse(value: Any) -> bool:
    return isinstance(value, JAXSparse)


def _prime_factors(number: int) -> Iterator[int]:
    factor = 2
    while number > 1:
        while number % factor == 0:
            yield factor
            number //= factor
        factor += 1
