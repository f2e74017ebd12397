"""Processes that train one model together, and compute what one device does."""

import pathlib
import signal

import numpy as np
import pytest
from support import joined_models
from support.process_runs import run_to_end, running

SCRIPT = pathlib.Path(joined_models.__file__)
_SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "floatx", "tolerance", "cases"),
    [
        ("1,2", "float64", 1e-12, joined_models.WHOLE),
        ("2,1", "float64", 1e-12, joined_models.SHARDED),
        ("2,1,1", "float32", 2e-5, ["mlp", "texts"]),
    ],
)
def test_processes_compute_what_one_device_does(counts, floatx, tolerance, cases, tmp_path):
    run_to_end(SCRIPT, tmp_path, counts, floatx, *cases)
    numbers = range(len(counts.split(",")))
    for case in cases:
        first, *others = (np.load(tmp_path / f"{case}{number}.npz") for number in numbers)
        if case == "halved":
            assert 1e-5 < first["worst"] < 0.02
        else:
            assert first["worst"] < tolerance, case
        for other in others:
            assert set(first) == set(other)
            for key in first.keys() - {"worst"}:  # only process 0 compares with one device
                np.testing.assert_allclose(first[key], other[key], rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "frozen", "raises"])
def test_of_three_processes_all_others_name_the_lost_one(fault, tmp_path):
    scenario = "middle_raises" if fault == "raises" else "train_long"
    with running(scenario, tmp_path, numbers=(0, 1, 2), count=3) as run:
        run.await_line(0, "batch")
        run.await_line(2, "batch")
        if fault != "raises":
            run.processes[1].send_signal(_SIGNALS[fault])
        for status, output in run.end(0, 2).values():
            assert status == 1, output
            host, error = [line for line in output.splitlines() if "(process " in line]
            assert host.endswith(f"(process 1, pid {run.processes[1].pid})"), output
            assert error.startswith(f"{host}: It has "), output
