"""What `join` reads from the environment of a launcher."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import threading

import pytest

from keras_multigpu import cluster
from keras_multigpu.launched import find_place

SLURM = {"SLURM_JOB_ID": "10042", "SLURM_NTASKS": "3", "SLURM_PROCID": "2"}


def _tf_config(kind, index, **hosts):
    return {"TF_CONFIG": json.dumps({"cluster": hosts, "task": {"type": kind, "index": index}})}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"TF_CONFIG": ""}, None),
        (_tf_config("worker", 1, worker=["a:1", "b:2"]), ("a:1", 2, 1)),
        (_tf_config("worker", 0, chief=["c:3"], worker=["a:1", "b:2"]), ("c:3", 3, 1)),
        (_tf_config("chief", 0, chief=["c:3"], worker=["a:1"]), ("c:3", 2, 0)),
        (SLURM, None),
        ({**SLURM, "SLURM_JOB_NODELIST": "gpu7"}, ("gpu7:20042", 3, 2)),
        ({**SLURM, "SLURM_JOB_NODELIST": "gpu[03-06,09],old1"}, ("gpu03:20042", 3, 2)),
        ({**SLURM, "SLURM_JOB_NODELIST": "a1,gpu[03-06]"}, ("a1:20042", 3, 2)),
        ({**SLURM, "SLURM_JOB_NODELIST": "r[2-3]n[10,12]"}, ("r2n10:20042", 3, 2)),
        ({**SLURM, "SLURM_JOB_NODELIST": "a", "SLURM_STEP_NODELIST": "b"}, ("b:20042", 3, 2)),
        (
            {**SLURM, "SLURM_JOB_NODELIST": "x", **_tf_config("worker", 0, worker=["a:1"])},
            ("a:1", 1, 0),
        ),
    ],
)
def test_places(environment, place):
    assert find_place(environment) == place


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", "{}", '{"cluster": {}, "task": {"type": "worker", "index": 0}}'),
        _tf_config("ps", 0, worker=["a:1"], ps=["p:1"])["TF_CONFIG"],
    ],
)
def test_a_config_that_says_nothing(text):
    with pytest.raises(ValueError, match=r"`TF_CONFIG` must be JSON with a 'cluster'.* Received"):
        find_place({"TF_CONFIG": text})


def test_what_is_given_comes_first(monkeypatch):
    class Engine:
        def join(self, *args):
            return args

    for name, value in {**SLURM, "SLURM_JOB_NODELIST": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(cluster.engines, "current", Engine)
    address, count, number, *_ = cluster.join()
    assert (address.name, count, number) == ("localhost:20042", 3, 2)
    address, count, number, *_ = cluster.join("localhost:7", process_id=1)
    assert (address.name, count, number) == ("localhost:7", 3, 1)
    monkeypatch.delenv("SLURM_PROCID")
    with pytest.raises(ValueError, match="must be given, or be in the environment. Received: coor"):
        cluster.join("localhost:7", 3)


@pytest.mark.slow
def test_the_launched_script(tmp_path):
    launched = pathlib.Path(__file__).parents[2] / "docs" / "launchers" / "join_train.py"
    slurm = {"SLURM_JOB_ID": str(_free_job()), "SLURM_NTASKS": "2"}
    done = [None, None]

    def launch(number):
        own = {"SLURM_PROCID": str(number), "SLURM_JOB_NODELIST": "localhost"}
        options = {"env": {**os.environ, **slurm, **own}, "timeout": 180}
        command = [sys.executable, launched, tmp_path]
        done[number] = subprocess.run(command, capture_output=True, text=True, **options)

    threads = [threading.Thread(target=launch, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in done:
        assert one.returncode == 0, one.stdout + one.stderr
        assert "Epoch 5/5" in one.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["trained.weights.h5"]


def _free_job():
    """The number of a job whose port is free."""
    for job in range(os.getpid() % 9000, 10000):
        with socket.socket() as server:
            try:
                server.bind(("localhost", 20000 + job))
            except OSError:
                continue
            return job
    raise AssertionError("no port is free")
