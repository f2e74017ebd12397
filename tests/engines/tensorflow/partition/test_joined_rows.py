"""Tensors that a step joins by their rows, and takes apart again."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support.descent import compared, share

from keras_multigpu import make_parallel
from keras_multigpu.reports import transfers


def _views(model, x):
    """Of a contrastive loss."""
    z = tf.math.l2_normalize(model(tf.concat([x, -x], 0)), 1)
    similar = tf.matmul(z, z, transpose_b=True)
    return tf.reduce_mean(tf.nn.log_softmax(similar, -1) ** 2)


def _two_halves(model, x):
    first, second = tf.split(model(tf.concat([x, 3.0 * x], 0)), 2)
    return tf.reduce_mean(first * tf.sin(second))


def _with_more_unlabelled(model, x):
    found, count = model(tf.concat([x, tf.repeat(x + 1.0, 3, 0)], 0)), tf.shape(x)[0]
    return tf.reduce_mean(found[:count] ** 2) + tf.reduce_mean(tf.abs(found[count:]))


def _three(model, x):
    found, count = model(tf.concat([x, 2.0 * x, x - 1.0], 0)), tf.shape(x)[0]
    return tf.reduce_mean(found[:count] * found[count : 2 * count] * found[2 * count :])


def _joined_twice(model, x):
    inner = tf.concat([x, 2.0 * x], 0)
    return tf.reduce_mean(model(tf.concat([inner, x - 1.0, tf.ones_like(x)], 0)) ** 3)


def _with_noise(model, x):
    noise = tf.random.stateless_normal((2 * tf.shape(x)[0], 8), [1, 2], dtype=x.dtype)
    return tf.reduce_mean((model(tf.concat([x, 2.0 * x], 0)) + noise) ** 3)


def _of_chosen_rows(model, x):
    chosen = tf.boolean_mask(x, x[:, 0] > 0.0)
    return tf.reduce_sum(model(tf.concat([chosen, 2.0 * chosen], 0)) ** 2)


def _regrouped(model, x):
    found = model(tf.concat([x, 2.0 * x], 0))
    pairs = tf.reshape(found, [-1, 4, 2])
    return tf.reduce_mean(pairs * tf.range(4, dtype=x.dtype)[:, None]) + tf.reduce_mean(
        tf.reshape(found, [2, -1, 8])[0]
    )


def _in_another_order(model, x):
    """What needs the rows in order."""
    found, count = model(tf.concat([x, 2.0 * x], 0)), tf.shape(x)[0]
    others = (found[::2], found[::-1], tf.cumsum(found, 0), found[count - 1 :: -1], found[1:-1])
    return tf.add_n([tf.reduce_mean(tf.sin(one)) for one in others])


def _over_time(model, x):
    both = tf.concat([x, 2.0 * x], 0)
    return tf.reduce_mean(tf.scan(lambda last, one: last + tf.sin(one), tf.transpose(model(both))))


_WHOLE = {"in_another_order": 80, "over_time": 40}
_LOSSES = {one.__name__[1:]: one for one in (
    _views, _two_halves, _with_more_unlabelled, _three, _joined_twice, _with_noise,
    _of_chosen_rows, _regrouped, _in_another_order, _over_time,
)}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*on one device, on the rows of all")
@pytest.mark.thin(3)
@pytest.mark.parametrize("name", _LOSSES)
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "xla"]
)
def test_the_numbers_of_one_device(name, compiled, model, rng):
    batches = [(tf.constant(rng.normal(size=(n, 8))),) for n in (13, 7, 3, 1)]
    options = {"jit_compile": True} if compiled else {}
    text = compared(model, _LOSSES[name], batches, **options)
    assert compiled or share(text) > _WHOLE.get(name, 95)


class Judge(keras.Model):
    """Tells real images from others, which it sees together."""

    def __init__(self):
        super().__init__()
        self.judge = keras.Sequential([layers.Flatten(), layers.Dropout(0.2), layers.Dense(1)])

    def call(self, images):
        return self.judge(images)

    def train_step(self, images):
        with tf.GradientTape() as tape:
            found = self.judge(tf.concat([images[:, ::-1], images], 0), training=True)
            loss = tf.reduce_mean(tf.nn.softplus(found))
        weights = self.judge.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


def test_no_image_crosses_but_from_the_first_device():
    images = np.random.default_rng(0).normal(size=(16, 8, 8, 3)).astype("float32")
    model = Judge()
    model(images)
    parallel = make_parallel(model, 4)
    parallel.compile("sgd")
    table = transfers(parallel, images).to_dataframe()
    large = table[(table["kind"] == "activations") & (table["bytes"] > 1000)]
    assert large.empty, large
    inputs = table[table["kind"] == "inputs"]
    assert set(inputs["bytes"]) == {images.nbytes // 4}
