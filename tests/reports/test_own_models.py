"""Reports of models with a user's own parts: losses, layers, `call`, steps."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_multigpu import reports

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
