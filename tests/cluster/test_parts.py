"""Processes that each give their part of a batch compute what one device does on the whole."""

import pathlib

import keras
import numpy as np
import pytest
from support import joined_parts
from support.joined_parts import FEW
from support.joined_training import difference
from support.process_runs import run_to_end

SCRIPT = pathlib.Path(joined_parts.__file__)
ON_JAX = keras.backend.backend() == "jax"
# Keras's losses have float32 on JAX.
TOLERANCE = 1e-6 if ON_JAX else 1e-12
# On TensorFlow alone: a step that takes gradients by a tape.
NAMES = [case.__name__ for case in joined_parts.CASES if case not in joined_parts.OPTIONS]
NAMES = [name for name in NAMES if not ON_JAX or name != "own_step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "cases"),
    [
        ("1,2" if not ON_JAX else "2,2", NAMES),
        ("2,1,1", ["mlp"]),
        ("2,2", [case.__name__ for case in joined_parts.OPTIONS]),
    ],
)
def test_parts_are_trained_on_as_the_whole_batch(counts, cases, tmp_path):
    run_to_end(SCRIPT, tmp_path, counts, *cases)
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
