"""The scope of a replica's call: its variables, separate random numbers, a record of changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.shared import SEED, SEED_STEP
from keras_multigpu.engines.values import Tensor


class HiddenStateError(NotImplementedError):
    """A state is assigned in a function, from where a replica can't return it."""


class ReplicaScope(keras.StatelessScope):
    """Stateless scope in which replica `number` calls the template.

    Args:
        state: the model's variables, each with its value: a tensor, or what stores it.
        number: the replica's number.
        is_own: whether no other replica has these variables, generators' states among them.

    Attributes:
        assigned: the assigned variables, by `id`.
    """

    def __init__(
        self, state: Iterable[tuple[keras.Variable, Any]], number: int, *, is_own: bool = False
    ):
        super().__init__(collect_losses=True)
        self._is_own = is_own
        self.assigned: dict[int, keras.Variable] = {}
        self._number = tf.constant(number)
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._seeded: set[int] = set()
        self._before: dict[int, Tensor] = {}
        # As an argument, Keras would cast the values to the calling layer's mixed-precision type.
        for variable, value in state:
            self.state_mapping[id(variable)] = value
            if variable.name == SEED and is_own:
                self._seeded.add(id(variable))
            elif variable.name == SEED:
                self._seed(variable, value)

    def get_current_value(self, variable: keras.Variable) -> Tensor | None:
        value = super().get_current_value(variable)
        if id(variable) in self._before:
            # Only here: TensorFlow never forgets a graph that has custom gradients.
            value = _assigned(tf.identity(value), tf.identity(self._before[id(variable)]))
            if self._graph is None or tf.compat.v1.get_default_graph() is self._graph:
                self.state_mapping[id(variable)] = value
                del self._before[id(variable)]
        if variable.name == SEED and id(variable) not in self._seeded:
            # The template's generators are in the mapping; Keras's global one is added here.
            value = self._seed(variable, variable._value if value is None else value)
        return value

    def _seed(self, variable: keras.Variable, value: Any) -> Tensor:
        self._seeded.add(id(variable))
        value = tf.identity(value)
        shift = tf.cast(self._number, value.dtype) * tf.constant(SEED_STEP, value.dtype)
        self.state_mapping[id(variable)] = value + tf.stack([shift, tf.zeros_like(shift)])
        return self.state_mapping[id(variable)]

    def new_value(self, variable: keras.Variable) -> Tensor:
        """An assigned variable's value, for use outside the call."""
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        variable, value = update
        graph = getattr(value, "graph", None)
        if graph is not None and graph is not self._graph:
            stored = self.state_mapping.get(id(variable))
            if self._is_own and isinstance(stored, tf.Variable):
                stored.assign(tf.cast(value, stored.dtype))  # there, as on one device
                return
            raise HiddenStateError(
                f"The variable {variable.path!r} is assigned within a loop, a branch or a "
                "`tf.function`, where a replica's state can't be followed. Unroll the loop (a "
                "recurrent layer: `unroll=True`), leave `tf.function` out, or assign after it; "
                "random layers assign their seed."
            )
        if tf.as_dtype(value.dtype).is_floating and id(variable) not in self._before:
            before = self.get_current_value(variable)
            before = tf.identity(variable._value if before is None else before)
            self._before[id(variable)] = tf.cast(before, value.dtype)
        self.assigned[id(variable)] = variable
        super().add_update((variable, value))

    def draws_for(self, outputs: Sequence[Tensor]) -> bool:
        """Whether tensors may depend on random numbers; eagerly, whether any were drawn."""
        if self._graph is None:
            return any(variable.name == SEED for variable in self.assigned.values())
        seen, waiting = set(), [tensor.op for tensor in outputs]
        while waiting:
            operation = waiting.pop()
            if operation is self._number.op or operation.type.startswith("Random"):
                return True
            if operation not in seen:
                seen.add(operation)
                waiting += [one.op for one in operation.inputs]
        return False


@tf.custom_gradient
def _assigned(value: Tensor, before: Tensor) -> Any:
    """An assigned value, as it is read afterwards.

    As on one device, its gradient goes to the variable, not into what computed the value.
    """
    return tf.identity(value), lambda upstream: (None, upstream)
