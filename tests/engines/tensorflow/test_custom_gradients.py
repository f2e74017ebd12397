"""Custom gradients, of single rows and of the whole batch: each against one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from support.exactness import assert_equal, train

from keras_multigpu import make_parallel

pytestmark = pytest.mark.usefixtures("in_float64")

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(22, 6))
TARGETS = RNG.normal(size=(22, 1))


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
def fixture_compare(both):
    def compare(layer):
        """Trains a model that has a layer; nothing is computed by one device alone."""

        def build():
            first, last = layers.Dense(5, "tanh"), layers.Dense(1)
            return keras.Sequential([keras.Input((6,)), first, layer(), last])

        assert_equal(both(build, train(ROWS, TARGETS, jit_compile=False)))

    return compare


@pytest.mark.parametrize(
    "layer",
    [
        lambda: of_rows(lambda g, x: g / (1e-9 + tf.norm(g))),
        lambda: of_rows(lambda g, x: g * tf.reduce_mean(tf.abs(x))),
        lambda: of_rows(lambda g, x: g * (1 + tf.cast(tf.reduce_max(x) > 50, g.dtype))),
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
def test_gradients_of_single_rows(compare, layer):
    compare(layer)


def test_layers_with_dropout_that_are_recomputed():
    model = keras.Sequential([keras.Input((6,)), Recomputed(layers.Dropout(0.5), layers.Dense(3))])
    parallel = make_parallel(model, 3)
    parallel.compile("sgd", "mse")
    parallel.fit(ROWS, ROWS[:, :3], verbose=0)  # warnings are errors here


def test_a_gradient_of_outputs_with_two_rows_for_each(both):
    @tf.custom_gradient
    def bounded(x):
        def backward(upstream):
            rows = ops.cast(ops.shape(upstream)[0], upstream.dtype)
            return tf.clip_by_value(upstream, -1e-3, 1e-3) * (rows / rows)

        return x, backward

    def build():
        halved = layers.Lambda(lambda x: ops.reshape(bounded(x), (-1, 3)))
        return keras.Sequential([keras.Input((6,)), layers.Dense(6), halved])

    def loss(truth, predicted):
        return ops.reshape(ops.mean(ops.square(predicted - 1.0)), (1,))

    assert_equal(both(build, train(ROWS, ROWS, "adam", loss, batch_size=7), n=3))
