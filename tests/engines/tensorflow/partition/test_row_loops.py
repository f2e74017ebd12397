"""Loops over the rows: each device goes through its own, and the numbers are those of one."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from keras_multigpu import make_parallel

_FLOAT = tf.float64


def _row(weight, row):
    return tf.tanh(row[None] @ weight)[0]


def _pairs(weight, x):
    given = x, tf.reverse(x, [1])
    return tf.map_fn(lambda two: _row(weight, two[0]) * two[1], given, fn_output_signature=_FLOAT)


def _by_index(weight, x):
    """Takes rows by number, the next one, too, and a mean over all."""
    count = tf.shape(x)[0]

    def at(i):
        return _row(weight, x[i]) + tf.gather(x, (i + 1) % count) + tf.reduce_mean(x)

    return tf.map_fn(at, tf.range(count), fn_output_signature=_FLOAT)


def _nested(weight, x):
    """A loop over a row's entries, and one of a few steps."""

    def refined(row):
        entries = tf.map_fn(lambda entry: tf.sin(entry) * weight[0, 0], row)
        start = 0, entries
        return tf.while_loop(
            lambda i, _: i < 3, lambda i, z: (i + 1, _row(weight, z)), start, maximum_iterations=3
        )[1]

    return tf.map_fn(refined, x)


def _inner_gradient(weight, x):
    """A step of an optimizer for each row (MAML)."""

    def adapted(row):
        with tf.GradientTape() as tape:
            tape.watch(weight)
            loss = tf.reduce_sum(_row(weight, row) ** 2)
        return _row(weight - 0.1 * tape.gradient(loss, weight), row)

    weight = tf.identity(weight)
    return tf.map_fn(adapted, x)


def _while(weight, x, at=lambda i, count: i, read=lambda rows, i: rows.read(i)):
    """Writes to an array, and adds up."""
    count = tf.shape(x)[0]
    made = tf.TensorArray(_FLOAT, count, element_shape=(6,))
    rows = tf.TensorArray(_FLOAT, count, element_shape=(6,), clear_after_read=False).unstack(x)

    def step(i, made, total):
        row = _row(weight, read(rows, i))
        return i + 1, made.write(at(i, count), row), total + tf.cast(i, _FLOAT) * tf.reduce_sum(row)

    start = 0, made, tf.constant(0.5, _FLOAT)
    _, made, total = tf.while_loop(lambda i, *_: i < count, step, start)
    return made.stack() * total


def _long_counters(weight, x):
    """64 bits, and one that begins at 5."""
    count = tf.shape(x, out_type=tf.int64)[0]

    def step(i, j, total):
        return i + 1, j + 1, total + tf.cast(i * j, _FLOAT) * _row(weight, x[i])

    start = tf.constant(0, tf.int64), tf.constant(5, tf.int64), tf.zeros([6], _FLOAT)
    _, last, total = tf.while_loop(lambda i, *_: i < count, step, start)
    return x * total * tf.cast(last, _FLOAT)


def _unstacked(weight, x):
    """Takes a mean over all rows in each iteration."""
    count = tf.shape(x)[0]
    rows = tf.TensorArray(_FLOAT, count).unstack(x)
    start = 0, tf.TensorArray(_FLOAT, count)
    _, made = tf.while_loop(
        lambda i, _: i < count,
        lambda i, made: (i + 1, made.write(i, _row(weight, rows.read(i) - tf.reduce_mean(x)))),
        start,
    )
    return made.stack()


def _along_rows(weight, x):
    """A loop over the rows in each iteration of one over another axis."""
    columns = tf.map_fn(
        lambda column: tf.map_fn(lambda entry: tf.sin(entry) * weight[0, 0], column),
        tf.transpose(tf.reshape(x, (-1, 2, 3)), (1, 0, 2)),
    )
    return tf.transpose(columns, (1, 0, 2))


def _steps_within_steps(weight, x):
    """A loop of all rows within another: its intermediates are lists in a list."""

    def refined(x):
        return tf.while_loop(
            lambda i, _: i < 2,
            lambda i, z: (i + 1, tf.tanh(z @ weight + x)),
            (0, x),
            maximum_iterations=2,
        )[1]

    start = 0, x
    return tf.while_loop(
        lambda i, _: i < 3, lambda i, z: (i + 1, refined(z)), start, maximum_iterations=3
    )[1]


def _of_unknown_length(weight, x):
    """Entries whose number is known by a promise only."""

    def largest(row):
        chosen = tf.boolean_mask(row, row >= tf.math.top_k(row, 3).values[-1])
        return tf.tile(tf.ensure_shape(chosen, (3,)), [2])

    return tf.map_fn(largest, x) @ weight


SPREAD = {
    "unknown length": _of_unknown_length,
    "steps": _steps_within_steps,
    "map": lambda weight, x: tf.map_fn(lambda row: _row(weight, row), x),
    "Keras's map": lambda weight, x: ops.map(lambda row: _row(weight, row), x),
    "pairs": _pairs,
    "index": _by_index,
    "nested": _nested,
    "gradient": _inner_gradient,
    "array": _while,
    "unstacked": _unstacked,
    "long counters": _long_counters,
    "number of rows": lambda weight, x: tf.map_fn(
        lambda row: _row(weight, row) / tf.cast(tf.shape(x)[0], _FLOAT), x
    ),
    "vectorized": lambda weight, x: tf.vectorized_map(
        lambda two: _row(weight, two[0]) * tf.reduce_sum(two[1]), (x, x**2)
    ),
    "random": lambda weight, x: tf.map_fn(
        lambda row: _row(weight, row) * tf.random.stateless_uniform((6,), [1, 2], dtype=_FLOAT), x
    ),
}


# Iterations that need others; and those that are not all rows.
ON_ONE_DEVICE = {
    "along rows": _along_rows,
    "scan": lambda weight, x: tf.scan(lambda state, row: 0.5 * state + _row(weight, row), x),
    "reversed": lambda weight, x: _while(weight, x, at=lambda i, count: count - 1 - i),
    "neighbours": lambda weight, x: _while(
        weight, x, read=lambda rows, i: rows.read(i) + rows.read(tf.maximum(i - 1, 0))
    ),
    "some": lambda weight, x: tf.concat(
        [tf.map_fn(lambda row: _row(weight, row), x[:2]), x[2:]], 0
    ),
}


class _Loop(layers.Layer):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def build(self, shape):
        self.weight = self.add_weight(shape=(6, 6), name="weight")

    def call(self, inputs):
        made = {**SPREAD, **ON_ONE_DEVICE}[self.kind](ops.convert_to_tensor(self.weight), inputs)
        return ops.reshape(made, (-1, 6))


def _trained(kind, devices, jit_compile):
    """Losses, predictions and weights; and what is spread."""
    keras.utils.set_random_seed(4)
    hidden = layers.Dense(6, "tanh")
    model = keras.Sequential([keras.Input((6,)), hidden, _Loop(kind), layers.Dense(2)])
    parallel = make_parallel(model, devices) if devices > 1 else model
    parallel.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=jit_compile)
    rng, found = np.random.default_rng(0), []
    for rows in (7, 5, 3, 2):
        x, y = rng.normal(size=(rows, 6)), rng.normal(size=(rows, 2))
        found.append(parallel.train_on_batch(x, y))
    found += [parallel.predict(x, verbose=0), *model.get_weights()]
    return found, parallel.explain() if devices > 1 else ""


@pytest.mark.parametrize("kind", [*SPREAD, *ON_ONE_DEVICE])
def test_the_numbers_of_one_device(kind, in_float64):
    expected, _ = _trained(kind, 1, False)
    found, text = _trained(kind, 3, False)
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    assert ("train_step: 100.0% of the work on rows" in text) == (kind in SPREAD), text


@pytest.mark.parametrize("jit_compile", [False, True])
def test_ctc(jit_compile, in_float64):
    """Loops of `tf.compat.v1`'s kind, in float32; a recurrent layer gets their gradient."""

    def trained(devices):
        keras.utils.set_random_seed(4)
        recurrent = layers.GRU(3, return_sequences=True)
        model = keras.Sequential([keras.Input((6, 2)), recurrent, layers.Dense(4)])
        parallel = make_parallel(model, devices) if devices > 1 else model
        parallel.compile("sgd", keras.losses.CTC(), jit_compile=jit_compile)
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(7, 6, 2)), rng.integers(1, 4, size=(7, 2))
        losses = parallel.fit(x, y, batch_size=5, shuffle=False, verbose=0).history["loss"]
        return [losses, *model.get_weights()], parallel.explain() if devices > 1 else ""

    expected, _ = trained(1)
    found, text = trained(3)
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    assert text == "train_step: 100.0% of the work on rows is spread over the devices."


@pytest.mark.parametrize("kind", ["map", "index", "nested"])
def test_compiled_by_xla(kind, in_float64):
    """Also on a device without rows, where XLA has no empty lists."""
    expected, _ = _trained(kind, 1, True)
    found, text = _trained(kind, 3, True)
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    assert "train_step: 100.0% of the work on rows" in text
