"""Losses that a parallel model adds in place of its replicas'."""

import keras
import numpy as np
import pytest
from keras import layers
from support.parity import difference

from keras_multigpu import make_parallel
from keras_multigpu.modes.base import add_losses


def test_a_loss_with_the_id_of_one_that_is_gone_is_counted_once():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    loss = keras.ops.convert_to_tensor(1.0)
    # What a replica's loss leaves in a layer; the memory of one that is freed is used again.
    model.layers[0]._loss_ids.add(id(loss))
    with keras.StatelessScope(collect_losses=True):
        add_losses(model, [loss])
        assert [float(one) for one in model.losses] == [1.0]


class Adds(layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(x**2))
        return x


def _twice():
    """Calls layers that add losses twice, one of them in a model of its own."""
    x, y = keras.Input((64,)), keras.Input((64,))
    first = layers.Dense(64, activity_regularizer="l1", kernel_regularizer="l2")
    second = layers.Dense(64, activity_regularizer="l2", kernel_regularizer="l2")
    adds, inner = Adds(), keras.Model(x, second(second(x)))
    return keras.Model(y, inner(inner(adds(first(adds(first(y)))))))


MODES = [
    ("data", {}),
    ("tower", {}),
    ("tower", {"replicas": "independent", "num_replicas": 1}),
    ("model", {}),
]


@pytest.mark.parametrize(("mode", "options"), MODES, ids=str)
def test_layers_are_called_as_keras_calls_them_in_a_step(mode, options):
    """On JAX its step calls a model's `call`: there only a layer's last call adds its losses."""
    rng = np.random.default_rng(1)
    x, y = (rng.normal(size=(8, 64)).astype("float32") for _ in range(2))
    numbers = []
    for is_parallel in (False, True):
        keras.utils.set_random_seed(1)
        model = make_parallel(_twice(), 2, mode=mode, **options) if is_parallel else _twice()
        model.compile("adam", "mse")
        history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
        logs = history["loss"], model.evaluate(x, y, verbose=0, return_dict=True)["loss"]
        model(x)
        numbers.append([*logs, float(sum(model.losses)), *model.get_weights()])
    assert difference(*numbers) < 1e-4


class Watches(keras.Model):
    """Notes whether layers still know losses of an earlier trace when a new one begins."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(64, activity_regularizer="l1")
        self.adds, self.last = Adds(), layers.Dense(3, activity_regularizer="l2")
        self.were_known = []

    def call(self, x):
        self.were_known.append(any(one._loss_ids for one in self._flatten_layers()))
        return self.last(self.adds(self.first(x)))


@pytest.mark.parametrize(("mode", "options"), MODES, ids=str)
def test_a_trace_begins_without_the_losses_of_an_earlier_one(mode, options):
    """Keras finds losses by their `id`, which one of another layer may have by chance."""
    model = Watches()
    model(np.zeros((2, 64), "float32"))
    if mode == "model" and keras.backend.backend() == "tensorflow":
        pytest.skip("stages are parts of functional models")
    parallel = make_parallel(model, 2, mode=mode, **options)
    parallel.compile("sgd", "mse")
    for rows in (4, 6, 8):
        parallel.train_on_batch(np.ones((rows, 64), "float32"), np.ones((rows, 3), "float32"))
    assert len(model.were_known) > 3
    assert not any(model.were_known[1:])
