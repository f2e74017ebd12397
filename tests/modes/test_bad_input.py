"""Wrong data: the plain model's own error or a clearer one, never wrong numbers."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

from keras_multigpu import make_parallel


def _sequential():
    return keras.Sequential([keras.Input((6,)), layers.Dense(2)])


def _two_inputs():
    left, right = keras.Input((3,), name="left"), keras.Input((3,), name="right")
    return keras.Model({"left": left, "right": right}, layers.Dense(1)(left + right))


def _error(model, call):
    model.compile("sgd", "mse")
    with pytest.raises(Exception) as caught:  # noqa: PT011  the plain model says which
        call(model)
    return caught.value


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.fit(np.zeros((8, 7)), np.zeros((8, 2)), verbose=0),
        lambda model: model.fit(np.zeros((8, 6)), np.zeros((5, 2)), verbose=0),
        lambda model: model.fit(None, np.zeros((5, 2)), verbose=0),
        lambda model: model.predict(np.zeros((0, 6)), verbose=0),
        lambda model: model(None),
        lambda model: model([None]),
        lambda model: model(),
        lambda model: model(np.array(0.5)),
        lambda model: model({"in": np.zeros((8, 6))}),
        lambda model: model.fit(np.zeros((8, 6)), np.full((8, 2), "a"), verbose=0),
    ],
)
def test_the_plain_models_own_error(call):
    plain = _error(_sequential(), call)
    parallel = _error(make_parallel(_sequential(), 4), call)
    assert type(parallel) is type(plain)


@pytest.mark.parametrize(
    "inputs",
    [{"left": np.zeros((8, 3))}, {"left": np.zeros((8, 3)), "right": None}, [np.zeros((8, 3))]],
)
def test_parts_that_are_missing(inputs):
    plain = _error(_two_inputs(), lambda model: model(inputs))
    parallel = _error(make_parallel(_two_inputs(), 4), lambda model: model(inputs))
    assert type(parallel) is type(plain)


def test_an_empty_batch_between_others():
    plain, parallel = _sequential(), make_parallel(_sequential(), 4)
    for model in (plain, parallel):
        assert model(np.zeros((0, 6), "float32")).shape == (0, 2)


def test_a_model_without_weights():
    parallel = make_parallel(keras.Sequential([keras.Input((6,)), layers.Flatten()]), 4)
    x = np.arange(30.0).reshape(5, 6)
    assert np.array_equal(parallel.predict(x, verbose=0), x)
    parallel.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        parallel.fit(x, x, verbose=0)
    if keras.backend.backend() == "tensorflow":  # on JAX Keras has nothing to say of it
        assert "does not have any trainable weights" in str(told[0].message)


def test_sequences_of_any_length_are_not_taken_for_pairs():
    inputs = keras.Input((None, 3))
    parallel = make_parallel(keras.Model(inputs, layers.Dense(2)(inputs)), 4)
    for length in (4, 8):
        assert parallel.predict(np.zeros((8, length, 3)), verbose=0).shape == (8, length, 2)


def test_a_batch_without_rows_leaves_the_state_as_it_is():
    template = keras.Sequential([keras.Input((6,)), layers.SpectralNormalization(layers.Dense(2))])
    parallel = make_parallel(template, 4)
    parallel(np.zeros((0, 6), "float32"), training=True)
    assert all(np.abs(weight).max() > 0 for weight in template.get_weights() if weight.ndim > 1)
