"""Heads that saturate, in tower and model mode: the loss is taken from logits, as on one device."""

import keras
import numpy as np
import pytest
from keras import layers
from support.parity import difference, variables

from keras_multigpu import make_parallel

pytestmark = pytest.mark.thin(4)

MODES = {
    "tower": {"mode": "tower"},
    "tower of one": {"mode": "tower", "replicas": "independent", "num_replicas": 1},
    "model": {"mode": "model"},
    "model on two": {"mode": "model", "placement": {"hidden": 1, "head": 0}},
}


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_heads_that_saturate(options, activation, rng):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    x, y = rng.normal(size=(24, 6)) * 100, np.eye(3)[rng.integers(0, 3, 24)]
    loss = "categorical_crossentropy" if activation == "softmax" else "binary_crossentropy"
    results = []
    for is_parallel in (False, True):
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(4, name="hidden"),
                layers.Dense(3, activation=activation, name="head"),
            ]
        )
        if is_parallel:
            model = make_parallel(model, 2, **options)
        model.compile(keras.optimizers.SGD(0.01), loss)
        losses = model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0).history["loss"]
        results.append(
            (losses, variables(model), model.evaluate(x, y, verbose=0, return_dict=True)["loss"])
        )
    assert difference(*results) < 1e-10


def test_members_trained_apart_have_logits(rng):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    x, y = rng.normal(size=(24, 6)) * 100, rng.integers(0, 3, 24)

    def build():
        return keras.Sequential([keras.Input((6,)), layers.Dense(3, activation="softmax")])

    options = {"mode": "tower", "replicas": "independent", "loss_of": "replicas"}
    committee = make_parallel(build(), 2, **options)
    before = [replica.get_weights() for replica in committee.replicas]
    committee.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    committee.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    for replica, weights in zip(committee.replicas, before):
        plain = build()
        plain.set_weights(weights)
        plain.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
        plain.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
        assert difference(plain.get_weights(), replica.get_weights()) < 1e-10


class CountsOn(layers.Layer):
    """Draws random numbers in each call, and uses them only where it trains."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, x, training=None):
        noise = keras.random.normal(keras.ops.shape(x), dtype=x.dtype, seed=self.seeds)
        return x + noise if training else x


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_random_numbers_that_are_drawn_and_not_used(run_eagerly, rng):
    """Equal replicas' mean has logits, also if a seed counts on; other replicas' has none."""
    x, y = rng.normal(size=(12, 6)) * 100, rng.integers(0, 3, 12)
    losses = []
    for is_parallel in (False, True):
        keras.utils.set_random_seed(3)
        head = layers.Dense(3, activation="softmax")
        model = keras.Sequential([keras.Input((6,)), CountsOn(), head])
        if is_parallel:
            model = make_parallel(model, 2, mode="tower")
        model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=run_eagerly)
        losses.append(model.evaluate(x, y, batch_size=5, verbose=0))
        has_logits = []

        def loss(y, outputs, has_logits=has_logits):
            has_logits.append(hasattr(outputs, "_keras_logits"))
            return keras.ops.mean(outputs, axis=-1)

        model.compile("sgd", loss, run_eagerly=run_eagerly)
        model.fit(x, y, batch_size=12, verbose=0)
        assert any(has_logits) != is_parallel
    assert losses[0] > 20
    assert difference(*map(np.array, losses)) < 1e-5
