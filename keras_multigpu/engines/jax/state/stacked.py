"""Variables of several replicas as one array, with each replica's part on its device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import jax
import keras
from jax.sharding import NamedSharding

from keras_multigpu.engines.shared import unique
from keras_multigpu.engines.templates import metrics_variables
from keras_multigpu.engines.values import Tensor


class StackedVariable(keras.Variable):
    """The same variable of all replicas, stacked along a new first axis.

    A step on several devices takes arrays that span all of them, but each replica is a Keras model
    with separate variables. The step sees this variable. It has no storage: its value is put
    together from the parts, shard by shard, and assignments go to the parts.

    Args:
        parts: the variables, of equal shape and dtype.
        sharding: how the first axis is spread over the devices.
    """

    def __init__(self, parts: Sequence[keras.Variable], sharding: NamedSharding):
        self.parts = tuple(parts)
        self.is_lent = False  # to a step, until Keras gives it a value again
        self._sharding = sharding
        first = self.parts[0]
        super().__init__(
            self._value,
            dtype=first.dtype,
            trainable=first.trainable,
            autocast=False,
            name=first.name,
        )
        # Keras gives it to the optimizer's slots.
        self._layout = sharding
        # Optimizers search it for names.
        self._path = first.path
        self.constraint = first.constraint

    @property
    def _value(self) -> Tensor:
        """Where Keras reads a variable's value outside a step's state."""
        devices = list(self._sharding.mesh.devices.flat)
        share = len(self.parts) // len(devices)
        shape = (len(self.parts), *self.parts[0].shape)
        blocks = []
        with jax.ensure_compile_time_eval():
            for number, device in enumerate(devices):
                block = self.parts[number * share : (number + 1) * share]
                values = [jax.device_put(part._value, device) for part in block]
                blocks.append(jax.numpy.stack(values))
            return jax.make_array_from_single_device_arrays(shape, self._sharding, blocks)

    @_value.setter
    def _value(self, value: Tensor | None) -> None:
        self.is_lent = value is None
        if value is None:
            return  # Keras drops values while a step has them; the parts keep theirs
        shards = jax.device_put(value, self._sharding).addressable_shards
        rows = [
            row
            for shard in sorted(shards, key=lambda one: one.index[0].start or 0)
            for row in shard.data
        ]
        for part, row in zip(self.parts, rows):
            part.assign(row)


@contextlib.contextmanager
def as_one(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Scope in which stacked variables have the shape of one replica's."""
    shapes = [variable._shape for variable in variables]

    def set_shape(variable: keras.Variable, shape: tuple[int, ...]) -> None:
        variable._shape, variable._ndim = shape, len(shape)

    try:
        for variable, shape in zip(variables, shapes):
            set_shape(variable, shape[1:])
        yield
    finally:
        for variable, shape in zip(variables, shapes):
            set_shape(variable, shape)


def state_of(model: keras.Model) -> list[keras.Variable]:
    """The weights and other state of a step, without the metrics' variables."""
    in_metrics = {id(variable) for variable in metrics_variables(model)}
    return [v for v in unique(model.variables) if id(v) not in in_metrics]
