"""The state of a model, kept and given back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np


class Snapshot:
    """The values of variables at a moment, in the host's memory.

    Args:
        variables: the variables to remember.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        >>> before = Snapshot(model.variables)
        >>> model.set_weights([np.zeros((2, 1))])
        >>> before.restore()
        >>> bool(np.any(model.get_weights()[0]))
        True
    """

    def __init__(self, variables: Iterable[keras.Variable]):
        self._values: dict[int, tuple[keras.Variable, np.ndarray]] = {}
        self.add(variables)

    def add(self, variables: Iterable[keras.Variable]) -> None:
        """Remembers the values of further variables, of which it has none yet."""
        for variable in variables:
            if id(variable) not in self._values:
                # A copy: what the backend gives may be the variable's own memory.
                value = np.array(keras.ops.convert_to_numpy(variable))
                self._values[id(variable)] = (variable, value)

    def restore(self) -> None:
        """Gives the variables the values that they had."""
        for variable, value in self._values.values():
            variable.assign(value)


def state_of(model: keras.Model) -> list[keras.Variable]:
    """All that training changes in a model: weights, seeds, metrics, the optimizer's state.

    Args:
        model: a model that is built.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    slots = [] if optimizer is None else optimizer.variables
    return list({id(v): v for v in [*model.variables, *model.metrics_variables, *slots]}.values())


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """A scope after which Python's and NumPy's random numbers go on as if it had not been.

    Keras draws the seeds of new layers from Python's.
    """
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
