"""Random numbers, and the losses that layers add."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from support.parity import difference

from keras_multigpu import make_parallel


def test_the_seed_makes_a_run_repeatable():
    weights = []
    for _ in range(2):
        keras.utils.set_random_seed(5)
        template = keras.Sequential([keras.Input((6,)), layers.Dropout(0.5), layers.Dense(2)])
        parallel = make_parallel(template, 4)
        parallel.compile("sgd", "mse")
        parallel.fit(np.ones((20, 6)), np.ones((20, 2)), batch_size=8, epochs=2, verbose=0)
        weights.append(parallel.get_weights())
    assert difference(*weights) == 0


def test_one_device_draws_what_the_template_would():
    templates = []
    for _ in range(2):
        keras.utils.set_random_seed(5)
        templates.append(keras.Sequential([keras.Input((50,)), layers.Dropout(0.5)]))
    plain, parallel = templates[0], make_parallel(templates[1], 1)
    for _ in range(2):
        x = np.ones((8, 50), "float32")
        assert difference(plain(x, training=True), parallel(x, training=True)) == 0


class Adds(layers.Layer):
    """Adds a loss of some kind."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def call(self, inputs):
        self.add_loss(self.loss(inputs))
        return inputs


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: ops.sum(ops.relu(-x)),
        lambda x: ops.mean(ops.relu(-x)),
        lambda x: ops.sum(x),
        lambda x: -3.0 * ops.mean(x, axis=0)[0],
    ],
)
def test_sums_and_means_given_to_add_loss(loss, rng):
    x = rng.normal(size=(19, 3)).astype("float32")
    losses = []
    for n in (None, 4):
        model = keras.Sequential([keras.Input((3,)), Adds(loss)])
        model = make_parallel(model, n) if n else model
        model.compile("sgd", "mse")
        losses.append(model.evaluate(x, x, batch_size=8, verbose=0))
    assert difference(*losses) < 2e-5
