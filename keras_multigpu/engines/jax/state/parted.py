"""Variables that are spread over devices, and stay so when a file is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding

from keras_multigpu.engines.jax.cluster.spread_variables import adopt, become
from keras_multigpu.engines.jax.placement import on_one_device
from keras_multigpu.engines.shared import active_scope


def is_spread(variable: keras.Variable) -> bool:
    """Whether each device has only a part of a variable."""
    value = variable._value
    return isinstance(value, jax.Array) and not value.sharding.is_fully_replicated


def put(variable: keras.Variable, wanted: NamedSharding) -> None:
    """Spreads a variable, unless it is spread like this."""
    if not wanted.is_fully_addressable:  # other processes have some of the devices
        adopt(variable, wanted)
        return
    become(variable, PartedVariable)
    if not variable._value.sharding.is_equivalent_to(wanted, len(variable.shape)):
        variable.assign(jax.device_put(variable._value, wanted))


def release(variables: Iterable[keras.Variable], mesh: Mesh | None = None) -> None:
    """Unties variables from other devices than a mesh's, to which another model has tied them."""
    here = set() if mesh is None else set(mesh.devices.flat)
    for variable in variables:
        value = variable._value
        if value is None or value.is_deleted() or not value.committed:
            continue
        if value.sharding.device_set != here:
            variable.assign(on_one_device(value))


def make_whole(variables: Iterable[keras.Variable]) -> None:
    """Makes variables whole that another model has spread."""
    release([one for one in variables if is_spread(one)])


@contextlib.contextmanager
def kept_in_place(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Scope on whose exit variables are spread as they were, or on one device."""
    before = [one._value.sharding if is_spread(one) else None for one in variables]
    try:
        yield
    finally:
        for variable, sharding in zip(variables, before):
            if sharding is not None:
                put(variable, sharding)
            elif is_spread(variable):
                release([variable])


class PartedVariable(keras.Variable):
    """A spread variable, which spreads the arrays of the host that are assigned to it.

    So no device needs room for a whole model while a file is read. It is not made, but adopted:
    Keras has made the variable.
    """

    def assign(self, value: Any) -> Any:
        """Assigns a value, as Keras does."""
        is_of_host = hasattr(value, "__array__") and not isinstance(
            value, (jax.Array, keras.Variable)
        )
        is_whole = is_of_host and np.shape(value) == tuple(self.shape)
        if is_whole and active_scope() is None and is_spread(self):
            value = jax.device_put(np.asarray(value), self._value.sharding)
        return super().assign(value)
