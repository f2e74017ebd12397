"""The scope of a replica's call: separate random numbers, and a record of assignments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.shared import SEED, SEED_STEP
from keras_multigpu.engines.values import Tensor


class HiddenStateError(NotImplementedError):
    """A state is assigned in a loop or branch, from where a replica can't return it."""


class ReplicaScope(keras.StatelessScope):
    """Stateless scope in which replica `number` calls the template.

    It may assign variables in the current graph, and in those that `graphs` will have.

    Attributes:
        assigned: the assigned variables, by `id`.
        is_differentiated: whether the call is differentiated.
    """

    def __init__(
        self,
        state: Iterable[tuple[keras.Variable, Tensor]],
        number: Tensor,
        graphs: Sequence[Any] = (),
        is_differentiated: bool = True,
    ):
        super().__init__(collect_losses=True)
        # As an argument, Keras would cast the values to the calling layer's mixed-precision type.
        self.state_mapping.update((id(variable), value) for variable, value in state)
        self.is_differentiated = is_differentiated
        self._number = number
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._graphs = graphs
        self._seeded: set[int] = set()
        self._before: dict[int, Tensor] = {}
        self.assigned: dict[int, keras.Variable] = {}

    def get_current_value(self, variable: keras.Variable) -> Tensor | None:
        value = super().get_current_value(variable)
        if id(variable) in self._before:
            # Only here: TensorFlow never forgets a graph that has custom gradients.
            before = self._before[id(variable)]
            value = _assigned(tf.identity(value), tf.identity(before))
            if self._graph is None or self._is_own(tf.compat.v1.get_default_graph()):
                self.state_mapping[id(variable)] = value
                del self._before[id(variable)]
        if variable.name == SEED and id(variable) not in self._seeded:
            # The template's generators are in the mapping; Keras's global one is added here.
            self._seeded.add(id(variable))
            value = tf.identity(variable._value) if value is None else value
            shift = tf.cast(self._number, value.dtype) * tf.constant(SEED_STEP, value.dtype)
            value += tf.stack([shift, tf.zeros_like(shift)])
            self.state_mapping[id(variable)] = value
        return value

    def new_value(self, variable: keras.Variable) -> Tensor:
        """An assigned variable's value, for use outside the call."""
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        variable, value = update
        if self._graph is not None and not self._is_own(getattr(value, "graph", self._graph)):
            raise HiddenStateError(
                f"The variable {variable.path!r} is assigned within a loop or a branch, where a "
                "replica's state can't be followed. Unroll the loop (a recurrent layer: "
                "`unroll=True`), or assign after it; random layers assign their seed."
            )
        if tf.as_dtype(value.dtype).is_floating and id(variable) not in self._before:
            before = self.get_current_value(variable)
            before = tf.identity(variable._value) if before is None else before
            self._before[id(variable)] = tf.cast(before, value.dtype)
        self.assigned[id(variable)] = variable
        super().add_update((variable, value))

    def _is_own(self, graph: Any) -> bool:
        return graph is self._graph or any(graph is own for own in self._graphs)


@tf.custom_gradient
def _assigned(value: Tensor, before: Tensor) -> Any:
    """An assigned value, as it is read afterwards.

    As on one device, its gradient goes to the variable, not into what computed the value.
    """
    return tf.identity(value), lambda upstream: (None, upstream)
