"""Clusters: the first connection comes before TensorFlow starts, so in processes of their own."""

import pathlib
import subprocess
import sys

import keras
import pytest

from keras_multigpu import cluster

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("name", ["cluster_training.py", "cluster_faults.py"])
def test_in_a_process_of_its_own(name):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", HERE / name],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_too_late():
    keras.ops.zeros(1)
    with pytest.raises(RuntimeError, match="first `connect` must come before TensorFlow starts"):
        cluster.connect(["127.0.0.1:2222"])
    cluster.disconnect()  # there is nothing to let go of
