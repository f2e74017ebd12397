"""`model_devices` over several processes: a group's parts are in one, gradients cross all."""

import pathlib

import numpy as np
import pytest
from support import mesh_script
from support.precision import all_in_double_precision
from support.process_runs import running
from support.spread_script import ON_JAX

PATH = pathlib.Path(mesh_script.__file__)
# Keras's losses have float32 on JAX.
LIMIT = 1e-6 if ON_JAX else 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["on_mesh", "in_shards"])
def test_a_mesh_over_processes(scenario, tmp_path):
    with running(scenario, tmp_path, path=PATH) as run:
        ended = run.end()
    with all_in_double_precision():
        model = mesh_script.build()
        alone = mesh_script.train(model)
        alone["loaded"] = model.predict(mesh_script.data()[0], verbose=0)
    for number in (0, 1):
        assert (tmp_path / f"found {number}.npz").exists(), ended[number][1]
        found = np.load(tmp_path / f"found {number}.npz")
        assert set(found) == set(alone)
        for key, value in alone.items():
            np.testing.assert_allclose(found[key], value, rtol=LIMIT, atol=LIMIT, err_msg=key)
        placed = np.load(tmp_path / f"placed {number}.npz")
        parts = 2 if scenario == "on_mesh" else 4
        assert placed["dense_1/kernel"].tolist() == [64 * 1024 // parts] * 4
        if ON_JAX:
            text = str(np.load(tmp_path / f"refused {number}.npy"))
            assert "With `shard` or `model_devices` over several processes no process can" in text
    written = sorted(path.name for path in tmp_path.glob("? ?.weights.h5"))
    assert written == ["0 1.weights.h5", "0 2.weights.h5"]
