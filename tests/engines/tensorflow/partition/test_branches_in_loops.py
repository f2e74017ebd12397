"""Branches within loops: what they keep for their gradients lies as the rows do."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from keras_multigpu import make_parallel, reports


def _steps(body, start, count=5):
    return tf.while_loop(lambda i, *_: i < count, body, (tf.constant(0), start))[1]


def _cond(dense, x):
    """Both branches keep tensors of rows, and shapes, at the same place."""

    def body(i, h):
        return i + 1, tf.cond(
            tf.equal(i % 2, 0),
            lambda: tf.tanh(dense(h)) * x[:, i],
            lambda: h * tf.sigmoid(h) + x[:, i],
        )

    return _steps(body, x[:, 0])


def _of_all(dense, x):
    """Which branch is taken depends on all rows."""

    def body(i, h):
        is_large = tf.reduce_mean(h) > 0.05
        return i + 1, tf.cond(is_large, lambda: h * dense(h), lambda: tf.sin(dense(h)) + x[:, i])

    return _steps(body, x[:, 0])


def _switch(dense, x):
    def body(i, h):
        cases = [lambda: dense(h), lambda: tf.exp(-h) * h, lambda: h - tf.reduce_mean(h, 0)]
        return i + 1, tf.switch_case(i % 3, cases)

    return _steps(body, x[:, 0])


def _branch_in_branch(dense, x):
    def body(i, h):
        def inner():
            return tf.cond(tf.equal(i, 2), lambda: dense(h) * h, lambda: tf.cos(h) * x[:, i])

        return i + 1, tf.cond(tf.equal(i % 2, 0), inner, lambda: h * x[:, 1] + dense(h))

    return _steps(body, x[:, 0])


def _loop_in_branch(dense, x):
    def body(i, h):
        def inner():
            return _steps(lambda j, g: (j + 1, tf.tanh(dense(g)) * x[:, j]), h, 3)

        return i + 1, tf.cond(tf.equal(i % 2, 0), inner, lambda: h * tf.sigmoid(h))

    return _steps(body, x[:, 0])


def _constants(dense, x):
    """A branch keeps zeros of the batch's rows, another has nothing to keep."""

    def body(i, h):
        zeros = tf.zeros([tf.shape(h)[0], 8], h.dtype)
        return i + 1, tf.cond(
            tf.equal(i % 2, 0), lambda: (zeros + 2) * dense(h) * tf.exp(zeros), lambda: h
        )

    return _steps(body, x[:, 0])


def _forced(dense, x):
    """Now and then, a decoder gets what is right instead of what it said (Bengio et al., 2015)."""

    def step(state, now):
        said, i = state
        given = ops.cond(ops.equal(i % 3, 0), lambda: now * 1.0, lambda: said * ops.sigmoid(said))
        return dense(given), i + 1

    start = ops.zeros_like(x[:, 0]), ops.zeros((), "int32")
    return tf.scan(step, ops.moveaxis(x, 1, 0), start)[0][-1]


def _scan(dense, x):
    """A scan over time, whose first state is a constant where the number of rows is."""

    def step(state, now):
        made = ops.tanh(dense(state) + now)
        return made, made

    start = ops.zeros((ops.shape(x)[0], 8), x.dtype)
    return ops.scan(step, start, ops.moveaxis(x, 1, 0))[0]


def _own_optional(dense, x):
    """A user's own, made in one branch and read in another."""

    def body(i, h):
        made = tf.cond(
            tf.equal(i % 2, 0),
            lambda: gen(tf.tanh(dense(h))),
            lambda: gen(tf.reverse(dense(h), [1])),
        )
        kind = {"output_types": [h.dtype], "output_shapes": [h.shape]}
        is_there = tf.cast(tf.raw_ops.OptionalHasValue(optional=made), h.dtype)
        return i + 1, tf.raw_ops.OptionalGetValue(optional=made, **kind)[0] * is_there

    def gen(tensor):
        return tf.raw_ops.OptionalFromValue(components=[tensor])

    return tf.stop_gradient(_steps(body, x[:, 0])) * dense(x[:, 1])


def _empty_optional(dense, x):
    """A user's, which is empty; a branch would read it."""
    empty = tf.experimental.Optional.empty(tf.TensorSpec([None, 8], x.dtype))
    return tf.cond(empty.has_value(), lambda: empty.get_value(), lambda: dense(x[:, 0])) * x[:, 1]


class _Layer(layers.Layer):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.dense = kind, layers.Dense(8)

    def build(self, shape):
        self.dense.build((None, 8))

    def call(self, x):
        return self.kind(self.dense, x)

    def compute_output_shape(self, shape):
        return shape[0], 8


def _model(kind):
    keras.utils.set_random_seed(1)
    x = keras.Input((5, 8))
    return keras.Model(x, layers.Dense(1)(_Layer(kind)(x)))


def _loop_of_unknown_length_in_branch(dense, x):
    """What the inner loop keeps differs with the counter."""

    def inner(h, count):
        return tf.while_loop(lambda j, _: j < count, lambda j, g: (j + 1, dense(g)), (0, h))[1]

    def body(i, h):
        cases = lambda: inner(h, i + 1), lambda: inner(h * 2, 2 - i) * x[:, 0]
        return i + 1, tf.cond(tf.reduce_max(h) > 0.3, *cases)

    return _steps(body, x[:, 0], 3)


KINDS = [
    _cond,
    _of_all,
    _switch,
    _branch_in_branch,
    _loop_in_branch,
    _constants,
    _forced,
    _scan,
    _own_optional,
]


def _check(kind, rows):
    """Trains a plain and a parallel model, and compares them; returns what is spread."""
    x = np.random.default_rng(0).normal(size=(rows, 5, 8))
    plain, template = _model(kind), _model(kind)
    parallel = make_parallel(template, 4)
    for model in (plain, parallel):
        model.compile("sgd", "mse")
        model.fit(x, x[:, 0, :1], batch_size=6, epochs=2, verbose=0)
    for a, b in zip(plain.get_weights(), template.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)
    return str(parallel.explain())


@pytest.mark.parametrize("rows", [12, 13], ids=["whole_batches", "incomplete_batch"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__[1:])
def test_they_are_spread(kind, rows, in_float64):
    assert "train_step: 100.0% of the work on rows" in _check(kind, rows)


@pytest.mark.filterwarnings("ignore:.*on one device, on the rows of all")
@pytest.mark.parametrize("kind", [_loop_of_unknown_length_in_branch, _empty_optional])
def test_what_one_device_computes(kind, in_float64):
    _check(kind, 13)


def _largest(dense, x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.reduce_max(dense(x)), lambda: x[0, 0] * 0)


def _largest_of_all_steps(dense, x):
    def step(i, largest, x):
        return i + 1, tf.maximum(largest, tf.reduce_max(x)), tf.tanh(dense(x))

    return tf.while_loop(lambda i, *_: i < 3, step, (0, x[0, 0] * 0, x))[1]


@pytest.mark.parametrize("kind", [_largest, _largest_of_all_steps])
@pytest.mark.parametrize("rows", [7, 8, 2])
def test_the_largest_of_all_rows(kind, rows, in_float64):
    """Other than of sums, there is no addend that changes nothing."""
    dense = layers.Dense(3)
    model = keras.Sequential([keras.Input((3,)), dense])
    found = make_parallel(model, 3).function(lambda x: kind(dense, x))
    x = np.random.default_rng(rows).normal(size=(rows, 3))
    for given in (tf.constant(x), tf.constant(-x)):
        np.testing.assert_allclose(found(given), kind(dense, given), rtol=1e-12)


class _Centered(layers.Layer):
    """Iterates a layer; the mean over the rows crosses in each iteration."""

    def build(self, shape):
        self.dense = layers.Dense(shape[-1])
        self.dense.build(shape)

    def call(self, x):
        def body(i, h):
            h = tf.tanh(self.dense(h))
            return i + 1, h - tf.reduce_mean(h, 0, keepdims=True)

        return tf.while_loop(lambda i, h: i < 3, body, (tf.constant(0), x))[1]


def test_rows_and_weights_stay_on_the_devices_of_a_loop(rng):
    model = keras.Sequential([keras.Input((64,)), _Centered(), layers.Dense(3)])
    parallel = make_parallel(model, 4)
    parallel.compile("sgd", "mse", jit_compile=False)
    found = reports.transfers(parallel, (rng.normal(size=(512, 64)), rng.normal(size=(512, 3))))
    inside = [one.tensor for one in found.prediction if "/while/body/" in one.tensor]
    kinds = {re.sub(r"[/_:\d]*$", "", one).rpartition("/")[2] for one in inside}
    assert "Mean" in kinds
    assert kinds <= {"Mean", "truediv", "input"}
