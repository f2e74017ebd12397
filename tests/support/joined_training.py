"""What the trainings of joined processes share: numbers, a model, and how far results differ."""

import keras
import numpy as np
from keras import layers

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


def difference(one, other):
    """The largest difference between two arrays, in parts of the largest number."""
    assert np.shape(one) == np.shape(other), (np.shape(one), np.shape(other))
    scale = max(1.0, np.max(np.abs(other), initial=0.0))
    return float(np.max(np.abs(np.asarray(one, "float64") - other), initial=0.0) / scale)
