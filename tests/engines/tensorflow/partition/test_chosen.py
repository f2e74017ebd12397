"""What a step chooses of the batch's rows: all devices compute it, with one device's numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_multigpu import make_parallel
from keras_multigpu.engines.tensorflow.partition.sizes import Dim, Unit, unit_of


def _mean(model, x, y):
    return tf.reduce_mean((model(x, training=True) - y) ** 2)


def _micro_batches(model, x, y):
    size = tf.shape(x)[0] // 3
    some = [slice(n * size, (n + 1) * size) for n in range(3)]
    return tf.add_n([_mean(model, x[one], y[one]) for one in some])


def _first_and_rest(model, x, y):
    return _mean(model, x[:5], y[:5]) + _mean(model, x[5:], y[5:]) + tf.reduce_mean(x[:1] - x)


def _every_second(model, x, y):
    return _mean(model, x[::2], y[::2]) + _mean(model, x[1::2], y[1::2])


def _split(model, x, y):
    count = tf.shape(x)[0]
    sizes = [count // 4, count - count // 4]
    pieces = zip(tf.split(x, sizes), tf.split(y, sizes))
    return tf.add_n([_mean(model, *piece) for piece in pieces])


def _joined_again(model, x, y):
    half = tf.shape(x)[0] // 2
    found = tf.concat([model(x[:half]), model(x[half:])], 0)
    return tf.reduce_mean((found - y) ** 2)


def _groups(model, x, y):
    """Each group is normalized by itself."""
    half = tf.shape(x)[0] // 2
    grouped = tf.reshape(x[: 2 * half], (2, half, 8))
    mean, variance = tf.nn.moments(grouped, 1, keepdims=True)
    flat = tf.reshape((grouped - mean) / tf.sqrt(variance + 1e-3), (2 * half, 8))
    return _mean(model, flat, y[: 2 * half])


def _pairs(model, x, y):
    half = tf.shape(x)[0] // 2
    left, right = (tf.math.l2_normalize(model(one), -1) for one in (x[:half], x[half : 2 * half]))
    logits = tf.matmul(left, right, transpose_b=True)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(half), logits)
    return tf.reduce_mean(losses) + tf.reduce_mean(y**2)


def _masked(model, x, y):
    mask = y[:, 0] > 0
    return _mean(model, x[mask], tf.boolean_mask(y, mask))


def _masked_features(model, x, y):
    mask = y[:, 0] > 0
    return tf.reduce_mean((model(x)[mask] - y[mask]) ** 2)


def _put_back(model, x, y):
    places = tf.where(y[:, 0] > 0)
    found = tf.scatter_nd(places, model(tf.gather_nd(x, places)), tf.shape(y, tf.int64))
    return tf.reduce_mean((found - y) ** 2)


def _mapped(model, x, y):
    mask = y[:, 0] > 0
    found = tf.map_fn(lambda row: tf.cumsum(row) * tf.reduce_sum(row), model(x[mask]))
    return tf.reduce_mean(found**2)


def _shuffled(model, x, y):
    count = tf.shape(x)[0]
    order = tf.random.experimental.stateless_shuffle(tf.range(count), [1, 2])
    some = [order[n * (count // 3) : (n + 1) * (count // 3)] for n in range(3)]
    return tf.add_n([_mean(model, tf.gather(x, one), tf.gather(y, one)) for one in some])


def _worst(model, x, y):
    losses = tf.reduce_mean((model(x) - y) ** 2, -1)
    places = tf.math.top_k(losses, tf.shape(losses)[0] // 2)[1]
    return _mean(model, tf.gather(x, places), tf.gather(y, places))


def _experts(model, x, y):
    """The rows of each expert, and where they were."""
    expert = tf.cast(y[:, 0] > 0, tf.int32) + tf.cast(y[:, 1] > 1, tf.int32)
    rows = tf.dynamic_partition(x, expert, 3)
    places = tf.dynamic_partition(tf.range(tf.shape(x)[0]), expert, 3)
    found = tf.dynamic_stitch(places, [model(one) * n for n, one in enumerate(rows, 1)])
    return tf.reduce_mean((found - y) ** 2)


def _experts_beside_the_rows(model, x, y):
    """What is put together again has the batch's rows."""
    expert = tf.cast(y[:, 0] > 0, tf.int32) + tf.cast(y[:, 1] > 1, tf.int32)
    places = tf.dynamic_partition(tf.range(tf.shape(x)[0]), expert, 3)
    rows = tf.dynamic_partition(x, expert, 3)
    return _mean(model, x + tf.dynamic_stitch(places, [n * one for n, one in enumerate(rows)]), y)


def _two_views(model, x, y):
    count = tf.shape(x)[0]
    both = model(tf.concat([x, -x], 0))
    return _mean(model, x + tf.reduce_sum(both[:count] * both[count:], -1, keepdims=True), y)


def _joined_with_rows(model, x, y):
    """As long as the batch, it turns out."""
    more = tf.numpy_function(lambda a: a[:, :1] ** 2, [x], tf.float64)
    more.set_shape([None, 1])
    return _mean(model, model(x)[:, :1] * more + x, y)


def _repeated(model, x, y):
    mask = y[:, 0] > 0
    counts = tf.cast(y[mask][:, 1] > 0, tf.int32) + 1
    return _mean(model, tf.repeat(x[mask], counts, 0), tf.repeat(y[mask], counts, 0))


def _of_one_row(model, x, y):
    """As many entries as there are: of the one less than of the other."""
    count = 3 + tf.reduce_sum(tf.cast(y[:, 0] > -9, tf.int32))
    parts = tf.reduce_sum(x[0, :count] ** 2) * tf.reduce_sum(y[0, :count])
    return _mean(model, x, y) + 0.01 * parts


def _on_the_host(model, x, y):
    both = tf.numpy_function(
        lambda a, b: np.concatenate([a, b], 1)[::2], [x, y], tf.float64, stateful=False
    )
    both.set_shape([None, 11])
    return _mean(model, both[:, :8], both[:, 8:])


CHOICES = {one.__name__[1:]: one for one in (
    _micro_batches, _first_and_rest, _every_second, _split, _joined_again, _groups, _pairs,
    _masked, _masked_features, _put_back, _mapped, _shuffled, _worst, _experts, _on_the_host,
    _experts_beside_the_rows, _two_views, _joined_with_rows,
    _repeated, _of_one_row,
)}  # fmt: skip


@pytest.fixture
def model():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    ours = [layers.Dense(32, activation="tanh"), layers.Dropout(0.3, seed=3), layers.Dense(3)]
    return keras.Sequential([keras.Input((8,)), *ours])


def _trained(model, run, batches):
    """Losses, and the weights at the end, of a copy of the model."""
    model.set_weights([np.array(one) for one in model.initial])
    losses = [run(tf.constant(x), tf.constant(y)).numpy() for x, y in batches]
    return [*losses, *map(np.array, model.get_weights())]


def _updates(model, loss_of):
    """A step of gradient descent."""

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        for variable, slope in zip(
            model.trainable_variables, tape.gradient(loss, model.trainable_variables)
        ):
            variable.assign_sub(0.1 * slope)
        return loss

    return step


def _share(text):
    """The share of the work that is spread, as `explain` tells it."""
    return float(text.partition("% of the work on rows")[0].rpartition(" ")[2])


@pytest.mark.thin(8)
@pytest.mark.parametrize("rows", [(16, 16), (13, 7, 12)], ids=["one_size", "sizes"])
@pytest.mark.parametrize("name", CHOICES)
def test_the_numbers_of_one_device(name, rows, model, rng):
    model.initial = model.get_weights()
    batches = [(rng.normal(size=(n, 8)), rng.normal(size=(n, 3))) for n in rows]
    step = _updates(model, CHOICES[name])
    expected = _trained(model, tf.function(step, reduce_retracing=True), batches)
    parallel = make_parallel(model, 4)
    keras.utils.set_random_seed(7)
    model.layers[1].seed_generator.state.assign([3, 0])
    found = _trained(model, parallel.function(step), batches)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    assert _share(parallel.explain()) > 80


def _equal(step, model, rng):
    """Compares what a step gives with one device; returns what `explain` says."""
    x, y = tf.constant(rng.normal(size=(15, 8))), tf.constant(rng.normal(size=(15, 3)))
    model.pop()
    model.pop()  # without random numbers
    model.add(layers.Dense(3))
    parallel = make_parallel(model, 4)
    plain, spread = tf.function(step), parallel.function(step)
    for rows in (15, 12):  # a number first, and then any
        for one, other in zip(plain(x[:rows], y[:rows]), spread(x[:rows], y[:rows]), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    return parallel.explain()


def test_a_loop_over_micro_batches_is_spread(model, rng):
    def step(x, y):
        weights, size = model.trainable_variables, tf.shape(x)[0] // 3
        sums = [tf.zeros_like(one) for one in weights]
        for n in tf.range(3):
            some = slice(n * size, (n + 1) * size)
            with tf.GradientTape() as tape:
                loss = _mean(model, x[some], y[some])
            sums = [one + more for one, more in zip(sums, tape.gradient(loss, weights))]
        return sums

    assert _share(_equal(step, model, rng)) > 95


def test_as_many_rows_as_the_step_says(model, rng):
    def step(x, y):
        losses = tf.reduce_mean((model(x) - y) ** 2, -1)
        few = tf.gather(x, tf.math.top_k(losses, 4)[1])
        return [tf.reduce_mean(model(few)), tf.reduce_sum(model(tf.slice(x, [1, 0], [5, 8])))]

    _equal(step, model, rng)


def test_numbers_of_rows_that_divide_each_other(model, rng):
    """What is noted later does not change how earlier slices are divided."""

    def step(x, y):
        some = x[:5]
        pairs = tf.reshape(tf.reshape(some, (5, 2, 4)) * 2.0, (10, 4))
        more = x[:10] + tf.random.stateless_normal((10, 8), [1, 2], dtype=x.dtype)
        return [tf.tanh(pairs), tf.tanh(more), model(more), pairs + tf.tanh(more)[:, :4]]

    _equal(step, model, rng)


def test_what_a_gradient_takes_of_chosen_rows_stays_whole(model, rng):
    """In loops and branches: nobody outside can count them."""

    def step(x, y):
        half, total = tf.shape(x)[0] // 2, tf.constant(0.0, tf.float64)
        with tf.GradientTape() as tape:
            for n in tf.range(2):
                total += _mean(model, x[n * half :], y[n * half :])
            total += tf.cond(
                tf.reduce_sum(x) > 0,
                lambda: tf.reduce_mean(model(x[:half]) ** 2),
                lambda: tf.reduce_mean(tf.sin(model(x[half:]))),
            )
        return tape.gradient(total, model.trainable_variables)

    _equal(step, model, rng)


@pytest.mark.parametrize(("choice", "is_spread"), [(_micro_batches, True), (_masked, False)])
@pytest.mark.filterwarnings("ignore:.*on one device, on the rows of all")
def test_under_xla_what_follows_from_the_number_of_rows_is_spread(choice, is_spread, model, rng):
    x, y = tf.constant(rng.normal(size=(15, 8))), tf.constant(rng.normal(size=(15, 3)))
    step = _updates(model, choice)
    model.layers[1].rate = 0.0
    parallel = make_parallel(model, 4)
    before = model.get_weights()
    expected = [tf.function(step)(x, y), *model.get_weights()]
    model.set_weights(before)
    found = [parallel.function(step, jit_compile=True)(x, y), *model.get_weights()]
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    assert (_share(parallel.explain()) > 90) == is_spread


@pytest.mark.backend_free
def test_units():
    batch, rows = Dim.symbol("batch"), Dim.symbol("rows3")
    assert unit_of(batch * 6, batch) == Unit(batch, 6)
    assert unit_of(rows * 6, batch) == Unit(rows, 6)
    assert unit_of(rows * batch, batch) == Unit(batch, rows)
    assert unit_of(rows + Dim.symbol("rows4"), batch) == Unit(rows + Dim.symbol("rows4"), 1)
    assert unit_of(Dim.symbol("size3"), batch) is None
    assert unit_of(rows + batch, batch) == Unit(rows + batch, 1)
    assert unit_of(10, batch) is None
    assert unit_of(10, 20) is None
    assert unit_of(10, 20, [5]) == Unit(5, 2)
    assert unit_of(40, 20, [5]) == Unit(20, 2)
