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
STATE = tf.Variable(1.0, trainable=False)


class Changes(layers.Layer):
    """Changes its state by a function of the state and the rows."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.state = self.add_weight((), "zeros", trainable=False, name="state")

    def call(self, x, training=None):
        if training:
            self.state.assign(self.function(self.state, x))
        return x


class Counts(Changes):
    """Counts the batches that fulfil a condition."""

    def __init__(self, condition):
        super().__init__(lambda state, x: ops.where(condition(x), state + 1, state))


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


@pytest.fixture(name="compare")
def fixture_compare(way):
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if way == "sliced" else "error")
            results = keras.tree.flatten(train(4))
        for one, other in zip(expected, results, strict=True):
            np.testing.assert_allclose(other, one, rtol=tolerance, atol=tolerance)

    return compare


def test_a_spectrogram_whose_loudest_row_bounds_the_others(compare):
    sound = LOUD[:, :1] * RNG.normal(size=(22, 64)).astype("float32")
    made = {"fft_length": 16, "sequence_stride": 8, "num_mel_bins": 4}
    compare(lambda: layers.MelSpectrogram(**made), sound, tolerance=1e-4)


@pytest.mark.parametrize("threshold", [1e-4, 20.0, 500.0, 1e5])
def test_states_that_change_beyond_a_threshold_are_merged(compare, threshold):
    compare(lambda: Counts(lambda x: ops.max(x) > threshold), LOUD)
    compare(lambda: Counts(lambda x: ops.any(x > threshold)), LOUD)


def test_a_state_whose_threshold_is_never_reached(compare):
    bounded = [layers.Activation("tanh")]
    compare(lambda: Counts(lambda x: ops.max(x) > 2.0), ROWS, bounded)


def test_a_state_that_changes_if_all_numbers_are_finite():
    broken = ROWS.copy()
    broken[3] = np.nan
    layer = Counts(lambda x: ops.all(ops.isfinite(x)))
    model = keras.Sequential([keras.Input((6,)), layer, layers.Dense(2)])
    parallel = make_parallel(model, 4)
    tf.function(lambda: parallel(broken, training=True), autograph=False)()
    assert float(layer.state) == 0.0


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: 1e-3 * ops.relu(ops.sum(ops.square(x)) - 1e4),
        lambda x: 1.0 + 1e-6 * ops.square(ops.mean(x)),
        lambda x: ops.log(1000.0 + ops.mean(ops.tanh(x))),
    ],
)
def test_losses_that_look_like_means(compare, loss):
    compare(lambda: Adds(loss), ROWS, [layers.Activation("tanh")])


def test_a_loss_that_balances_experts_that_are_used_alike(compare):
    compare(Balances, ROWS)


def test_rows_that_see_each_other_beyond_a_threshold(compare):
    def bounded(x):
        return x / ops.maximum(5000.0, ops.sum(ops.abs(x)))

    compare(lambda: layers.Lambda(bounded), ROWS, [layers.Activation("tanh")])


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: ops.mean(ops.square(x)) - 0.1 * ops.mean(x) / 3.0,
        lambda x: -0.5 * ops.sum(1 + x - ops.square(x)) / ops.cast(ops.shape(x)[0], x.dtype),
        lambda x: ops.mean(ops.relu(ops.norm(x, axis=-1) - 1.0)) * 0.1,
        lambda x: ops.max(ops.abs(x)),
    ],
)
def test_means_sums_and_extremes_stay_sliced(compare, loss):
    compare(lambda: Adds(loss), ROWS)


def chosen(first, second):
    """A branch that a state chooses."""
    return tf.cond(STATE > 2.0, first, second)


def wide(function):
    """What `BatchWide` finds in a function of rows."""
    traced = tf.function(function).get_concrete_function(tf.TensorSpec([None, 6]))
    found = BatchWide.of_call(traced.graph, traced.inputs)
    (output,) = traced.outputs
    made = [output.op.inputs[0], output] if output.op.type == "Identity" else [output]
    return found.traits(made[0])


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
        (lambda x: tf.reduce_sum(tf.cast(x > 1, tf.int32)) > 2, "Greater", True),
        (lambda x: tf.cond(x[0, 0] > 1, lambda: x, lambda: 2 * x), "StridedSlice", True),
        (lambda x: chosen(lambda: x - tf.reduce_mean(x, 0), lambda: x), "Mean", False),
        (lambda x: chosen(lambda: tf.reduce_sum(x), lambda: 0.0), "Sum", False),
        (lambda x: chosen(lambda: tf.reduce_mean(x, 1), lambda: x[:, 0]), None, False),
        (lambda x: tf.function(lambda y: y - tf.reduce_max(y))(x), "Max", False),
        (lambda x: tf.map_fn(lambda row: row / tf.reduce_max(row), x), None, False),
    ],
)
def test_numbers_of_a_batch_are_found(function, maker, is_curved):
    found = wide(function)
    assert (found.maker.type if found.maker else None, found.is_curved) == (maker, is_curved)


@pytest.mark.parametrize(
    ("function", "is_stepped"),
    [
        (lambda n: n, False),
        (lambda n: 1.0 / n, False),
        (lambda n: 1.0 / tf.maximum(n, 1.0), False),
        (lambda n: tf.where(n > 0, 1.0 / n, 0.0), False),
        (lambda n: tf.where(n > 8, 1.0, 0.0), True),
        (lambda n: n % 2, True),
        (lambda n: tf.nn.relu(n - 4.0), True),
        (lambda n: tf.minimum(n, 64.0), True),
    ],
)
def test_steps_in_the_number_of_rows_are_found(function, is_stepped):
    found = wide(lambda x: function(tf.cast(tf.shape(x)[0], tf.float32)))
    assert found.is_stepped == is_stepped
    features = wide(lambda x: tf.reduce_sum(x) * function(tf.cast(tf.shape(x)[1], tf.float32)))
    assert not features.is_stepped


def number_of_rows(x):
    return ops.cast(ops.shape(x)[0], x.dtype)


@pytest.mark.parametrize(
    "function",
    [
        lambda state, x: state + ops.where(number_of_rows(x) > 4, 1.0, 0.0),
        lambda state, x: state + number_of_rows(x) % 2,
        lambda state, x: state + ops.cast(ops.sum(ops.cast(x > 1.8, "int32")) >= 2, "float32"),
    ],
)
def test_states_that_count_batches_by_their_rows(compare, function):
    compare(lambda: Changes(function), ROWS)


@pytest.mark.parametrize(
    "function",
    [
        lambda state, x: state + number_of_rows(x),
        lambda state, x: 0.9 * state + 0.1 * ops.sum(x) / ops.maximum(number_of_rows(x), 1.0),
        lambda state, x: state + ops.cast(ops.sum(ops.cast(x > 1.8, "int32")), "float32"),
    ],
)
def test_states_that_count_rows_stay_sliced(compare, function):
    compare(lambda: Changes(function), ROWS)


class Warms(layers.Layer):
    """Begins to change the rows after three steps."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.step = self.add_weight((), "zeros", trainable=False, name="step")

    def call(self, x, training=None):
        if training:
            self.step.assign(self.step + 1)
        return ops.cond(self.step > 3, lambda: self.function(x), lambda: x)


def test_rows_that_see_each_other_in_a_branch_that_is_taken_later(compare):
    compare(lambda: Warms(lambda x: x - ops.mean(x, axis=0)), ROWS)
    compare(lambda: Warms(lambda x: x - ops.mean(x, axis=-1, keepdims=True)), ROWS)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: tf.map_fn(lambda row: 2 * row, x), False),
        (lambda x: tf.while_loop(lambda y: tf.reduce_any(y > 1), lambda y: (y - 1,), [x])[0], True),
        (lambda x: ops.fori_loop(0, tf.cast(x[0, 0], tf.int32), lambda k, y: y * 0.9, x), True),
        (lambda x: ops.fori_loop(0, 3, lambda k, y: y * 0.9, x), False),
    ],
    ids=["rows", "while", "count", "constant"],
)
def test_loops_whose_length_the_rows_say(function, expected):
    traced = tf.function(function).get_concrete_function(tf.TensorSpec([None, 6]))
    assert BatchWide.of_call(traced.graph, traced.inputs).loops_by_rows == expected


def test_a_loop_that_large_numbers_would_keep_running(compare):
    """It subtracts one from each row until none is larger: made-up rows must not be huge."""

    def reduced(x):
        return tf.while_loop(
            lambda y: tf.reduce_any(y > 1.0), lambda y: (tf.where(y > 1.0, y - 1.0, y),), [x]
        )[0]

    compare(lambda: layers.Lambda(reduced), ROWS, tolerance=1e-4)


@pytest.mark.parametrize(
    ("function", "batch"),
    [
        (lambda x: ops.repeat(x, 2, axis=0), 11),
        (lambda x: ops.reshape(x, (-1, 2)), 3),
        (lambda x: tf.boolean_mask(x, x[:, 0] > -1e8), 11),
    ],
    ids=["repeated", "halved", "chosen"],
)
def test_outputs_with_other_numbers_of_rows(function, batch):
    """Twice as many as the batch, or as many as their values say."""
    x = np.where(np.arange(22)[:, None] % 7 == 3, -1e12, ROWS)

    def run(n):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        changed = layers.Lambda(function)
        outputs = layers.Dense(1)(layers.Activation("tanh")(changed(layers.Dense(4)(inputs))))
        model = keras.Model(inputs, [outputs, changed(inputs)])
        if n:
            model = make_parallel(model, n)
        rows = []
        tf.function(lambda: rows.extend(one.shape[0] for one in model(x[:batch])))()
        loss = [lambda y, p: ops.reshape(ops.mean(ops.square(p)), (1,)), None]
        model.compile(keras.optimizers.SGD(0.1), loss)
        logs = model.fit(x, [x[:, :1], x], batch_size=batch, shuffle=False, verbose=0).history
        return rows, [logs["loss"], *model.predict(x, batch_size=batch, verbose=0)]

    rows, found = run(3)
    known, expected = run(None)
    assert rows == known
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_a_custom_gradient_of_outputs_with_two_rows_for_each():
    """It is tried on made-up rows, because it looks at their number."""

    @tf.custom_gradient
    def bounded(x):
        def backward(upstream):
            rows = ops.cast(ops.shape(upstream)[0], upstream.dtype)
            return tf.clip_by_value(upstream, -1e-3, 1e-3) * (rows / rows)

        return x, backward

    def train(n):
        keras.utils.set_random_seed(0)
        halved = layers.Lambda(lambda x: ops.reshape(bounded(x), (-1, 3)))
        model = keras.Sequential([keras.Input((6,)), layers.Dense(6), halved])
        model = make_parallel(model, n) if n else model
        model.compile("adam", lambda y, p: ops.reshape(ops.mean(ops.square(p - 1.0)), (1,)))
        model.fit(ROWS, ROWS, batch_size=7, shuffle=False, verbose=0)
        return model.get_weights()

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = train(3)
    for one, other in zip(found, train(None)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def longest(x):
    """The largest number of positive features: 0, 1 or 2."""
    return ops.max(ops.sum(ops.cast(x[:, :2] > 0, "int32"), axis=1))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * ops.cast(longest(x), x.dtype),
        lambda x: x * ops.cast(ops.shape(tf.sequence_mask(longest(x)))[0], x.dtype),
        lambda x: ops.fori_loop(0, longest(x), lambda k, y: y * 0.9, x),
        lambda x: x * ops.cast(tf.shape(x[:, : longest(x)])[1], x.dtype),
    ],
    ids=["number", "shape", "loop", "slice"],
)
def test_small_counts_of_the_whole_batch(compare, function, seed):
    def layer():
        keras.utils.set_random_seed(seed)
        return keras.Sequential([layers.Dense(5, "tanh"), layers.Lambda(function)])

    compare(layer, ROWS)


def test_batches_that_are_cut_to_their_longest_row_stay_sliced(compare):
    def cut(x):
        lengths = ops.sum(ops.cast(x > 0, "int32"), axis=1)
        mask = tf.sequence_mask(lengths, 6, x.dtype)
        kept = ops.max(lengths)
        return ops.sum((x * mask)[:, :kept], axis=1, keepdims=True)

    compare(lambda: layers.Lambda(cut), ROWS)
