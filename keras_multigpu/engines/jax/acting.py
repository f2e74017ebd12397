"""A committee's template in place of one of its members: with the member's own state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from keras_multigpu.engines.jax.state.stacked import StackedVariable
from keras_multigpu.engines.shared import active_scope, unchanged
from keras_multigpu.engines.values import Tensor


@contextlib.contextmanager
def having_state_of(
    number: int, stacks: Mapping[int, StackedVariable], *, keep: bool
) -> Iterator[None]:
    """Scope in which the first member's variables have the values of member `number`.

    `stacks` are all members' variables, by the `id` of the first member's. With `keep`, what is
    assigned goes to the member.
    """
    values = [(stack.parts[0], stack.value[number]) for stack in stacks.values()]
    with _Scope(values) as scope:
        yield
    for variable in scope.assigned.values() if keep else ():
        value, stack = scope.get_current_value(variable), stacks.get(id(variable))
        if stack is None:  # a metric's
            variable.assign(value)
        else:
            stack.assign(stack.value.at[number].set(value))


def having_losses(
    template: Any, losses: Sequence[Tensor]
) -> contextlib.AbstractContextManager[None]:
    """Scope in which a model has other losses, handed over as Keras does for `compute_loss`."""
    return unchanged(template, "_losses_override", list(losses))


class _Scope(keras.StatelessScope):
    """Scope in which some variables have given values, and the others those of the scope around it.

    Attributes:
        assigned: the variables that were assigned, by `id`.
    """

    def __init__(self, values: Sequence[tuple[keras.Variable, Tensor]]):
        super().__init__(values)
        self.assigned: dict[int, keras.Variable] = {}
        self._outer = active_scope()

    def get_current_value(self, variable: keras.Variable) -> Tensor | None:
        value = super().get_current_value(variable)
        if value is not None or self._outer is None:
            return value
        return self._outer.get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)
