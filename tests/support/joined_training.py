"""What the trainings of joined processes share: numbers, a model, and how far results differ."""

import keras
import numpy as np
from keras import layers

from keras_multigpu.layers import MultiHotDense

ROWS, BATCH = 35, 16


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(keras.config.floatx())


def integers(high, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, high, shape)


def mlp(**options):
    inputs = keras.Input((6,))
    x = layers.Dense(8, "tanh", kernel_regularizer="l2")(inputs)
    x = layers.BatchNormalization()(x)
    model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
    options = {"optimizer": "adam", "metrics": ["accuracy"], **options}
    model.compile(loss="sparse_categorical_crossentropy", **options)
    return model, (numbers(ROWS, 6), integers(3, ROWS))


def tables(**options):
    """Tables and kernels that are large enough to be in parts, with norms over all of them."""
    words = keras.Input((4,), dtype="int32")
    numbers_of = keras.Input((40,))
    looked_up = layers.Flatten()(layers.Embedding(2000, 3)(words))
    wide = MultiHotDense(4, 3000)(words)
    x = layers.concatenate([looked_up, layers.Dense(50, "tanh")(numbers_of)])
    x = layers.BatchNormalization()(layers.Dense(64, use_bias=False)(x))
    model = keras.Model([words, numbers_of], layers.Dense(1)(layers.concatenate([x, wide])))
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.05, use_ema=True)
    model.compile(**{"optimizer": optimizer, "loss": "mse", **options})
    return model, ((integers(2000, ROWS, 4), numbers(ROWS, 40)), numbers(ROWS, 1, seed=1))


def difference(one, other):
    """The largest difference between two arrays, in parts of the largest number."""
    assert np.shape(one) == np.shape(other), (np.shape(one), np.shape(other))
    scale = max(1.0, np.max(np.abs(other), initial=0.0))
    return float(np.max(np.abs(np.asarray(one, "float64") - other), initial=0.0) / scale)
