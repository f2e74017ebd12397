"""What joined processes do on TensorFlow alone; `tests/cluster` has what both backends do."""

import numpy as np
import pytest
from support.process_runs import running

pytestmark = pytest.mark.slow


def test_what_one_process_does_in_a_callback(tmp_path):
    with running("own_calls", tmp_path) as run:
        for status, output in run.end().values():
            assert status == 1, output
            assert "(process 1, pid " in output
            assert (
                "Its state and that of process 0 differ at step 4: its is learning_rate=0.1"
                in output
            )
    weights = [np.load(tmp_path / f"weights{number}.npz") for number in (0, 1)]
    for name in weights[0]:
        np.testing.assert_array_equal(weights[0][name], weights[1][name])


def test_a_terminated_first_process_is_named(tmp_path):
    with running("train_long", tmp_path) as run:
        run.await_line(1, "batch")
        run.processes[0].terminate()
        status, output = run.end(1)[1]
    assert status == 1, output
    assert f"(process 0, pid {run.processes[0].pid}): It has ended without a word" in output
