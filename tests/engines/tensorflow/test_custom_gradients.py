"""Custom gradients: those that see the whole batch run whole, all others sliced."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from keras_multigpu import make_parallel

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(22, 6)).astype("float32")
TARGETS = RNG.normal(size=(22, 1)).astype("float32")


def by(backward):
    """An identity whose gradient is a function of the gradient and the value."""
    return tf.custom_gradient(lambda x: (tf.identity(x), lambda upstream: backward(upstream, x)))


class OfWeights(layers.Layer):
    """A product with weights that have a gradient of their own."""

    def __init__(self, backward):
        super().__init__()
        self.backward = backward

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], 5))

    def call(self, x):
        return ops.matmul(x, by(self.backward)(self.kernel.value))


class Recomputed(layers.Layer):
    """Computes its layers again for their gradients."""

    def __init__(self, *inner):
        super().__init__()
        self.inner = keras.Sequential(inner)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return keras.remat(self.inner)(x)


def of_rows(backward):
    return layers.Lambda(by(backward))


def in_function(backward):
    return layers.Lambda(tf.function(by(backward)))


@pytest.fixture(name="compare")
def fixture_compare(way):
    def compare(layer):
        """Trains a model with a layer plain and parallel; returns the warnings of whole calls."""

        def train(n):
            keras.utils.set_random_seed(3)
            first, last = layers.Dense(5, "tanh"), layers.Dense(1)
            model = keras.Sequential([keras.Input((6,)), first, layer(), last])
            model = make_parallel(model, n) if n else model
            model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
            model.fit(ROWS, TARGETS, batch_size=9, shuffle=False, verbose=0)
            return model.get_weights()

        expected = train(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if way == "sliced" else "error")
            results = train(4)
        for one, other in zip(expected, results, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)

    return compare


@pytest.mark.parametrize(
    "layer",
    [
        lambda: of_rows(lambda g, x: g / (1e-9 + tf.norm(g))),
        lambda: of_rows(lambda g, x: g * tf.reduce_mean(tf.abs(x))),
        lambda: of_rows(lambda g, x: g * tf.where(tf.reduce_max(x) > 50, 2.0, 1.0)),
        lambda: of_rows(lambda g, x: g * tf.cast(tf.shape(g)[0], g.dtype)),
        lambda: in_function(lambda g, x: g - tf.reduce_mean(g, axis=0)),
        lambda: OfWeights(lambda g, x: tf.clip_by_value(g, -0.01, 0.01)),
        lambda: OfWeights(lambda g, x: tf.clip_by_value(g, -50.0, 50.0)),
    ],
    ids=["norm", "mean", "threshold", "size", "function", "weights", "far"],
)
def test_gradients_that_see_the_whole_batch(compare, layer):
    compare(layer)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: of_rows(lambda g, x: -g),
        lambda: of_rows(lambda g, x: tf.clip_by_value(g, -0.01, 0.01)),
        lambda: of_rows(lambda g, x: g / (1e-9 + tf.norm(g, axis=-1, keepdims=True))),
        lambda: in_function(lambda g, x: -g),
        lambda: OfWeights(lambda g, x: g * tf.cast(tf.abs(x) < 1, g.dtype)),
        lambda: layers.Activation("silu"),
        lambda: Recomputed(layers.Dense(5, "gelu"), layers.LayerNormalization()),
    ],
    ids=["reversed", "clipped", "norm", "function", "weights", "silu", "recomputed"],
)
def test_gradients_of_single_rows_stay_sliced(compare, layer):
    compare(layer)


def test_layers_with_dropout_that_are_recomputed_stay_sliced():
    """Random numbers of a part of a batch are others, so trials can't judge."""
    model = keras.Sequential([keras.Input((6,)), Recomputed(layers.Dropout(0.5), layers.Dense(3))])
    parallel = make_parallel(model, 3)
    parallel.compile("sgd", "mse")
    parallel.fit(ROWS, ROWS[:, :3], verbose=0)  # warnings are errors here
