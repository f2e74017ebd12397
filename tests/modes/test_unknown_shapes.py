"""Sequential models with an input shape, of which Keras can't infer the shapes of all layers."""

import keras
import numpy as np
import pytest
from keras import layers
from support.parity import difference

from keras_multigpu import make_parallel
from keras_multigpu.reports import advise, memory, scaling, transfers

MODES = {
    "data": {},
    "weights": {"shard": "weights"},
    "mesh": {"model_devices": 2},
    "model": {"mode": "model"},
}


class Unknown(layers.Layer):
    """A layer that can't say what shape it returns."""

    def call(self, inputs):
        """Halves the inputs."""
        return inputs * 0.5

    def compute_output_spec(self, *args, **kwargs):
        """Raises, as Keras does where a call needs values."""
        raise NotImplementedError


@pytest.fixture
def data(rng):
    return rng.normal(size=(16, 4)).astype("float32"), rng.normal(size=(16, 1)).astype("float32")


def _made():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, "tanh"), Unknown(), layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def _trained(model, data):
    model.fit(*data, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize("mode", MODES)
def test_trains_like_one_device(mode, data):
    parallel = make_parallel(_made(), 4, **MODES[mode])
    assert difference(_trained(_made(), data), _trained(parallel, data)) < 1e-6
    assert mode != "model" or len(parallel.placement) == 2  # layers made in the first step, too


def test_reports_build_the_rest(data):
    assert memory(make_parallel(_made(), 2), data).bytes(kind="slots") >= 4 * (40 + 9)
    assert transfers(make_parallel(_made(), 2), data).training
    for given in (data, _Batches(*data)):
        size = 8 if isinstance(given, tuple) else None
        report = scaling(_made(), given, n_gpus=(1,), batch_size=size, repeats=1, verbose=0)
        assert np.isfinite(report.runs[0].loss)


def test_advice_counts_all_weights(data):
    asked = {"link": "nvlink4", "step_seconds": 0.1, "inputs": data[0]}
    advice = advise(_made(), 16, (1, 2), modes=("data", "tower"), **asked)
    assert advice.settings["weights"].endswith("in 4 variables")


class _Batches(keras.utils.PyDataset):
    def __init__(self, *arrays):
        super().__init__()
        self._arrays = arrays

    def __len__(self):
        return 2

    def __getitem__(self, number):
        return tuple(part[8 * number :][:8] for part in self._arrays)
