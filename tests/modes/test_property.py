"""Whatever the shape of the model, the batch and the epoch: one device's numbers."""

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.parity import difference, variables
from support.precision import double_precision

from keras_multigpu import make_parallel


@st.composite
def trainings(draw):
    widths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    return {
        "widths": [draw(st.integers(1, 5)), *widths],
        "activation": draw(st.sampled_from(["tanh", "relu", "linear"])),
        "is_normalized": draw(st.booleans()),
        "n": draw(st.integers(1, 4)),
        "shard": draw(st.sampled_from([None, "optimizer", "weights"])),
        "rows": draw(st.integers(1, 40)),
        "batch_size": draw(st.integers(1, 40)),
        "epochs": draw(st.integers(1, 2)),
    }


def _build(training):
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((training["widths"][0],))])
    for width in training["widths"][1:]:
        model.add(keras.layers.Dense(width, activation=training["activation"]))
        if training["is_normalized"]:
            model.add(keras.layers.BatchNormalization(momentum=0.5))
    return model


pytestmark = pytest.mark.filterwarnings("ignore:The . devices do not divide the batches")


def _draws(examples):
    checks = list(HealthCheck)
    return settings(
        max_examples=examples, deadline=None, suppress_health_check=checks, derandomize=True
    )


@_draws(2)
@given(trainings())
def test_in_double_precision_nothing_is_left_of_the_difference(training):
    with double_precision():
        _compare(training)


@pytest.mark.slow
@_draws(12)
@given(trainings())
def test_more_trainings_in_double_precision(training):
    with double_precision():
        _compare(training)


def _compare(training):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(training["rows"], training["widths"][0]))
    y = rng.normal(size=(training["rows"], training["widths"][-1]))
    plain = _build(training)
    parallel = make_parallel(_build(training), training["n"], shard=training["shard"])
    # BatchNormalization of few rows magnifies rounding; on JAX Keras rounds losses to float32.
    is_rough = training["is_normalized"]
    limit = (1e-6 if keras.backend.backend() == "jax" else 1e-9) if is_rough else 1e-12
    histories = []
    for model in (plain, parallel):
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
        keras.utils.set_random_seed(4)
        history = model.fit(
            x, y, batch_size=training["batch_size"], epochs=training["epochs"], verbose=0
        )
        histories.append(history.history)
    assert difference(variables(plain), variables(parallel)) < limit
    assert difference(*histories) < 1e-6  # Keras keeps its metrics in float32
    outputs = [model.predict(x, verbose=0) for model in (plain, parallel)]
    assert difference(*outputs) < limit
