"""Steps and layers in functions that XLA has to compile."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_multigpu import make_parallel

_CURE = (
    "It is within a `tf.function(jit_compile=True)`: leave that out, and pass `jit_compile=True` "
    "to `parallel.function` or `compile`."
)
_ROWS = np.ones((64, 256), "float32")


class Compiled(keras.Sequential):
    @tf.function(jit_compile=True)
    def train_step(self, data):
        return super().train_step(data)


def _make(kind):
    return kind([keras.Input((256,)), layers.Dense(256), layers.Dense(1)])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_train_step_that_is_compiled_by_itself(compiled):
    parallel = make_parallel(_make(Compiled), 2)
    parallel.compile("sgd", "mse", jit_compile=compiled)
    with pytest.warns(UserWarning, match="runs on one device") as told:
        parallel.train_on_batch(_ROWS, np.ones((64, 1), "float32"))
    assert _CURE in str(told[0].message)
    assert _CURE in parallel.explain()


def test_a_function_that_is_compiled_by_itself():
    model = _make(keras.Sequential)
    parallel = make_parallel(model, 2)

    @tf.function(jit_compile=True)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients):
            variable.assign_sub(0.01 * gradient)
        return loss

    with pytest.warns(UserWarning, match="leave that out, and pass `jit_compile=True`"):
        parallel.function(step)(tf.constant(_ROWS))


def test_other_operations_on_one_device():
    parallel = make_parallel(_make(keras.Sequential), 2)
    step = parallel.function(lambda x: tf.sort(x, 0))
    with pytest.warns(UserWarning, match="operations whose rows are independent") as told:
        step(tf.zeros((64, 40_000)))
    assert "jit_compile" not in str(told[0].message) + parallel.explain()


def test_calls_within_what_is_compiled_around_them():
    """XLA gives such a function to one device, whatever devices its operations have."""
    model = _make(keras.Sequential)
    parallel = make_parallel(model, 2)
    call = tf.function(lambda x: parallel(x), jit_compile=True)
    with pytest.warns(UserWarning, match="XLA compiles the function that calls it for one device"):
        np.testing.assert_allclose(call(tf.constant(_ROWS)), model(_ROWS), rtol=1e-5)

    around = keras.Sequential([keras.Input((256,)), make_parallel(model, 2)])
    around.compile("sgd", "mse", jit_compile=True)
    with pytest.warns(UserWarning, match="Leave `jit_compile=True` out there"):
        around.train_on_batch(_ROWS, np.ones((64, 1), "float32"))

    tower = make_parallel(model, 2, mode="tower")
    call = tf.function(lambda x: tower(x), jit_compile=True)
    with pytest.warns(UserWarning, match="XLA compiles the function that calls it for one device"):
        np.testing.assert_allclose(call(tf.constant(_ROWS)), model(_ROWS), rtol=1e-5)


def test_a_function_within_what_is_compiled_around_it():
    parallel = make_parallel(_make(keras.Sequential), 2)
    step = parallel.function(lambda x: tf.reduce_sum(x) + 1.0)
    around = tf.function(lambda x: step(x), jit_compile=True)
    with pytest.warns(UserWarning, match="`parallel.function.*` compiles a step for all"):
        assert around(tf.constant(_ROWS)) == _ROWS.size + 1
