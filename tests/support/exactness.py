"""What a plain model and a parallel one are compared by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np


def assert_equal(pair: tuple[Any, Any], tolerance: float = 1e-10) -> None:
    """Fails if two equal structures of arrays differ."""
    for one, other in zip(*map(keras.tree.flatten, pair), strict=True):
        assert np.allclose(one, other, rtol=0, atol=tolerance, equal_nan=True), (one, other)


def train(
    x: Any,
    y: Any,
    optimizer: Any = "sgd",
    loss: Any = "mse",
    *,
    batch_size: int = 9,
    **options: Any,
) -> Callable[[keras.Model], Any]:
    """A training in a few steps, the last with fewer rows: the losses, and then the weights."""

    def use(model: keras.Model) -> Any:
        chosen = keras.optimizers.get(optimizer() if callable(optimizer) else optimizer)
        model.compile(optimizer=chosen, loss=loss, **options)
        fit = {"batch_size": batch_size, "epochs": 2, "shuffle": False, "verbose": 0}
        return model.fit(x, y, **fit).history["loss"], model.get_weights()

    return use


def predict(x: Any) -> Callable[[keras.Model], Any]:
    """The outputs of a model."""
    return lambda model: model.predict(x, verbose=0)
