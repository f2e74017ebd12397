"""Errors of steps that run: as plain Keras tells them, once, with the user's lines."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_multigpu import make_parallel


class _Checked(layers.Layer):
    def __init__(self, within):
        super().__init__()
        self.within = within

    def call(self, x):
        if self.within == "loop":
            return tf.while_loop(lambda i, _: i < 3, self.step, (0, x))[1]
        return self.step(0, x)[1]

    def step(self, i, x):
        return i + 1, tf.debugging.check_numerics(tf.math.log(x), "the logarithm of a row")


def _told(within, devices, run):
    model = keras.Sequential([keras.Input((3,)), _Checked(within), layers.Dense(1)])
    model = make_parallel(model, devices) if devices > 1 else model
    model.compile("sgd", "mse")
    with pytest.raises(tf.errors.OpError) as raised:
        run(model, -np.ones((7, 3), "float32"), np.ones((7, 1), "float32"))
    return raised


def _as_function(model, x, y):
    step = model.function(model) if hasattr(model, "function") else tf.function(model)
    step(tf.constant(x))


@pytest.mark.parametrize("within", ["step", "loop"])
@pytest.mark.parametrize(
    "run",
    [
        lambda model, x, y: model.fit(x, y, batch_size=4, verbose=0),
        lambda model, x, y: model.train_on_batch(x, y),
        lambda model, x, y: model.predict(x, verbose=0),
        _as_function,
    ],
    ids=["fit", "train_on_batch", "predict", "function"],
)
def test_they_are_told_as_plain_keras_tells_them(run, within):
    plain, parallel = _told(within, 1, run), _told(within, 4, run)
    assert parallel.type is plain.type
    texts = [str(one.value.message) for one in (plain, parallel)]
    for text in texts:
        assert "the logarithm of a row : Tensor had NaN" in text
        assert text.count("Detected at node") <= 3
        assert "test_errors.py" in text
        assert "in step" in text  # the user's function
    assert len(texts[1]) < 1.2 * len(texts[0])
    assert "root error(s)" not in texts[1]


def test_an_error_of_unknown_place_is_told_as_it_is():
    model = make_parallel(keras.Sequential([keras.Input((3,)), layers.Dense(1)]), 2)
    model.compile("sgd", "mse")

    def rows():
        yield np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
        raise RuntimeError("the disk is gone")

    spec = tuple(tf.TensorSpec([None, n], "float32") for n in (3, 1))
    data = tf.data.Dataset.from_generator(rows, output_signature=spec)
    with pytest.raises(tf.errors.OpError, match="the disk is gone"):
        model.fit(data, verbose=0, shuffle=False)
