"""Models that tests of meshes of devices share."""

import keras
from keras import layers


def convolutional():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, activation="silu")(layers.GaussianNoise(0.1, seed=3)(inputs))
    x = layers.GroupNormalization(2)(x)
    return keras.Model(inputs, layers.Dense(3)(layers.Dense(64, "relu")(layers.Flatten()(x))))
