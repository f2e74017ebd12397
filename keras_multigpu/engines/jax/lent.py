"""The state that Keras lends to a step: while it is there, the variables are empty."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np

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
        self._given: dict[str, dict[int, weakref.ref[Any]]] = {}
        self._weights: Sequence[Any] = ()

    def note(self, name: str, state: Any) -> None:
        """Notes the state that the latest step of a name gave."""
        self._given[name] = {id(leaf): weakref.ref(leaf) for leaf in jax.tree.leaves(state)}
        self._weights = _weights(state)

    def forget_weights(self) -> None:
        """Forgets what weights the latest step gave, which keeps their memory."""
        self._weights = ()

    def assigned(self, state: Any) -> set[int]:
        """The `id`s of whole arrays in a state that somebody has assigned since the latest step.

        Slots and metrics that come from no step; weights with other values. Their arrays may be
        new without that: the template moves the weights if one process calls its `predict`, say.
        """
        found = {id(one) for one in jax.tree.leaves(state[2:]) if self._is_assigned(one)}
        weights = _weights(state)
        if len(weights) == len(self._weights):
            found |= {id(new) for old, new in zip(self._weights, weights) if _differ(old, new)}
        return found

    def _is_assigned(self, leaf: Any) -> bool:
        """Whether a whole array comes from no step."""
        refs = (given.get(id(leaf)) for given in self._given.values())
        is_given = any(ref is not None and ref() is leaf for ref in refs)
        return leaf.is_fully_replicated and not is_given

    def paths(self) -> list[str]:
        """The paths of the variables whose arrays the latest state has, in its order."""
        return [variable.path for variable, value in self._pairs() for _ in jax.tree.leaves(value)]

    def current(self, variable: keras.Variable) -> Any:
        """A variable's array, which a step has while Keras has removed it from the variable."""
        if variable._value is not None:
            return variable._value
        return next(value for one, value in self._pairs() if one is variable)

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
        pairs = list(self._pairs())
        self.latest = ()
        for variable, value in pairs:
            is_stacked = isinstance(variable, StackedVariable)
            is_lent = variable.is_lent if is_stacked else variable._value is None
            if is_lent and not value.is_deleted():
                variable.assign(value)

    def _pairs(self) -> Iterator[tuple[keras.Variable, Any]]:
        """The variables of the latest state, with their arrays in it."""
        model, state = self._model, self.latest
        lists = [model.trainable_variables, model.non_trainable_variables]
        if len(state) == 4:
            lists.append(model.optimizer.variables)
        if len(state) > 2:
            lists.append(model.metrics_variables)
        for variables, values in zip(lists, state):
            yield from zip(variables, values)


def _weights(state: Any) -> list[Any]:
    """The arrays of weights in a step's state."""
    return jax.tree.leaves(state[:2])


def _differ(old: Any, new: Any) -> bool:
    """Whether whole arrays that this process can read have other values."""
    if new is old or old.is_deleted() or not isinstance(new, jax.Array):
        return False
    if not (old.is_fully_replicated and new.is_fully_replicated):
        return False
    return np.asarray(old).tobytes() != np.asarray(new).tobytes()
