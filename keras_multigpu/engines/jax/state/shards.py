"""Tensor parallelism: the weights of large layers are spread over devices.

XLA then partitions the matrix products and inserts the communication.
"""

from __future__ import annotations

from typing import Any

import jax
import keras
from jax.sharding import NamedSharding, PartitionSpec

from keras_multigpu.engines.jax.placement import Placement
from keras_multigpu.engines.jax.state.parted import is_spread, put, release
from keras_multigpu.engines.wide import names_of


def shard(model: keras.Model, axes: dict[str, int], place: Placement) -> None:
    """Spreads a built model's weights over devices, along the axes from `find_wide`."""
    weights = names_of(model)
    for variable in model.variables:
        axis = axes.get(weights[id(variable)])
        if axis is not None:
            wanted = NamedSharding(place.mesh, PartitionSpec(*[None] * axis, place.wide_axes))
            put(variable, wanted)
        else:
            release([variable], place.mesh)


def shard_alike(slot: keras.Variable, reference: keras.Variable) -> None:
    """Spreads an optimizer's slot like its variable."""
    if is_spread(reference) and slot.shape == reference.shape:
        put(slot, reference._value.sharding)


def spread_ids(variables: list[keras.Variable], optimizer: Any) -> set[int]:
    """The `id`s of the variables that are spread, with arrays of their own."""
    spread = [variable for variable in variables if is_spread(variable)]
    # An optimizer may have set weights to its averages, and so share their arrays. Such weights
    # get separate arrays, because a step of the template may donate the memory of its arrays.
    shared = set() if optimizer is None else {id(slot._value) for slot in optimizer.variables}
    for variable in spread:
        if id(variable._value) in shared:
            variable.assign(jax.numpy.copy(variable._value))
    return set(map(id, spread))
