"""Keeps the state of a model while a report trains it, and gives it back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np


class Snapshot:
    """Copies of variables' values in host memory."""

    def __init__(self, variables: Iterable[keras.Variable]):
        self._values: dict[int, tuple[keras.Variable, np.ndarray]] = {}
        self.add(variables)

    def add(self, variables: Iterable[keras.Variable]) -> None:
        """Copies further variables; the values of known ones are kept."""
        for variable in variables:
            if id(variable) not in self._values:
                # np.array copies: the backend may return the variable's own memory.
                value = np.array(keras.ops.convert_to_numpy(variable))
                self._values[id(variable)] = (variable, value)

    def restore(self) -> None:
        """Assigns the copied values."""
        for variable, value in self._values.values():
            variable.assign(value)


def state_of(model: keras.Model) -> list[keras.Variable]:
    """All that training changes in a built model: weights, seeds, metrics, optimizer state."""
    optimizer: Any = getattr(model, "optimizer", None)
    slots = [] if optimizer is None else optimizer.variables
    return list({id(v): v for v in [*model.variables, *model.metrics_variables, *slots]}.values())


def build_optimizer(model: keras.Model) -> None:
    """Makes the optimizer's state, if a model has an optimizer, so that it can be kept."""
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restores Python's and NumPy's random state on exit: new layers draw their seeds from it."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
