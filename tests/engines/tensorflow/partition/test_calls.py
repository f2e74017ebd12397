"""A call of a model outside a partitioned step, with its gradient."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support.parity import difference

from keras_multigpu import make_parallel


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


def _derivatives(called, order):
    """The first derivatives of a call, by its input and weights, of `order` derivatives of it."""

    @tf.function(autograph=False)
    def step(x):
        with contextlib.ExitStack() as tapes:
            outer = [tapes.enter_context(tf.GradientTape()) for _ in range(order - 1)]
            with tf.GradientTape() as tape:
                for one in (*outer, tape):
                    one.watch(x)
                result = tf.reduce_sum(called(x, training=True) ** 2)
            slope = tape.gradient(result, x)
            for one in outer[:0:-1]:
                slope = one.gradient(tf.reduce_sum(slope**2), x)
            penalty = tf.reduce_sum(slope**2)
        weights = [one.value for one in called.trainable_variables]
        found = outer[0].gradient(penalty, [x, *weights])
        return [tf.convert_to_tensor(one) for one in found if one is not None]

    return step


@pytest.mark.parametrize("rows", [7, 2])
def test_second_derivatives(rng, rows):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    x = tf.constant(rng.normal(size=(rows, 6)))
    one, other = (_derivatives(make(_smooth()), 2)(x) for make in (lambda m: m, _on_three))
    assert len(one) == 5
    assert difference(list(map(np.asarray, one)), list(map(np.asarray, other))) < 1e-12


def _smooth():
    keras.utils.set_random_seed(3)
    hidden = [layers.Dense(8, "tanh"), layers.BatchNormalization(center=False, scale=False)]
    return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(4, "softmax")])


def _on_three(model):
    return make_parallel(model, 3)


def test_a_third_derivative_is_refused(rng):
    step = _derivatives(make_parallel(_smooth(), 3), 3)
    with pytest.raises(NotImplementedError, match="derivative.*parallel.function"):
        step(tf.constant(rng.normal(size=(7, 6)).astype("float32")))


def test_a_persistent_tape_asked_twice(rng):
    def gradients(called):
        @tf.function(autograph=False)
        def step(x):
            with tf.GradientTape(persistent=True) as tape:
                found = called(x)
                losses = [tf.reduce_sum(found[:, 0]), tf.reduce_sum(found[:, 1] ** 2)]
            return [tape.gradient(loss, called.trainable_weights[0].value) for loss in losses]

        return step(x)

    x = tf.constant(rng.normal(size=(7, 6)).astype("float32"))
    first, second = gradients(make_parallel(_smooth(), 3))
    assert difference([first, second], gradients(_smooth())) < 1e-5
    assert difference(first, second) > 1e-3


def test_masks_stay_with_outputs():
    words = keras.Input((5,), dtype="int32")
    model = make_parallel(keras.Model(words, layers.Embedding(9, 4, mask_zero=True)(words)), 3)
    ids = tf.constant(np.arange(35).reshape(7, 5) % 3)

    @tf.function(autograph=False)
    def step(ids):
        return model(ids)._keras_mask

    np.testing.assert_array_equal(step(ids), ids != 0)


def test_eager_gradients_are_told(rng):
    model, x = make_parallel(_model(), 3), tf.constant(rng.normal(size=(7, 6)).astype("float32"))
    model(x)  # costs little, and says nothing
    with tf.GradientTape(), pytest.warns(UserWarning, match="eagerly.*'cpu:0' alone"):
        model(x)
