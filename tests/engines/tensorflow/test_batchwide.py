"""Numbers of a whole batch that made-up rows hardly show, if at all: each against one device."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from keras_multigpu import make_parallel
from keras_multigpu.engines.tensorflow.probing.batchwide import BatchWide

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(22, 6)).astype("float32")
LOUD = ROWS * np.where(np.arange(22) % 5 == 3, 1000.0, 0.1).astype("float32")[:, None]
TARGETS = RNG.normal(size=(22, 2)).astype("float32")


class Counts(layers.Layer):
    """Counts the batches that fulfil a condition."""

    def __init__(self, condition):
        super().__init__()
        self.condition = condition
        self.state = self.add_weight((), "zeros", trainable=False, name="count")

    def call(self, x, training=None):
        if training:
            self.state.assign(ops.where(self.condition(x), self.state + 1, self.state))
        return x


class Balances(layers.Layer):
    """Two experts, and a loss that hardly differs from a mean while both are used alike."""

    def call(self, x):
        share = ops.softmax(0.1 * x[:, :2])
        self.add_loss(ops.sum(ops.square(ops.mean(share, axis=0))))
        return x


class Adds(layers.Layer):
    """Adds a loss."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def call(self, x):
        self.add_loss(self.loss(x))
        return x


def compare(layer, x, before=(), tolerance=1e-5):
    """Trains a model with a layer plain and parallel; returns the warnings of whole calls."""

    def train(n):
        keras.utils.set_random_seed(3)
        inner = [*before, layer(), layers.Flatten(), layers.Dense(2)]
        model = keras.Sequential([keras.Input(x.shape[1:]), *inner])
        model = make_parallel(model, n) if n else model
        model.compile("sgd" if before else keras.optimizers.SGD(1e-6), "mse")
        history = model.fit(x, TARGETS, batch_size=9, shuffle=False, verbose=0).history
        return history["loss"], model.get_weights(), model.predict(x, verbose=0)

    expected = keras.tree.flatten(train(0))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        results = keras.tree.flatten(train(4))
    for one, other in zip(expected, results, strict=True):
        np.testing.assert_allclose(other, one, rtol=tolerance, atol=tolerance)
    return {str(one.message) for one in told if "alone" in str(one.message)}


def test_a_spectrogram_whose_loudest_row_bounds_the_others():
    sound = LOUD[:, :1] * RNG.normal(size=(22, 64)).astype("float32")
    made = {"fft_length": 16, "sequence_stride": 8, "num_mel_bins": 4}
    (text,) = compare(lambda: layers.MelSpectrogram(**made), sound, tolerance=1e-4)
    assert "mel_spectrogram" in text


@pytest.mark.parametrize("threshold", [1e-4, 20.0, 500.0, 1e5])
def test_states_that_change_beyond_a_threshold_are_merged(threshold):
    assert not compare(lambda: Counts(lambda x: ops.max(x) > threshold), LOUD)
    assert not compare(lambda: Counts(lambda x: ops.any(x > threshold)), LOUD)


def test_a_state_whose_threshold_is_never_reached():
    bounded = [layers.Activation("tanh")]
    (text,) = compare(lambda: Counts(lambda x: ops.max(x) > 2.0), ROWS, bounded)
    assert "'counts" in text
    assert "neither a mean, a sum nor an extreme" in text


def test_a_state_that_changes_if_all_numbers_are_finite():
    broken = ROWS.copy()
    broken[3] = np.nan
    layer = Counts(lambda x: ops.all(ops.isfinite(x)))
    model = keras.Sequential([keras.Input((6,)), layer, layers.Dense(2)])
    parallel = make_parallel(model, 4)
    with pytest.warns(UserWarning, match="runs on 'cpu:0' alone"):
        parallel(broken, training=True)
    assert float(layer.state) == 0.0


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: 1e-3 * ops.relu(ops.sum(ops.square(x)) - 1e4),
        lambda x: 1.0 + 1e-6 * ops.square(ops.mean(x)),
        lambda x: ops.log(1000.0 + ops.mean(ops.tanh(x))),
    ],
)
def test_losses_that_look_like_means(loss):
    (text,) = compare(lambda: Adds(loss), ROWS, [layers.Activation("tanh")])
    assert "adds a loss that is neither a mean nor a sum" in text


def test_a_loss_that_balances_experts_that_are_used_alike():
    (text,) = compare(Balances, ROWS)
    assert "adds a loss that is neither a mean nor a sum" in text


def test_rows_that_see_each_other_beyond_a_threshold():
    def bounded(x):
        return x / ops.maximum(5000.0, ops.sum(ops.abs(x)))

    (text,) = compare(lambda: layers.Lambda(bounded), ROWS, [layers.Activation("tanh")])
    assert "the rows of a batch may depend on each other, by its Sum" in text


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: ops.mean(ops.square(x)) - 0.1 * ops.mean(x) / 3.0,
        lambda x: -0.5 * ops.sum(1 + x - ops.square(x)) / ops.cast(ops.shape(x)[0], x.dtype),
        lambda x: ops.mean(ops.relu(ops.norm(x, axis=-1) - 1.0)) * 0.1,
        lambda x: ops.max(ops.abs(x)),
    ],
)
def test_means_sums_and_extremes_stay_sliced(loss):
    assert not compare(lambda: Adds(loss), ROWS)


def wide(function):
    """What `BatchWide` finds in a function of rows."""
    traced = tf.function(function).get_concrete_function(tf.TensorSpec([None, 6]))
    found = BatchWide(traced.graph, traced.inputs)
    (output,) = traced.outputs
    made = [output.op.inputs[0], output] if output.op.type == "Identity" else [output]
    return found.maker(made[0]), found.is_curved(made[0])


@pytest.mark.parametrize(
    ("function", "maker", "is_curved"),
    [
        (lambda x: x * 2, None, False),
        (lambda x: x + tf.cast(tf.shape(x)[0], x.dtype), None, False),
        (lambda x: x / tf.reduce_sum(x, axis=1, keepdims=True), None, False),
        (lambda x: x + 0.0 * tf.reduce_sum(x), None, False),
        (lambda x: tf.reduce_mean(x * x), "Mean", False),
        (lambda x: 0.5 * tf.reduce_sum(x, 0) / tf.cast(tf.shape(x)[0], x.dtype), "Sum", False),
        (lambda x: tf.reduce_sum(x) / tf.reduce_max(x), "Sum", True),
        (lambda x: tf.reduce_sum(x) * tf.reduce_sum(x), "Sum", True),
        (lambda x: 3.0 / tf.reduce_sum(x), "Sum", True),
        (lambda x: tf.cast(tf.reduce_sum(x), tf.int32), "Sum", True),
        (lambda x: x - tf.reduce_mean(x, axis=0), "Mean", False),
        (lambda x: tf.where(tf.reduce_any(x > 3), x, 2 * x), "Any", True),
        (lambda x: tf.square(x - x[0]), "StridedSlice", True),
    ],
)
def test_numbers_of_a_batch_are_found(function, maker, is_curved):
    found, curved = wide(function)
    assert (found.type if found else None, curved) == (maker, is_curved)
