"""What the loops share: the two kinds of data, small networks, losses."""

from __future__ import annotations

import keras
from keras import layers, ops

if keras.backend.backend() == "jax":
    from support.loops.on_jax import Loop
else:
    from support.loops.on_tensorflow import Loop

WIDTH = 6  # of a row of numbers
SIDE = 4  # of an image


def mlp(width, *units, **options):
    """Dense layers."""
    *hidden, last = units
    dense = [layers.Dense(one, activation="tanh") for one in hidden]
    return keras.Sequential([keras.Input((width,)), *dense, layers.Dense(last, **options)])


def to_image(*parts):
    """A network from images to images."""
    return keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 1)),
            layers.Conv2D(3, 3, padding="same", activation="tanh"),
            *parts,
            layers.Conv2D(1, 3, padding="same"),
        ]
    )


def to_score(channels=1):
    """A network from images to a number."""
    return keras.Sequential(
        [
            keras.Input((SIDE, SIDE, channels)),
            layers.Conv2D(3, 3, strides=2, padding="same"),
            layers.LeakyReLU(),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )


def to_vector(units=4):
    """An encoder of images."""
    first = layers.Conv2D(3, 3, strides=2, activation="tanh")
    return keras.Sequential(
        [keras.Input((SIDE, SIDE, 1)), first, layers.Flatten(), layers.Dense(units)]
    )


def rows(x):
    return ops.shape(x)[0]


def mse(a, b):
    return ops.mean(ops.square(a - b))


def is_real(scores, value):
    """The cross entropy of scores and one label for all."""
    return ops.mean(ops.softplus(scores) - value * scores)


def cosine(a, b):
    return ops.matmul(ops.normalize(a, axis=1), ops.transpose(ops.normalize(b, axis=1)))


def contrast(similarities):
    """The cross entropy of a row's similarities, whose positive is on the diagonal."""
    return -ops.mean(ops.diagonal(ops.log_softmax(similarities / 0.5, axis=1)))


def follow(target, source, rate=0.9):
    """Moves weights towards others: a moving average."""
    for one, other in zip(target.variables, source.variables):
        one.assign(rate * one + (1 - rate) * other)


class Images(Loop):
    """Loops whose data are images."""

    @staticmethod
    def data(rng, count):
        return {
            "image": rng.normal(size=(count, SIDE, SIDE, 1)),
            "other": rng.normal(size=(count, SIDE, SIDE, 1)),
            "label": rng.integers(0, 3, count),
        }

    def noise(self, x, *shape):
        return keras.random.normal((rows(x["image"]), *shape), seed=self.seed)

    def views(self, x):
        """Two augmentations of the images."""
        return self.augment(x["image"]), self.augment(ops.flip(x["image"], axis=2))


class Vectors(Loop):
    """Loops whose data are rows of numbers."""

    @staticmethod
    def data(rng, count):
        return {
            "row": rng.normal(size=(count, WIDTH)),
            "near": rng.normal(size=(count, WIDTH)),
            "far": rng.normal(size=(count, WIDTH)),
            "label": rng.integers(0, 3, count),
            "number": rng.normal(size=(count, 1)),
        }
