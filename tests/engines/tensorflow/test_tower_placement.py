"""Where a committee's weights are, and what crosses between the devices in a training step."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_multigpu import make_parallel, reports

pytestmark = pytest.mark.thin(4)

FEATURES, UNITS, ROWS = 7, 301, 32


def _device(variable):
    return variable.value.device[-5:]


def _committee(template, n=4, **options):
    return make_parallel(template, n, mode="tower", replicas="independent", **options)


def _built():
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(UNITS, "tanh", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(1),
        ]
    )


class Subclassed(keras.Model):
    """Its weights are made in the first call."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(UNITS, "tanh"), layers.Dense(1)

    def call(self, inputs):
        return self.out(self.hidden(inputs))


@pytest.mark.parametrize("make", [_built, Subclassed])
@pytest.mark.parametrize("first_use", ["fit", "predict", "call"])
def test_weights_and_slots_are_on_their_replicas_devices(make, first_use):
    parallel = _committee(make())
    parallel.compile("adam", "mse")
    x, y = np.ones((ROWS, FEATURES), "float32"), np.ones((ROWS, 1), "float32")
    if first_use == "predict":
        parallel.predict(x, verbose=0)
    elif first_use == "call":
        parallel(x)
    parallel.fit(x, y, verbose=0)
    for number, model in enumerate(parallel.replicas):
        assert model.variables
        assert {_device(variable) for variable in model.variables} == {f"CPU:{number}"}
    slots = [variable for variable in parallel.optimizer.variables if len(variable.shape)]
    per_replica = 2 * len(parallel.template.trainable_variables)
    for number in range(4):
        assert sum(_device(slot) == f"CPU:{number}" for slot in slots) == per_replica


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adamw"])
@pytest.mark.parametrize("make", [_built, Subclassed])
def test_no_weight_and_no_gradient_crosses(make, optimizer):
    parallel = _committee(make())
    parallel.compile(optimizer, "mse")
    x, y = np.ones((ROWS, FEATURES), "float32"), np.ones((ROWS, 1), "float32")
    report = reports.transfers(parallel, (x, y))
    sent = [((one.source, one.target), one.tensor, one.bytes) for one in report.training]
    home = "cpu:0"
    for device in ("cpu:1", "cpu:2", "cpu:3"):
        # There go the batch and the outputs' gradient, back come the outputs; single numbers, too.
        there = [name for way, name, size in sent if way == (home, device) and size > 8]
        back = [name for way, name, size in sent if way == (device, home) and size > 8]
        assert (len(there), len(back)) == (2, 1), (there, back)
    assert {home} == {end for way, _, _ in sent for end in way} - {"cpu:1", "cpu:2", "cpu:3"}
    assert all(home in way for way, _, _ in sent)
