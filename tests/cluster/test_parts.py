"""Processes that each give their part of a batch compute what one device does on the whole."""

import contextlib
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
from support import joined_parts
from support.joined_parts import FEW, difference
from support.worker_processes import free_port

SCRIPT = pathlib.Path(joined_parts.__file__)
LIMIT = 900  # far more than it takes
ON_JAX = keras.backend.backend() == "jax"
# Keras's losses have float32 on JAX.
TOLERANCE = 1e-6 if ON_JAX else 1e-12
# On TensorFlow alone: a step that takes gradients by a tape.
NAMES = [case.__name__ for case in joined_parts.CASES]
NAMES = [name for name in NAMES if not ON_JAX or name != "own_step"]


def run(folder, counts, *cases):
    """Runs the cases in as many processes as there are counts of devices."""
    address = f"127.0.0.1:{free_port()}"
    numbers = range(len(counts.split(",")))
    path = f"{SCRIPT.parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    environment = {
        **os.environ, "KERAS_BACKEND": keras.backend.backend(), "PYTHONPATH": path
    }  # fmt: skip
    # In files: a process that waits for its output to be read would hold up the others.
    with contextlib.ExitStack() as files:
        outputs = [files.enter_context((folder / f"out{k}").open("w+")) for k in numbers]
        processes = [
            subprocess.Popen(
                [sys.executable, SCRIPT, folder, counts, str(number), address, *cases],
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "cases"), [("1,2" if not ON_JAX else "2,2", NAMES), ("2,1,1", ["mlp"])]
)
def test_parts_are_trained_on_as_the_whole_batch(counts, cases, tmp_path):
    run(tmp_path, counts, *cases)
    numbers = range(len(counts.split(",")))
    for case in cases:
        alone = np.load(tmp_path / f"{case}.npz")
        for number in numbers:
            part = joined_parts.Part(case, number, len(numbers))
            own = np.concatenate(part.rows(FEW))
            found = np.load(tmp_path / f"{case}{number}.npz")
            assert set(found) == set(alone)
            for key in alone:
                expected = alone[key]
                if key.startswith("own"):  # some outputs have several rows for each input
                    total = FEW if "predicted" in key else 3
                    rows = own if total == FEW else np.arange(*part.of_batch(3))
                    several = len(expected) // total
                    expected = expected.reshape(total, several, *expected.shape[1:])[rows]
                    expected = expected.reshape(-1, *expected.shape[2:])
                assert difference(found[key], expected) < TOLERANCE, (case, number, key)
