"""The scope of a replica's call: its own random numbers, and a record of what is assigned."""

from __future__ import annotations

from collections.abc import Iterable

import keras
import tensorflow as tf

from keras_multigpu.engines.base import Tensor

_SEED = "seed_generator_state"
# Added to the seed of replica i, i times: the golden ratio of 2^32 keeps the seeds apart.
_SEED_STEP = 0x9E3779B9


class ReplicaScope(keras.StatelessScope):
    """A stateless scope in which a replica calls the template.

    Args:
        state: the template's variables and their values.
        number: which replica it is, a scalar tensor.

    Attributes:
        assigned: the variables that were assigned, by their `id`.
    """

    def __init__(self, state: Iterable[tuple[keras.Variable, Tensor]], number: Tensor):
        super().__init__(state_mapping=list(state), collect_losses=True)
        self._number = number
        self._seeded: set[int] = set()
        self.assigned: dict[int, keras.Variable] = {}

    def get_current_value(self, variable: keras.Variable) -> Tensor | None:
        value = super().get_current_value(variable)
        if variable.name == _SEED and id(variable) not in self._seeded:
            # The template's own generators are mapped; Keras's global one is met here first.
            self._seeded.add(id(variable))
            value = tf.identity(variable._value) if value is None else value
            shift = tf.cast(self._number, value.dtype) * tf.constant(_SEED_STEP, value.dtype)
            value += tf.stack([shift, tf.zeros_like(shift)])
            self.state_mapping[id(variable)] = value
        return value

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)
