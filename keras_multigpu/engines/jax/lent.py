"""The state that Keras lends to a step: while it is there, the variables are empty."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_multigpu.engines.jax.state.stacked import StackedVariable
from keras_multigpu.engines.runners import TrainedModel


class LentState:
    """A model's state in the latest step.

    Args:
        model: the model.

    Attributes:
        latest: the state that the latest step got, or gave.
    """

    def __init__(self, model: TrainedModel):
        self._model = model
        self.latest: Any = ()

    @contextlib.contextmanager
    def returned(self) -> Iterator[None]:
        """Scope of steps after whose error the variables have the latest state."""
        try:
            yield
        except BaseException:
            self._restore()
            raise

    def _restore(self) -> None:
        """Gives the variables the latest state again, after an error or an interruption.

        Keras removes the state from them during the steps, so it would be lost.
        """
        pairs = list(self.pairs())
        self.latest = ()
        for variable, value in pairs:
            is_stacked = isinstance(variable, StackedVariable)
            is_lent = variable.is_lent if is_stacked else variable._value is None
            if is_lent and not value.is_deleted():
                variable.assign(value)

    def pairs(self) -> Iterator[tuple[keras.Variable, Any]]:
        """The variables of the latest state, with their arrays in it."""
        model, state = self._model, self.latest
        lists = [model.trainable_variables, model.non_trainable_variables]
        if len(state) == 4:
            lists.append(model.optimizer.variables)
        if len(state) > 2:
            lists.append(model.metrics_variables)
        for variables, values in zip(lists, state):
            yield from zip(variables, values)
