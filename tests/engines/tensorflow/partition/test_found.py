"""Steps that were wrong once, each with its relatives."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from support.models import mlp

from keras_multigpu import make_parallel

WEIGHTS = tf.Variable(tf.eye(3, dtype=tf.float64) * 0.5)
_doubled = tf.function(lambda a: tf.reduce_sum(a, 0) + a)
_compiled = tf.function(lambda a: tf.reduce_sum(a, 0) * tf.nn.relu(a), jit_compile=True)


def squeezed(x):
    """A slice of one row keeps its axis of rows."""
    return tf.reduce_sum(tf.squeeze(x[:, None, :]), 0), tf.squeeze(x[:, None, :])


def called_twice(x):
    """One traced function, planned for each call."""
    return _doubled(x) * _doubled(2 * x)


def forward_mode(x):
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
        found = tf.tanh(tf.nn.bias_add(x @ WEIGHTS, WEIGHTS[0]))
    return forward.jvp(found)


def a_loss_for_each_time(x):
    """A loop whose lists have sums over the rows."""
    with tf.GradientTape() as tape:
        state, loss = x, tf.zeros([], x.dtype)
        for _ in tf.range(5):
            state = tf.tanh(state @ WEIGHTS)
            loss += tf.reduce_mean(state)
    return tape.gradient(loss, WEIGHTS)


def a_compiled_function_of_all_rows(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        found = _compiled(x)
        loss = tf.reduce_sum(found)
    return tape.gradient(loss, x), found


def a_list_whose_rows_are_gathered(x):
    found = tf.TensorArray(x.dtype, 3)
    for time in tf.range(3):
        found = found.write(time, x * tf.cast(time, x.dtype))
    return found.gather([2, 0])


def a_condition_on_values(x):
    return x + 1 if tf.reduce_sum(x) > 0 else x - 1


STEPS = [
    squeezed,
    called_twice,
    forward_mode,
    a_loss_for_each_time,
    a_compiled_function_of_all_rows,
    a_list_whose_rows_are_gathered,
    a_condition_on_values,
]


@pytest.mark.parametrize("step", STEPS)
def test_steps_that_were_wrong(step, rng):
    plain, parallel = tf.function(step), make_parallel(mlp(), 4).function(step)
    for rows in (4, 7, 2, 1):
        x = tf.constant(rng.normal(size=(rows, 3)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what runs on one device
            found = tf.nest.flatten(parallel(x))
        for one, other in zip(tf.nest.flatten(plain(x)), found):
            np.testing.assert_allclose(other, one, atol=1e-12)


def test_a_list_without_its_last_element(rng):
    def last(x):
        raw = tf.raw_ops
        made = raw.TensorListFromTensor(tensor=tf.transpose(x), element_shape=[-1])
        made, one = raw.TensorListPopBack(
            input_handle=made, element_shape=[-1], element_dtype=x.dtype
        )
        return one * tf.cast(raw.TensorListLength(input_handle=made), x.dtype)

    x = tf.constant(rng.normal(size=(7, 3)))
    parallel = make_parallel(mlp(), 3)
    np.testing.assert_allclose(parallel.function(last)(x), last(x))


def test_sums_of_every_second_entry_of_sparse_rows(rng):
    """Rows of which no entry is named are left out."""

    def sums(x):
        places = tf.where(x > 0.0)
        sparse = tf.SparseTensor(places, tf.gather_nd(x, places), tf.shape(x, tf.int64))
        filled, _ = tf.sparse.fill_empty_rows(sparse, 0.0)
        taken = tf.math.segment_sum(filled.values[::2], filled.indices[::2, 0])
        return taken * 2.0

    x = np.zeros((5, 4))
    x[[0, 0, 4], [0, 1, 3]] = rng.uniform(1.0, 2.0, 3)
    parallel = make_parallel(mlp(), 3)
    np.testing.assert_allclose(parallel.function(sums)(tf.constant(x)), sums(tf.constant(x)))


class Outside(keras.layers.Layer):
    """Computes on the host: how many rows come back is not known."""

    def call(self, x):
        return tf.ensure_shape(
            tf.numpy_function(lambda a: a, [x], tf.float32), [None, *x.shape[1:]]
        )


def _share_spread(model, *shapes):
    """The share of a prediction's work that is spread, as `explain` tells it."""
    parallel = make_parallel(model, 4)
    parallel.function(lambda *tensors: parallel([*tensors]))(*map(tf.ones, shapes))
    return float(parallel.explain().partition("% of the work on rows")[0].rpartition(" ")[2])


def _products(x):
    """Of rows with each other: they meet no weights."""
    return tf.matmul(tf.nn.softmax(tf.tanh(tf.matmul(x, x, transpose_b=True))), x)


def _rounds(x, steps):
    body = lambda n, rows: (n + 1, _products(rows))  # noqa: E731
    return tf.while_loop(lambda n, _: n < steps, body, [0, x])[1]


@pytest.mark.filterwarnings("ignore:.*on one device, on the rows of all")
def test_the_work_of_a_loop_is_that_of_all_its_rounds():
    shares = []
    for steps in (2, 50):
        series, rows = keras.Input((8,)), keras.Input((64,))
        one = keras.layers.Lambda(_rounds, arguments={"steps": steps})(Outside()(series))
        model = keras.Model([series, rows], [one, keras.layers.Dense(256)(rows)])
        shares.append(_share_spread(model, (32, 8), (32, 64)))
    assert shares[0] > 50
    assert shares[1] < 40


@pytest.mark.filterwarnings("ignore:.*on one device, on the rows of all")
@pytest.mark.parametrize("rows", [32, 1024])
def test_the_work_on_rows_from_outside_grows_with_the_batch(rows):
    first, other = keras.Input((64,)), keras.Input((64,))
    outside = keras.layers.Lambda(_products)(Outside()(first))
    model = keras.Model([first, other], [outside, keras.layers.Dense(64)(other)])
    assert _share_spread(model, (rows, 64), (rows, 64)) < 60


def test_what_needs_all_rows_is_named_beside_what_follows():
    x = keras.Input((64,))
    some = Outside(name="some")(x)
    model = keras.Model(x, keras.layers.Lambda(_products)(some))
    parallel = make_parallel(model, 4)
    with pytest.warns(UserWarning, match=r"all: MatMul, .*, after PyFunc in 'some'\."):
        parallel.function(parallel)(tf.random.normal((1024, 64)))
    assert "on gathered rows, after PyFunc in 'some':" in parallel.explain()
