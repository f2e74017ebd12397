"""What a case of the parity table is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops


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


class OwnLossAndMetric(keras.Model):
    """Its own loss and its own metric; a backend adds the `train_step`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(8, activation="tanh")
        self.out = layers.Dense(2)
        self.largest = keras.metrics.Mean(name="largest")

    def call(self, inputs):
        return self.out(self.hidden(inputs))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + ops.mean(ops.abs(y_pred))


class OneMetric(keras.Model):
    """No metric but its own; a backend adds all steps."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.out = layers.Dense(2, activation="tanh")
        self.error = keras.metrics.MeanAbsoluteError(name="error")

    def call(self, inputs):
        return self.out(inputs)

    @property
    def metrics(self):
        return [self.error]


class LossOfInputs(keras.Model):
    """Regularization losses, and a loss that reads the inputs; a backend adds the `train_step`."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(2, kernel_regularizer="l2", activity_regularizer="l1")

    def call(self, inputs):
        return self.out(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(ops.cast(y, "float32") - y_pred) * ops.abs(x[:, :1]))
