"""Processes that train one model together, and compute what one device does."""

import contextlib
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from support import joined_models
from support.worker_processes import free_port

SCRIPT = pathlib.Path(joined_models.__file__)
LIMIT = 900  # far more than it takes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "floatx", "tolerance", "cases"),
    [
        ("1,2", "float64", 1e-12, [case.__name__ for case in joined_models.CASES]),
        ("2,1,1", "float32", 2e-5, ["mlp", "texts"]),
    ],
)
def test_processes_compute_what_one_device_does(counts, floatx, tolerance, cases, tmp_path):
    address = f"127.0.0.1:{free_port()}"
    numbers = range(len(counts.split(",")))
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    # In files: a process that waits for its output to be read would hold up the others.
    with contextlib.ExitStack() as files:
        outputs = [
            files.enter_context((tmp_path / f"output{number}").open("w+")) for number in numbers
        ]
        processes = [
            subprocess.Popen(
                [sys.executable, SCRIPT, tmp_path, counts, str(number), address, floatx, *cases],
                stdout=outputs[number],
                stderr=subprocess.STDOUT,
                env=environment,
            )
            for number in numbers
        ]
        try:
            for process, output in zip(processes, outputs):
                status = process.wait(timeout=LIMIT)
                output.seek(0)
                assert status == 0, output.read()
        finally:
            for process in processes:
                process.kill()
    for case in cases:
        first, *others = (np.load(tmp_path / f"{case}{number}.npz") for number in numbers)
        if case == "halved":
            assert 1e-5 < first["worst"] < 0.02
        else:
            assert first["worst"] < tolerance, case
        for other in others:
            assert set(first) == set(other)
            for key in first:
                np.testing.assert_allclose(first[key], other[key], rtol=tolerance, atol=tolerance)
