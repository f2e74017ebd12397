"""Clusters: the first connection comes before TensorFlow starts, so in processes of their own."""

import os
import pathlib

import keras
import pytest
from support.scripts import run_python

from keras_multigpu import cluster

HERE = pathlib.Path(__file__).parent
FILES = (HERE / "cluster_training.py", HERE / "cluster_faults.py")
TESTS = HERE.parents[2]


def _run(*arguments, timeout):
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = run_python("-m", *arguments, timeout=timeout, PYTHONPATH=os.pathsep.join(paths))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_in_a_process_of_its_own():
    _run("pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *FILES, timeout=900)


@pytest.mark.slow
def test_attacks():
    """Attacks that no test of `FILES` makes, once: all end in time, and leave nothing broken."""
    names = ("interrupted", "stopped_for_a_second", "garbage", "named", "slow_link", "port_taken")
    options = ("--times", 1, "--gigabytes", 0.25, "--only", *names, "two_clients", "large")
    _run("support.cluster_attacks", *options, timeout=1200)


def test_too_late():
    keras.ops.zeros(1)
    with pytest.raises(RuntimeError, match="first `connect` must come before TensorFlow starts"):
        cluster.connect(["127.0.0.1:2222"])
    cluster.disconnect()  # there is nothing to let go of
