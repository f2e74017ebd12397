"""What a case of the parity table is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how to compile it, and data for it.

    Attributes:
        name: the case's name in the tests' output.
        build: makes the model, equal each time after the same seed.
        data: inputs and targets for a number of rows.
        compile: the arguments of `compile`.
        tolerance: the largest difference of outputs, logs and weights from one device.
    """

    name: str
    build: Callable[[], keras.Model]
    data: Callable[[np.random.Generator, int], tuple[Any, Any]]
    compile: dict[str, Any] = dataclasses.field(default_factory=dict)
    tolerance: float = 2e-5

    def __str__(self):
        return self.name


def vectors(rng, rows):
    """Rows of six numbers, and two to be found."""
    return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 2))
