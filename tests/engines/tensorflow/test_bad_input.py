"""Models that one might not be able to spread over devices, and input that none can take."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from support.parity import difference

from keras_multigpu import cluster, make_parallel


def _two_inputs():
    left, right = keras.Input((3,), name="left"), keras.Input((3,), name="right")
    return keras.Model({"left": left, "right": right}, layers.Dense(1)(left + right))


def test_the_runtimes_own_device_names():
    template = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    parallel = make_parallel(template, devices=["/job:localhost/replica:0/task:0/device:CPU:1"])
    assert parallel.devices == ("cpu:1",)


class Noted(layers.Layer):
    """Notes the first batch's number of rows, and uses it: in its state, or in a shape."""

    def __init__(self, has_state):
        super().__init__()
        self.has_state = has_state

    def build(self, shape):
        self.rows = shape[0]
        if self.has_state:
            self.state = self.add_weight(shape=shape, trainable=False)

    def call(self, inputs):
        return inputs + self.state if self.has_state else ops.reshape(inputs, (self.rows, 3))

    def compute_output_shape(self, shape):
        return shape


def _functional(rows):
    inputs = keras.Input(batch_shape=(rows, 3), name="pixels")
    return keras.Model(inputs, layers.Dense(1)(ops.concatenate([inputs, ops.ones((rows, 2))], -1)))


def _built(layer, rows):
    model = keras.Sequential([layer, layers.Dense(1)])
    model(np.zeros((rows, 3)))
    return model


SIZED = [lambda: _functional(8), lambda: _built(Noted(False), 8), lambda: _built(Noted(True), 8)]


@pytest.mark.parametrize("options", [{}, {"shard": "optimizer"}], ids=str)
@pytest.mark.parametrize("make", SIZED)
def test_a_batch_size_in_the_model(make, options, rng):
    x, y, results = rng.normal(size=(16, 3)), rng.normal(size=(16, 1)), []
    for n in (1, 3):
        keras.utils.set_random_seed(3)
        model = make_parallel(make(), n, **options)
        model.compile("adam", "mse")
        history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False).history
        results.append([history, model.get_weights(), model.predict(x, batch_size=8, verbose=0)])
    assert difference(*results) < 1e-6


def test_inputs_of_different_lengths():
    parallel = make_parallel(_two_inputs(), 4)
    x = {"left": np.zeros((8, 3), "float32"), "right": np.zeros((4, 3), "float32")}
    with pytest.raises(tf.errors.InvalidArgumentError, match="Incompatible shapes"):
        parallel(x)  # as one device answers
    unknown = {name: tf.TensorSpec([None, 3]) for name in x}
    step = tf.function(lambda data: parallel(data), input_signature=[unknown])
    with pytest.raises(tf.errors.InvalidArgumentError, match="same number of rows"):
        step(x)


class NoBatchAxis(layers.Layer):
    """Returns one thing or another that has not one row for each of the batch."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def call(self, inputs):
        if self.kind == "scalar":
            return ops.mean(inputs)
        if self.kind == "matrix":
            return ops.matmul(ops.transpose(inputs), inputs)
        return ops.matmul(inputs, ops.transpose(inputs))


@pytest.mark.parametrize("kind", ["scalar", "matrix", "pairs"])
def test_outputs_without_the_rows_of_the_batch(kind):
    plain = keras.Sequential([keras.Input((6,)), NoBatchAxis(kind)])
    x = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
    parallel = make_parallel(plain, 4)
    made = tf.function(parallel, autograph=False)(x)
    assert np.allclose(made, plain(x), atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"shard": "weights"}], ids=str)
def test_a_stateful_layer(options, rng):
    """It has a state for each row."""
    x, y, results = rng.normal(size=(12, 4, 3)), rng.normal(size=(12, 2)), []
    for n in (1, 3):
        keras.utils.set_random_seed(3)
        memory = layers.LSTM(2, stateful=True)
        template = keras.Sequential([keras.Input(batch_shape=(4, 4, 3)), memory])
        model = make_parallel(template, n, **options)
        model.compile("adam", "mse")
        history = model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False).history
        results.append([history, [np.asarray(one) for one in model.variables]])
        memory.reset_states()
        results[-1].append(model.predict(x, batch_size=4, verbose=0))
    assert difference(*results) < 1e-6


class CellWithDropout(layers.Layer):
    """Draws random numbers, and so assigns its seed, in every step of the loop."""

    state_size = 4

    def __init__(self):
        super().__init__()
        self.dense, self.dropout = layers.Dense(4), layers.Dropout(0.1)

    def build(self, shape):
        self.dense.build((None, shape[-1] + 4))

    def call(self, inputs, states, training=False):
        x = ops.tanh(self.dense(ops.concatenate([inputs, states[0]], axis=-1)))
        return self.dropout(x, training=training), [x]


@pytest.mark.parametrize("unroll", [False, True])
def test_a_state_assigned_in_a_loop(unroll, rng):
    losses, (x, y) = [], (rng.normal(size=(9, 5, 3)), rng.normal(size=(9, 4)))
    for n in (1, 4):
        keras.utils.set_random_seed(3)
        recurrent = layers.RNN(CellWithDropout(), unroll=unroll)
        parallel = make_parallel(keras.Sequential([keras.Input((5, 3)), recurrent]), n)
        parallel.compile("sgd", "mse")
        fitted = parallel.fit(x, y, batch_size=5, epochs=2, verbose=0, shuffle=False)
        losses.append(fitted.history["loss"])
    assert difference(*losses) < 1e-6


def test_integers_in_and_out():
    lookup = layers.IntegerLookup(vocabulary=[1, 2, 3])
    plain = keras.Sequential([keras.Input((3,), dtype="int32"), lookup])
    x = np.arange(15).reshape(5, 3)
    parallel = make_parallel(plain, 4)
    assert np.array_equal(parallel.predict(x, verbose=0), plain.predict(x, verbose=0))


def test_joining_processes_comes_first():
    with pytest.raises(RuntimeError, match="`join` must come once in a process, .* process_id=0"):
        cluster.join("127.0.0.1:2222", 2, 0)
