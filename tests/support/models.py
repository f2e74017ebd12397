"""Models that several tests train, and data for them."""

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


def wide_perceptron():
    """Large layers beside each other, rows that see each other, and random numbers."""
    wide = [layers.Dense(64, "relu"), layers.Dense(64, "tanh")]
    rest = [layers.BatchNormalization(), layers.Dropout(0.3, seed=1), layers.Dense(3)]
    return keras.Sequential([keras.Input((20,)), *wide, *rest])


def wide_transformer(dropout=0.0):
    """Heads, a layer that widens and one that narrows, and a table."""
    tokens = keras.Input((9,), dtype="int32")
    x = layers.Embedding(200, 32)(tokens)
    x = layers.LayerNormalization()(
        x + layers.MultiHeadAttention(4, 8, dropout=dropout, seed=2)(x, x)
    )
    wide = layers.Dense(128, "gelu")(x)
    x = layers.LayerNormalization()(x + layers.Dense(32)(wide))
    return keras.Model(tokens, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def recurrent_beside_wide():
    """A loop between large layers."""
    inputs = keras.Input((5, 4))
    x = layers.LSTM(8)(layers.Dense(32, "tanh")(inputs))
    return keras.Model(inputs, layers.Dense(3)(layers.Dense(64, "relu")(x)))


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
