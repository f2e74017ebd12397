"""A call of a model outside a partitioned step, with its gradient."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support.parity import difference

from keras_multigpu import make_parallel

pytestmark = pytest.mark.usefixtures("partitioned")


class _Penalty(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(x**2))
        return x


def _model():
    keras.utils.set_random_seed(3)
    hidden = [layers.Dense(8, "relu"), layers.Dropout(0.3), layers.BatchNormalization(), _Penalty()]
    return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(4, "softmax")])


def _run(devices, batches):
    model = _model()
    called = model if devices == 1 else make_parallel(model, devices)
    weights = [one.value for one in model.trainable_variables]

    @tf.function(autograph=False, reduce_retracing=True)
    def step(x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = called(x, training=True)
            loss = tf.reduce_mean(keras.losses.categorical_crossentropy(y, found))
            loss += sum(called.losses)
        return loss, tape.gradient(loss, [x, *weights])

    results = [step(*map(tf.constant, batch)) for batch in batches]
    return keras.tree.map_structure(np.asarray, results), [np.asarray(v) for v in model.variables]


def test_gradients_by_inputs_and_weights(rng):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    batches = [(rng.normal(size=(n, 6)), np.eye(4)[rng.integers(0, 4, n)]) for n in (7, 2, 5)]
    assert difference(_run(1, batches), _run(3, batches)) < 1e-12


def test_a_second_derivative_is_refused(rng):
    model = make_parallel(_model(), 3)

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                total = tf.reduce_sum(model(x))
            slope = tape.gradient(total, x)
        return outer.gradient(slope, x)

    with pytest.raises(NotImplementedError, match="second derivative.*parallel.function"):
        step(tf.constant(rng.normal(size=(7, 6)).astype("float32")))


def test_masks_stay_with_outputs():
    words = keras.Input((5,), dtype="int32")
    model = make_parallel(keras.Model(words, layers.Embedding(9, 4, mask_zero=True)(words)), 3)
    ids = tf.constant(np.arange(35).reshape(7, 5) % 3)

    @tf.function(autograph=False)
    def step(ids):
        return model(ids)._keras_mask

    np.testing.assert_array_equal(step(ids), ids != 0)


def test_a_call_outside_a_graph_is_told(rng):
    model = make_parallel(_model(), 3)
    with pytest.warns(UserWarning, match="is called eagerly: it runs on 'cpu:0' alone"):
        model(rng.normal(size=(7, 6)).astype("float32"))
