"""Model mode on TensorFlow: layers that are called several times, and parts without an output."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from support.parity import difference, plainly, variables

from keras_multigpu import make_parallel
from keras_multigpu.graphs.graph import read_graph

pytestmark = pytest.mark.thin(8)


@pytest.fixture(autouse=True)
def _precise():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


def _called_twice(shared):
    """On one device the shared layer is called on the outputs of `a` before those of the input."""
    inputs = keras.Input((4,))
    first = shared(layers.Dense(4, name="a")(inputs))
    both = layers.Concatenate(name="c")([first, shared(inputs)])
    return keras.Model(inputs, layers.Dense(2, name="o")(both))


def _called_thrice():
    """The shared layer is called on what it gave itself, and between on something else."""
    inputs = keras.Input((4,))
    shared, a = layers.BatchNormalization(momentum=0.5, name="s"), layers.Dense(4, name="a")
    once = shared(inputs)
    twice = shared(a(once))
    last = shared(layers.Add(name="sum")([once, twice]))
    return keras.Model(inputs, layers.Dense(2, name="o")(ops.concatenate([twice, last], -1)))


def _siamese():
    left, right = keras.Input((4,)), keras.Input((4,))
    encoder = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8), layers.BatchNormalization(momentum=0.5)], name="s"
    )
    projected = encoder(layers.Dense(4, name="a")(left))
    return keras.Model(
        [left, right],
        layers.Dense(2, name="o")(layers.Subtract(name="c")([projected, encoder(right)])),
    )


def _unused_head():
    """A model within it has an output that nothing takes, but whose layer has a state."""
    inner_inputs = keras.Input((4,))
    hidden = layers.Dense(4, name="a")(inner_inputs)
    norm = layers.BatchNormalization(momentum=0.5, center=False, scale=False, name="s")
    unused = norm(hidden)
    inner = keras.Model(inner_inputs, [hidden, unused], name="inner")
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(2, name="o")(inner(inputs)[0]))


def _shared_recurrent():
    """Several results of a call, masks on the way, and arguments by name."""
    inputs = keras.Input((4,))
    steps = layers.Masking(0.0, name="a")(layers.Reshape((4, 1), name="r")(inputs))
    shared = layers.LSTM(3, return_sequences=True, return_state=True, name="s")
    sequence, *state = shared(steps)
    again, _, cell = shared(steps[:, ::-1], initial_state=state)
    pooled = layers.GlobalAveragePooling1D(name="p")(sequence)
    return keras.Model(
        inputs,
        layers.Dense(2, name="o")(layers.Concatenate(name="c")([pooled, again[:, -1], cell])),
    )


MODELS = {
    "norm": lambda: _called_twice(layers.BatchNormalization(momentum=0.5, name="s")),
    "dropout": lambda: _called_twice(layers.Dropout(0.5, seed=3, name="s")),
    "spectral": lambda: _called_twice(layers.SpectralNormalization(layers.Dense(4), name="s")),
    "dense": lambda: _called_twice(layers.Dense(4, name="s")),
    "thrice": _called_thrice,
    "siamese": _siamese,
    "unused": _unused_head,
    "recurrent": _shared_recurrent,
}
PLACEMENTS = {"chosen": None, "s": {"s|s/.*|.*/s": 1}, "both": {"a|.*/a": 1, "s|s/.*|.*/s": 2}}
# Each model by itself, and in one of the two other placements.
ALONE = ("norm", "spectral", "thrice", "unused")
PAIRS = [(name, how) for name in MODELS for how in ("chosen", "s" if name in ALONE else "both")]


@pytest.mark.parametrize(("name", "how"), PAIRS)
def test_calls_in_the_order_of_one_device(name, how, rng):
    models, build, placement = [], MODELS[name], PLACEMENTS[how]
    for _ in range(2):
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        models.append(build())
    plain, template = models
    parallel = make_parallel(template, 3, mode="model", placement=placement)
    x, y = rng.normal(0.5, 0.5, (24, 4)).round(1), rng.normal(size=(24, 2))
    x = [x, x[::-1]] if len(plain.inputs) == 2 else x
    histories = []
    for model in (plain, parallel):
        keras.utils.set_random_seed(3)
        settings = plainly() if model is plain else {}
        model.compile(keras.optimizers.Adam(0.02, epsilon=1e-3), "mse", **settings)
        histories.append(model.fit(x, y, 10, 2, shuffle=False, verbose=0).history)
    assert difference(*histories) < 1e-12
    assert difference(variables(plain), variables(parallel)) < 1e-12
    assert difference(*[model.predict(x, verbose=0) for model in models]) < 1e-12
    assert difference(*[model.predict(x, verbose=0) for model in (plain, parallel)]) < 1e-12


def test_a_layer_that_nothing_waits_for_has_a_device():
    graph = read_graph(_unused_head())
    assert ["/".join(call.path) for call in graph.calls] == ["inner/a", "o", "inner/s"]
    parallel = make_parallel(_unused_head(), 2, mode="model", placement={"inner/s": 1})
    assert parallel.placement == {"inner/a": 0, "o": 0, "inner/s": 1}


def test_stages_of_calls_without_outputs(rng):
    """The stage of `s` gives nothing that others take."""
    parallel = make_parallel(_unused_head(), 2, mode="model", placement={"inner/s": 1})
    before = np.array(parallel.get_layer("inner").get_layer("s").moving_mean)
    parallel.compile("sgd", "mse", run_eagerly=True)
    parallel.fit(rng.normal(size=(6, 4)), rng.normal(size=(6, 2)), verbose=0)
    assert difference(np.array(parallel.get_layer("inner").get_layer("s").moving_mean), before) > 0
