"""BatchNormalization in what users write around it: each against one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support.exactness import assert_equal, train

from keras_multigpu import make_parallel

pytestmark = pytest.mark.usefixtures("in_float64")


def test_an_error_in_a_step_leaves_a_process_that_works(rng):
    x = rng.normal(size=(12, 3))
    inputs = keras.Input((3,))
    y = layers.BatchNormalization()(layers.Dense(3)(inputs))
    y = layers.Lambda(lambda z: tf.debugging.assert_all_finite(z, "not finite") * 1.0)(y)
    model = keras.Model(inputs, layers.BatchNormalization()(y))
    parallel = make_parallel(model, 2)
    parallel.compile("sgd", "mse", jit_compile=False)
    before = parallel.get_weights()
    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        parallel.train_on_batch(np.full_like(x, np.nan), x)
    parallel.set_weights(before)
    assert np.isfinite(parallel.train_on_batch(x, x))


def _mlp():
    return keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dense(1, activation="tanh"),
        ]
    )


@pytest.mark.parametrize("watches_weights", [True, False])
@pytest.mark.parametrize("is_eager", [True, False])
def test_second_derivatives(both, watches_weights, is_eager, rng):
    """As on one device, through the statistics too."""

    def penalty(model, x):
        with tf.GradientTape() as outer:
            with tf.GradientTape(watch_accessed_variables=watches_weights) as inner:
                inner.watch(x)
                y = model(x, training=True)
            slope = inner.gradient(y, x)
            loss = tf.reduce_mean(tf.reduce_sum(slope**2, axis=1))
        weights = [variable.value for variable in model.trainable_variables]
        return slope, outer.gradient(loss, weights)[:-1]

    x = tf.constant(rng.normal(size=(7, 3)))
    run = penalty if is_eager else tf.function(penalty)
    told = "eagerly under a tape" if is_eager else None
    assert_equal(both(_mlp, lambda model: run(model, x), told, n=3))


def test_a_function_that_is_differentiated_from_outside(both, rng):
    """TensorFlow builds its gradient when asked, in another graph."""
    x = tf.constant(rng.normal(size=(6, 3)))

    def use(model):
        function = tf.function(lambda x: model(x, training=True))
        weights, found = [variable.value for variable in model.trainable_variables], []
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(function(x) ** 2)
            found.append(tape.gradient(loss, weights))
        return found

    assert_equal(both(_mlp, use, n=2))


class HasNorm(layers.Layer):
    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization()

    def build(self, shape):
        self.norm.build(shape)


class InALoop(HasNorm):
    def call(self, x, training=False):
        if training:
            return tf.while_loop(lambda i, x: i < 2, self._step, (0, x))[1]
        return x

    def _step(self, i, x):
        mean, _ = self.norm._moments(x, None)
        return i + 1, self.norm.gamma * (x - mean) + self.norm.beta


class OwnStatistics(layers.BatchNormalization):
    def _moments(self, inputs, mask):
        mean, variance = super()._moments(inputs, mask)
        return mean, 2 * variance


class Differentiates(HasNorm):
    def call(self, x, training=False):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = self.norm(x, training=training) ** 2
        return tape.gradient(y, x)


class CustomGradient(HasNorm):
    """TensorFlow's own gradient of silu refers to its argument."""

    def call(self, x, training=False):
        return self.norm(x, training=training) + tf.nn.silu(x)


class Frozen(HasNorm):
    """Uses what it has seen before."""

    def __init__(self):
        super().__init__()
        self.norm.trainable = False

    def call(self, x, training=False):
        return self.norm(x, training=training)


@pytest.mark.parametrize("layer", [InALoop, Differentiates, CustomGradient, OwnStatistics, Frozen])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_statistics_in_layers_of_ones_own(both, layer, run_eagerly, rng):
    x = rng.normal(size=(9, 3))

    def build():
        return keras.Sequential([keras.Input((3,)), layers.Dense(3), layer(), layers.Dense(3)])

    use = train(x, x, batch_size=4, run_eagerly=run_eagerly)
    assert_equal(both(build, use, "runs eagerly" if run_eagerly else None, n=2))


class Twice(keras.Model):
    """Calls itself twice in a step."""

    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization()
        self.out = layers.Dense(2)

    def build(self, shape):
        self.norm.build(shape)
        self.out.build(shape)

    def call(self, inputs, training=False):
        return self.out(self.norm(inputs, training=training))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            first, second = self(data[0], training=True), self(-2 * data[0], training=True)
            loss = tf.reduce_mean((first - second) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


def test_two_calls_in_a_step(both, rng):
    x = rng.normal(size=(19, 6))

    def build():
        model = Twice()
        model.build((None, 6))
        return model

    assert_equal(both(build, train(x, x, batch_size=8, loss=None)))
