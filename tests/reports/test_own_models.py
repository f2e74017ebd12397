"""Reports of models with a user's own parts: losses, layers, `call`, steps."""

import re

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_multigpu import engines, make_parallel, reports

_PARTITIONS = engines.current().partitions
_GIVEN = {"memory": "1 GB", "link": reports.Link("link", 1e9, 0.0), "step_seconds": 0.01}
_TIGHT = {**_GIVEN, "memory": "1 kB"}  # 256 rows don't fit, so that recomputing is tried
_ROWS = np.ones((8, 4), "float32")


def _error(y, predicted):
    return ops.mean((y - predicted) ** 2, -1)


class Scaled(keras.losses.Loss):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def call(self, y, predicted):
        return self.factor * _error(y, predicted)


def _squash(values):
    return ops.tanh(values)


class Graph(keras.Model):
    """A functional model's class, with a `compile` of its own."""

    def compile(self, far_from):
        super().compile("sgd", far_from)


def _make_graph():
    inputs = keras.Input((4,))
    return Graph(inputs, layers.Dense(2)(inputs))


def _make_sequence(*further):
    return keras.Sequential([keras.Input((4,)), layers.Dense(2), *further])


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (_make_sequence, {"loss": _error}),
        (_make_sequence, {"loss": lambda y, p: _error(y, p), "metrics": [_error]}),
        (_make_sequence, {"loss": Scaled(2.0)}),
        (_make_graph, {"far_from": _error}),
    ],
    ids=["function", "lambda", "class", "compile"],
)
def test_a_plan_with_losses_that_are_not_registered(make, given):
    """The copy that computes activations again has the losses themselves, not their names."""
    model = make()
    model.compile(**given)
    found = reports.plan(model, 256, 1, targets=np.ones((256, 2), "float32"), **_TIGHT)
    assert model.compiled
    assert not any("is not tried" in one for one in found.notes)
    assert not any("no equal model can be made" in one for one in found.notes)


def test_a_plan_with_a_function_that_is_not_registered():
    """Layers are copied by their configuration: where that fails, the rest is still planned."""
    model = _make_sequence(layers.Dense(2, _squash))
    model.compile("sgd", "mse")
    found = reports.plan(model, 256, 1, **_TIGHT)
    assert {one.devices for one in found.choices} == {1}
    (note,) = (one for one in found.notes if one.startswith("Recomputing"))
    assert note.endswith("and its optimizer (Could not locate function '_squash').")


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.head = layers.Dense(2)

    def call(self, inputs):
        return self.head(inputs)


class Unpacking(Subclassed):
    def train_step(self, *given):
        _, _ = given[-1]  # JAX gives the state, too
        return super().train_step(*given)


class Subtracting(Subclassed):
    def compute_loss(self, x, y, predicted, *args, **kwargs):
        return ops.mean((y - predicted) ** 2)


def _make(kind):
    model = kind()
    model(_ROWS)
    model.compile("sgd", "mse")
    return model


def test_a_plan_of_a_subclassed_model():
    model, given = _make(Subclassed), {"inputs": _ROWS, **_GIVEN}
    found = reports.plan(model, 8, 2, **given)
    told = [one for one in found.notes if one.startswith("Mode 'model' is left out: ")]
    if _PARTITIONS:  # the compiler divides it, or says why not
        assert "graph" not in str(told)
    else:
        assert re.search("read from the graph of .* Give `cuts`", *told)


@pytest.mark.parametrize(
    ("kind", "name"), [(Unpacking, "train_step"), (Subtracting, "compute_loss")]
)
def test_own_steps_that_need_targets(kind, name):
    model, given = _make(kind), {"link": _GIVEN["link"], "inputs": _ROWS}
    told = f"^`targets` must be given .* own `{name}`.*Received: targets=None.* Give `targets=y"
    with pytest.raises(ValueError, match=told):
        reports.plan(model, 8, 1, **_GIVEN, inputs=_ROWS)
    with pytest.raises(ValueError, match=told):
        reports.advise(model, 8, (2,), steps=1, **given)
    assert reports.plan(model, 8, 1, **_GIVEN, inputs=_ROWS, targets=np.ones((8, 2), "f")).choices


class OfNoise(keras.Model):
    """It is called on noise, which its step makes for real rows."""

    compute_loss = Subtracting.compute_loss

    def __init__(self):
        super().__init__()
        self.made = keras.Sequential([keras.Input((3,)), layers.Dense(4)])

    def call(self, noise):
        return self.made(noise)

    def train_step(self, *given):
        *state, data = given
        rows, *_ = keras.utils.unpack_x_y_sample_weight(data)
        return super().train_step(*state, (ops.ones((ops.shape(rows)[0], 3)), rows))


class Uncalled(keras.Model):
    """It has no `call`: its step calls its part."""

    def __init__(self):
        super().__init__()
        self.part = keras.Sequential([keras.Input((4,)), layers.Dense(4)])

    def compile(self, rate):
        super().compile()
        self.rate = rate

    def train_step(self, data):
        import tensorflow as tf

        rows, *_ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.part(rows) - rows) ** 2)
        weights = self.part.trainable_variables
        for variable, gradient in zip(weights, tape.gradient(loss, weights)):
            variable.assign_sub(self.rate * gradient)
        return {"loss": loss}


def _of_noise():
    model = OfNoise()
    if _PARTITIONS:  # on JAX Keras calls it on the batch to build it, or a compiled loss
        model(np.ones((1, 3), "float32"))
    model.compile("sgd")
    return model


def _uncalled():
    model = Uncalled()
    model.compile(0.1)
    return model


_MADE = pytest.mark.parametrize(
    "make",
    [
        _of_noise,
        pytest.param(_uncalled, marks=pytest.mark.skipif(_PARTITIONS, reason="a tape's step")),
    ],
)


@_MADE
def test_what_crosses_and_is_kept_where_nothing_is_predicted(make):
    model = make()
    parallel = make_parallel(model, 2)
    if not parallel.compiled:
        parallel.compile(0.1)
    before = model.get_weights()
    found = reports.transfers(parallel, _ROWS)
    assert found.training
    assert not found.prediction
    (note,) = (one for one in found.notes if one.startswith("Only a training step"))
    assert re.search(r"the model can't predict the batch \(Exception .*\)\.$", note)
    assert reports.memory(model, (_ROWS,)).peak > 0
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(new, old)


@_MADE
def test_times_where_nothing_is_predicted(make):
    model = make()
    before = model.get_weights()
    given = {"n_gpus": (1, 2), "batch_size": 4, "repeats": 1, "verbose": 0}
    compile_with = (lambda one: one.compile(0.1)) if make is _uncalled else None
    found = reports.scaling(model, (_ROWS,), compile_with=compile_with, **given)
    assert [run.devices for run in found.runs] == [1, 2]
    known = {"inputs": _ROWS, "link": _GIVEN["link"], "step_seconds": 0.01}
    assert reports.advise(model, 8, (2,), **known).predictions
    assert reports.plan(model, 8, 1, inputs=_ROWS, **_GIVEN).choices
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(new, old)


def test_a_model_that_fails_on_the_batch():
    """Without its own step it is told as Keras does."""
    parallel = make_parallel(_make(Subclassed), 2)
    with pytest.raises(ValueError, match="incompatible with the layer"):
        reports.transfers(parallel, (np.ones((8, 5), "float32"), np.ones((8, 2), "float32")))
