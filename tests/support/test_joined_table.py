"""The table of joined processes: some models on one layout, and what the table notices."""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
from support.cases import CASES
from support.joined_table import drive, job

_TESTS = pathlib.Path(__file__).parents[1]
_DRAWN = ["--random", "4", "--seed", "5"]
pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="it compares processes on TensorFlow"
)


def test_what_is_drawn_depends_on_the_seed_alone():
    names = [case.name for case in CASES]
    jobs = job.draw(names, seed=3, count=20)
    assert jobs == job.draw(names, seed=3, count=20)
    assert jobs != job.draw(names, seed=4, count=20)
    assert {one.floatx for one in jobs} == {"float64"}
    assert len({(one.case, one.rows, one.batch, one.few_batch) for one in jobs}) > 10


def test_the_largest_difference_of_any_process_is_found(tmp_path):
    one = job.table(["mlp"], "float32")[0]
    alone, together = tmp_path / "alone", tmp_path / "1_1"
    found = {"weights 0": np.ones(3), "outputs 0": np.ones((2, 2)), "logs 0": np.float64(1)}
    for folder, number, logs in ((alone, 0, 1.0), (together, 0, 1.0), (together, 1, 1.25)):
        folder.mkdir(exist_ok=True)
        np.savez(folder / f"mlp.{number}.npz", **{**found, "logs 0": np.float64(logs)})
    assert drive.differences(one, "1,1", together, alone) == [0.0, 0.0, 0.25]
    np.savez(together / "mlp.1.npz", **{**found, "weights 0": np.array([1, np.nan, 1])})
    assert drive.differences(one, "1,1", together, alone)[0] == float("inf")
    np.savez(together / "mlp.1.npz", **{"weights 0": np.ones(3)})
    with pytest.raises(AssertionError):
        drive.differences(one, "1,1", together, alone)


@pytest.mark.slow
def test_a_training_that_fails_is_named_and_the_others_go_on(tmp_path, monkeypatch):
    paths = [str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    jobs = [job.Job("good", "mlp"), job.Job("bad", "no such case"), job.Job("other", "mlp")]
    failed = drive.run("alone", jobs, tmp_path / "alone")
    assert list(failed) == ["bad"]
    assert "StopIteration" in failed["bad"]
    assert (tmp_path / "alone" / "other.0.npz").exists()


@pytest.mark.slow
def test_drawn_models_of_the_table():
    """The whole table takes long: it is made by hand."""
    paths = [str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "support.joined_table", "--layouts", "1,2", *_DRAWN],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=_TESTS,  # in the checkout it would not import the installed package
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "| **all weights** |" in done.stdout
