"""The places of rows in a batch, and their number, that have an effect beyond some rows only."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from support.exactness import assert_equal, train

pytestmark = pytest.mark.usefixtures("in_float64")

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(90, 8))
IDS = RNG.integers(0, 4, (90, 1)).astype("int32")


def routed(x, capacity=12):
    """Switch Transformer's experts: each takes its first tokens only."""
    shares = tf.nn.softmax(x[:, :3])
    chosen = tf.one_hot(tf.argmax(shares, axis=1), 3, dtype=x.dtype)
    place = tf.cumsum(chosen, axis=0) * chosen
    taken = shares * chosen * tf.cast(place <= capacity, x.dtype)
    return x * tf.reduce_sum(taken, axis=1, keepdims=True)


def lagged(x):
    return x + tf.pad(x, [[20, 0], [0, 0]])[:-20]


def first_rows(x):
    return x * tf.cast(tf.range(tf.shape(x)[0]) < 16, x.dtype)[:, None]


def convolved(x):
    kernel = tf.ones((2, 8, 8), x.dtype)
    padded = tf.pad(x, [[20, 0], [0, 0]])[None]
    return ops.conv(padded, kernel, dilation_rate=20, padding="valid")[0]


DEPENDENT = {
    "capacity": routed,
    "lag": lagged,
    "place": first_rows,
    "conv": convolved,
    "number": lambda x: tf.cond(tf.shape(x)[0] > 40, lambda: x * 2, lambda: x),
    "size": lambda x: tf.where(tf.size(x) > 400, x * 2, x),
    "largest number": lambda x: x * 40.0 / tf.cast(tf.maximum(tf.shape(x)[0], 40), x.dtype),
    "chosen": lambda x: tf.cond(
        tf.shape(tf.boolean_mask(x, x[:, 0] > 0))[0] > 25, lambda: x * 2, lambda: x
    ),
    "rank": lambda x: x * tf.cast(tf.argsort(tf.argsort(x[:, 0])) < 20, x.dtype)[:, None],
    "nearest": lambda x: (
        x + tf.gather(x, tf.math.top_k(tf.matmul(x, x, transpose_b=True), 10).indices[:, 9])
    ),
    "groups": lambda x: tf.reshape(tf.reshape(x, (-1, 15, 8)) - 1.0, (-1, 8)),
}


def frequent(counts, ids):
    return 1.0 + tf.cast(tf.gather(counts, ids[:, 0]) > 15, "float64")[:, None]


def by_unique(ids):
    _, places, counts = tf.unique_with_counts(ids[:, 0])
    return 1.0 + tf.cast(tf.gather(counts, places) > 15, "float64")[:, None]


OF_IDS = {
    "unique": by_unique,
    "bincount": lambda ids: frequent(tf.math.bincount(ids[:, 0], minlength=9), ids),
    "segments": lambda ids: frequent(
        tf.math.unsorted_segment_sum(tf.ones_like(ids[:, 0]), ids[:, 0], 9), ids
    ),
    "pairs": lambda ids: (
        1.0
        + tf.cast(
            tf.reduce_sum(tf.cast(ids == tf.transpose(ids), "int32"), 1, keepdims=True) > 15,
            "float64",
        )
    ),
}


class Of(keras.Model):
    """A function between two layers; or beside them, which adds a loss or assigns a state."""

    def __init__(self, function, is_beside):
        super().__init__()
        self.function, self.is_beside = function, is_beside
        self.first, self.last = layers.Dense(8, "tanh"), layers.Dense(1)
        self.sums = self.add_weight(shape=(8,), initializer="zeros", trainable=False, name="sums")

    def call(self, x):
        hidden = self.first(ops.cast(x, "float64"))
        if x.dtype == tf.int32:
            return self.last(hidden * self.function(x))
        if self.is_beside:
            self.function(self, hidden)
            return self.last(hidden)
        return self.last(self.function(hidden))


@pytest.fixture(name="compare")
def fixture_compare(both):
    def compare(function, x, is_beside=False):
        """Trains a model that has a function; nothing is computed by one device alone."""
        use = train(x, x[:, :1], batch_size=90)
        assert_equal(both(lambda: Of(function, is_beside), use, n=3))

    return compare


@pytest.mark.parametrize("name", DEPENDENT)
def test_places_that_have_an_effect_beyond_some_rows(compare, name):
    compare(DEPENDENT[name], ROWS)


@pytest.mark.parametrize("name", OF_IDS)
def test_numbers_that_are_frequent_in_a_batch(compare, name):
    compare(OF_IDS[name], IDS)


@pytest.mark.parametrize("change", [lagged, first_rows])
def test_custom_gradients_of_places(compare, change):
    @tf.custom_gradient
    def function(x):
        return tf.identity(x), lambda upstream: upstream + change(upstream)

    compare(function, ROWS)


def test_losses_and_states_of_places(compare):
    def add(model, x):
        model.add_loss(tf.reduce_sum(first_rows(x)))

    def assign(model, x):
        model.sums.assign_add(tf.reduce_sum(first_rows(x), axis=0))

    compare(add, ROWS, is_beside=True)
    compare(assign, ROWS, is_beside=True)
