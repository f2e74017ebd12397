"""Files that a parallel model writes on one backend are read on the other."""

import importlib.util

import keras
import numpy as np
import pytest
from support.parity import difference
from support.scripts import run_python

from keras_multigpu import make_parallel

HERE = keras.backend.backend()
THERE = "jax" if HERE == "tensorflow" else "tensorflow"

_READ = """
import sys, warnings, keras, numpy as np, keras_multigpu as k
k.use_virtual_devices(2)
folder = sys.argv[1]
x = np.load(folder + "/x.npy")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fewer devices than there were
    model = keras.saving.load_model(folder + "/whole.keras")
np.save(folder + "/whole.npy", model.predict(x, verbose=0))
model.set_weights([0 * weight for weight in model.get_weights()])
model.load_weights(folder + "/model.weights.h5")
np.save(folder + "/weights.npy", model.predict(x, verbose=0))
model.fit(x, np.zeros((9, 2)), shuffle=False, verbose=0)
model.save_weights(folder + "/back.weights.h5")
# (To write or copy a configuration, Keras itself imports TensorFlow where it is installed.)
if keras.backend.backend() == "jax" and model.mode == "data":
    assert "tensorflow" not in sys.modules
print(model.devices, keras.backend.backend())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "data"},
        {"mode": "data", "shard": "weights"},
        {"mode": "tower", "replicas": "independent", "mix": "weighted"},
    ],
    ids=["data", "shard", "tower"],
)
@pytest.mark.skipif(not importlib.util.find_spec(THERE), reason=f"{THERE} is not installed")
def test_written_here_and_read_there_and_back(options, rng, tmp_path):
    template = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(2)]
    )
    parallel = make_parallel(template, 4, **options)
    parallel.compile(keras.optimizers.Adam(0.01), "mse")
    x = rng.normal(size=(9, 6)).astype("float32")
    parallel.fit(x, rng.normal(size=(9, 2)), verbose=0)
    np.save(tmp_path / "x.npy", x)
    parallel.save(tmp_path / "whole.keras")
    parallel.save_weights(tmp_path / "model.weights.h5")
    done = run_python("-c", _READ, tmp_path, KERAS_BACKEND=THERE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(f"('cpu:0', 'cpu:1') {THERE}")
    expected = parallel.predict(x, verbose=0)
    for name in ("whole", "weights"):
        assert difference(np.load(tmp_path / f"{name}.npy"), expected) < 1e-5
    parallel.fit(x, np.zeros((9, 2)), shuffle=False, verbose=0)
    trained = parallel.get_weights()
    parallel.load_weights(tmp_path / "back.weights.h5")
    assert difference(parallel.get_weights(), trained) < 1e-5
