"""Reports of models with a user's own parts: losses, layers, `call`, steps."""

import re

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_multigpu import engines, reports

_PARTITIONS = engines.current().partitions
_GIVEN = {"memory": "1 GB", "link": reports.Link("link", 1e9, 0.0), "step_seconds": 0.01}
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
    found = reports.plan(model, 8, 1, targets=np.ones((8, 2), "float32"), **_GIVEN)
    assert model.compiled
    assert not any("no equal model can be made" in one for one in found.notes)


def test_a_plan_with_a_function_that_is_not_registered():
    """Layers are copied by their configuration: where that fails, the rest is still planned."""
    model = _make_sequence(layers.Dense(2, _squash))
    model.compile("sgd", "mse")
    found = reports.plan(model, 8, 1, **_GIVEN)
    assert {one.devices for one in found.choices} == {1}
    (note,) = (one for one in found.notes if one.startswith("Recomputing"))
    assert note.endswith("of this one (Could not locate function '_squash').")


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
