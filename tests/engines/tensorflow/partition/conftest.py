"""The model whose steps are partitioned."""

import keras
import pytest
from keras import layers


@pytest.fixture
def model():
    """A perceptron, in float64."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    hidden = layers.Dense(32, activation="tanh")
    return keras.Sequential([keras.Input((8,)), hidden, layers.Dense(8)])
