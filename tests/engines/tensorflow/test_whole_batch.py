"""Numbers of a whole batch: states, losses and rows that depend on it, each against one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from support.exactness import assert_equal, predict, train

from keras_multigpu import make_parallel

pytestmark = pytest.mark.usefixtures("in_float64")

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(22, 6))
LOUD = ROWS * np.where(np.arange(22) % 5 == 3, 1000.0, 0.1)[:, None]
TARGETS = RNG.normal(size=(22, 2))


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


@pytest.fixture(name="compare")
def fixture_compare(both):
    def compare(layer, x, before=()):
        """Trains a model that has a layer; nothing is computed by one device alone."""

        def build():
            inner = [*before, layer(), layers.Flatten(), layers.Dense(2)]
            return keras.Sequential([keras.Input(x.shape[1:]), *inner])

        def use(model):
            optimizer = keras.optimizers.SGD(0.01 if before else 1e-6)
            return train(x, TARGETS, optimizer)(model), predict(x)(model)

        assert_equal(both(build, use))

    return compare


def test_a_spectrogram_whose_loudest_row_bounds_the_others(both):
    """Keras has no spectrograms in float64."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    sound = (LOUD[:, :1] * RNG.normal(size=(22, 64))).astype("float32")

    def build():
        spectrogram = layers.MelSpectrogram(fft_length=16, sequence_stride=8, num_mel_bins=4)
        return keras.Sequential([keras.Input((64,)), spectrogram])

    assert_equal(both(build, predict(sound)), 1e-4)


@pytest.mark.parametrize("threshold", [1e-4, 20.0, 500.0, 1e5])
def test_states_that_change_beyond_a_threshold(compare, threshold):
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
    step = tf.function(lambda x: parallel(x, training=True), autograph=False)
    step(tf.constant(broken))
    assert float(layer.state) == 0.0
    step(tf.constant(ROWS))
    assert float(layer.state) == 1.0


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
def test_losses_that_are_means_sums_and_extremes(compare, loss):
    compare(lambda: Adds(loss), ROWS)


def number_of_rows(x):
    return ops.cast(ops.shape(x)[0], x.dtype)


def large_ones(x):
    return ops.sum(ops.cast(x > 1.8, "int32"))


@pytest.mark.parametrize(
    "function",
    [
        lambda state, x: state + ops.where(number_of_rows(x) > 4, 1.0, 0.0),
        lambda state, x: state + number_of_rows(x) % 2,
        lambda state, x: state + ops.cast(large_ones(x) >= 2, x.dtype),
        lambda state, x: state + number_of_rows(x),
        lambda state, x: 0.9 * state + 0.1 * ops.sum(x) / ops.maximum(number_of_rows(x), 1.0),
        lambda state, x: state + ops.cast(large_ones(x), x.dtype),
    ],
    ids=["over_four", "odd", "two_or_more", "rows", "mean", "large"],
)
def test_states_that_count(compare, function):
    compare(lambda: Changes(function), ROWS)


def test_rows_that_see_each_other_in_a_branch_that_is_taken_later(compare):
    compare(lambda: Warms(lambda x: x - ops.mean(x, axis=0)), ROWS)
    compare(lambda: Warms(lambda x: x - ops.mean(x, axis=-1, keepdims=True)), ROWS)


def test_a_loop_that_ends_with_the_last_row(compare):
    """It subtracts one from each row until none is larger."""

    def reduced(x):
        return tf.while_loop(
            lambda y: tf.reduce_any(y > 1.0), lambda y: (tf.where(y > 1.0, y - 1.0, y),), [x]
        )[0]

    compare(lambda: layers.Lambda(reduced), ROWS)


@pytest.mark.parametrize(
    ("function", "batch"),
    [
        (lambda x: ops.repeat(x, 2, axis=0), 11),
        (lambda x: ops.reshape(x, (-1, 2)), 3),
        (lambda x: tf.boolean_mask(x, x[:, 0] > -1e8), 11),
    ],
    ids=["repeated", "halved", "chosen"],
)
def test_outputs_with_other_numbers_of_rows(both, function, batch):
    """Twice as many as the batch, or as many as their values say."""
    x = np.where(np.arange(22)[:, None] % 7 == 3, -1e12, ROWS)

    def build():
        inputs = keras.Input((6,))
        changed = layers.Lambda(function)
        outputs = layers.Dense(1)(layers.Activation("tanh")(changed(layers.Dense(4)(inputs))))
        return keras.Model(inputs, [outputs, changed(inputs)])

    def use(model):
        sizes = []
        tf.function(lambda: sizes.extend(one.shape[0] or -1 for one in model(x[:batch])))()
        loss = [lambda y, p: ops.reshape(ops.mean(ops.square(p)), (1,)), None]
        found = train(x, [x[:, :1], x], "sgd", loss, batch_size=batch)(model)
        return sizes, found, model.predict(x, batch_size=batch, verbose=0)

    assert_equal(both(build, use))


def longest(x):
    """The largest number of positive features: 0, 1 or 2."""
    return ops.max(ops.sum(ops.cast(x[:, :2] > 0, "int32"), axis=1))


@pytest.mark.thin(3)
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
def test_small_counts_of_the_whole_batch(compare, function):
    for seed in range(4):

        def layer(seed=seed):
            keras.utils.set_random_seed(seed)
            return keras.Sequential([layers.Dense(5, "tanh"), layers.Lambda(function)])

        compare(layer, ROWS)


def test_batches_that_are_cut_to_their_longest_row(compare):
    def cut(x):
        lengths = ops.sum(ops.cast(x > 0, "int32"), axis=1)
        mask = tf.sequence_mask(lengths, 6, x.dtype)
        kept = ops.max(lengths)
        return ops.sum((x * mask)[:, :kept], axis=1, keepdims=True)

    compare(lambda: layers.Lambda(cut), ROWS)
