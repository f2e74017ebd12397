"""The model that many tests train, and data for it."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

from keras_multigpu import make_parallel


def mlp():
    """Two layers for rows of six numbers, equal each time."""
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(2)]
    )


def pair(build=mlp, n=4, **changes):
    """A plain and a parallel model, compiled alike."""
    models = build(), make_parallel(build(), n)
    for model in models:
        model.compile(**{"optimizer": keras.optimizers.SGD(0.05), "loss": "mse", **changes})
    return models


def arrays(rows):
    """Rows of six numbers, and two to be found, equal each time."""
    rng = np.random.default_rng(5)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 2))
