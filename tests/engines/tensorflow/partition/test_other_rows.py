"""Rows that are not the batch's: from where they meet weights on, all devices compute them."""

import numpy as np
import pytest
import tensorflow as tf
from support.descent import compared, share

from keras_multigpu import make_parallel

_PROTOTYPES = tf.constant(np.random.default_rng(5).normal(size=(20, 8)))


def _noise(rows):
    return tf.random.stateless_normal((rows, 8), [1, 2], dtype=tf.float64)


def _drawn(model, x):
    return tf.reduce_mean(model(_noise(16)) ** 2) + tf.reduce_mean(model(x))


def _beside_the_batch(model, x):
    """Real and fake rows together, as discriminators see them."""
    both = model(tf.concat([x, model(_noise(10))], 0))
    return tf.reduce_mean(both[:-10] ** 2) - tf.reduce_mean(tf.sin(both[-10:]))


def _of_two_numbers(model, x):
    return tf.reduce_mean(model(_noise(16)) * 2.0) + tf.reduce_mean(model(_noise(24)) ** 2)


def _taken_again(model, x):
    """A bootstrap of so many rows, whatever the batch has."""
    places = tf.random.stateless_uniform((16,), [1, 2], 0, tf.shape(x)[0], tf.int32)
    return tf.reduce_mean(model(tf.gather(x, places)) ** 2)


def _some(model, x):
    return tf.reduce_mean(model(tf.slice(x, [0, 0], [5, 8])) ** 2)


def _unique(model, x):
    found, places = tf.unique(tf.cast(tf.abs(x[:, 0]) * 5.0, tf.int32) % 20)
    both = tf.gather(model(tf.gather(_PROTOTYPES, found)), places) - model(x)
    return tf.reduce_mean(both**2)


def _penalized(model, x):
    """The gradient of a penalty, too."""
    noise = _noise(12)
    with tf.GradientTape() as tape:
        tape.watch(noise)
        total = tf.reduce_sum(model(noise))
    penalties = (tf.norm(tape.gradient(total, noise), axis=1) - 1.0) ** 2
    return tf.reduce_mean(penalties) + tf.reduce_mean(model(x))


def _in_a_branch(model, x):
    return tf.cond(
        tf.reduce_mean(x) > 0.0,
        lambda: tf.reduce_mean(model(model(_noise(16))) ** 2),
        lambda: tf.reduce_mean(model(_noise(24))),
    )


def _in_a_loop_with_rows(model, x):
    def body(n, total):
        noise = tf.random.stateless_normal((16, 8), tf.stack([n, 2]), dtype=tf.float64)
        return n + 1, total + tf.reduce_mean(model(noise) ** 2) - tf.reduce_mean(model(x))

    return tf.while_loop(lambda n, _: n < 3, body, [0, tf.constant(0.0, tf.float64)])[1]


def _in_a_loop(model, x):
    """Of an ordinary differential equation, say."""
    body = lambda n, rows: (n + 1, rows + 0.1 * model(rows))  # noqa: E731
    found = tf.while_loop(lambda n, _: n < 3, body, [0, _noise(16)])[1]
    return tf.reduce_mean(found**2) + tf.reduce_mean(model(x))


def _over_time(model, x):
    """A recurrent generator: a list of time steps, each of so many rows."""
    steps = tf.reshape(_noise(36), (4, 9, 8))
    found = tf.scan(lambda state, step: model(state) + step, steps, tf.zeros_like(steps[0]))
    return tf.reduce_mean(found**2) + tf.reduce_mean(model(x))


def _of_captured_rows(model, x):
    """Langevin steps: the gradient by the rows, in each round."""

    def body(n, rows):
        with tf.GradientTape() as tape:
            tape.watch(rows)
            energy = tf.reduce_sum(model(rows) ** 2)
        return n + 1, rows - 0.1 * tape.gradient(energy, rows)

    found = tf.stop_gradient(tf.while_loop(lambda n, _: n < 3, body, [0, _PROTOTYPES])[1])
    return tf.reduce_mean(model(found) ** 2) - tf.reduce_mean(model(x) ** 2)


def _mean_of_products(a, b):
    return tf.reduce_mean(tf.tanh(0.01 * tf.matmul(a, b, transpose_a=True)))


def _as_many_as_twice_the_batch(model, x):
    """Chosen rows that are all: their slices are not those of twice the batch."""
    both = tf.concat([x, x + 1.0], 0)
    features = model(both)
    some = tf.boolean_mask(features, tf.reduce_sum(both**2, 1) >= 0.0)
    return _mean_of_products(features, some) + _some(model, some)


def _as_many_as_three_times_the_batch(model, x):
    three = tf.repeat(x, 3, axis=0)
    places = tf.where(tf.reduce_sum(three**2, 1) >= 0.0)[:, 0]
    some = model(tf.gather(model(three), places))
    return _mean_of_products(some, model(three))


_LOSSES = {one.__name__[1:]: one for one in (
    _drawn, _beside_the_batch, _of_two_numbers, _taken_again, _some, _unique, _penalized,
    _in_a_branch, _in_a_loop_with_rows, _in_a_loop, _over_time, _of_captured_rows,
    _as_many_as_twice_the_batch,
    _as_many_as_three_times_the_batch,
)}  # fmt: skip


@pytest.mark.thin(2)
@pytest.mark.parametrize("rows", [(16, 16), (13, 7, 12)], ids=["one_size", "sizes"])
@pytest.mark.parametrize("name", _LOSSES)
def test_the_numbers_of_one_device(name, rows, model, rng):
    batches = [(tf.constant(rng.normal(size=(n, 8))),) for n in rows]
    assert share(compared(model, _LOSSES[name], batches)) > 90


@pytest.mark.parametrize("change", ["none", "some", "repeated", "reversed", "beside_the_batch"])
def test_under_xla_numbers_are_drawn_as_xla_draws_them(change, model, rng):
    """Once, also by a constant seed, which TensorFlow would fold into numbers of its own."""
    changes = {
        "none": lambda noise, x: noise,
        "some": lambda noise, x: noise[:4],
        "repeated": lambda noise, x: tf.repeat(noise, 2, axis=0),
        "reversed": lambda noise, x: noise[::-1],
        "beside_the_batch": lambda noise, x: tf.concat([x, noise], 0),
    }

    def loss_of(model, x):
        return tf.reduce_mean(model(changes[change](_noise(9), x)) ** 2) + tf.reduce_mean(model(x))

    batches = [(tf.constant(rng.normal(size=(12, 8))),)]
    assert share(compared(model, loss_of, batches, jit_compile=True)) > 90


def test_steps_without_rows_of_a_batch(model):
    """All that they draw is their own."""
    text = compared(model, lambda model: tf.reduce_mean(model(_noise(16)) ** 2), [(), ()])
    assert share(text) > 90
    nothing = make_parallel(model, 4)
    nothing.function(lambda: tf.constant(1.0))()
    assert nothing.explain().endswith("nothing in it has rows, and so one device computes it.")


@pytest.mark.parametrize("has_targets", [True, False])
def test_ragged_rows(has_targets, model, rng):
    def loss_of(model, x, *targets):
        means = tf.reduce_mean(tf.ragged.map_flat_values(model, x), 1)
        return tf.reduce_mean((means - (targets[0] if targets else 1.0)) ** 2)

    batches = []
    for count in (13, 7):
        rows = [rng.normal(size=(n, 8)).tolist() for n in rng.integers(1, 6, count)]
        ragged = tf.ragged.constant(rows, ragged_rank=1, dtype=tf.float64)
        batches.append((ragged, tf.constant(rng.normal(size=(count, 8))))[: 1 + has_targets])
    assert share(compared(model, loss_of, batches)) > 95


@pytest.mark.filterwarnings("ignore:.*on one device, on the rows of all")
def test_what_either_branch_leaves_to_one_device_is_told(model, rng):
    def loss_of(model, x):
        products = lambda: tf.reduce_mean(tf.matmul(tf.sort(x, 0) ** 2, x, transpose_b=True) @ x)  # noqa: E731
        return tf.cond(tf.reduce_sum(x) > -1e9, products, lambda: tf.reduce_mean(x)) + _some(
            model, x
        )

    batches = [(tf.constant(rng.normal(size=(200, 8))),)]
    assert "TopKV2" in compared(model, loss_of, batches)
