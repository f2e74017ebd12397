"""Process 1 fails before TensorFlow's runtime has started: as `process_script.py`."""

import contextlib
import sys

import tensorflow as tf
from support.process_script import main

from keras_multigpu.engines.tensorflow.cluster import processes


def unreached():
    """As if a firewall let nobody through."""
    kept_port = processes.kept_port

    @contextlib.contextmanager
    def closed(ip):
        with kept_port(ip) as (address, listening):
            listening.close()
            yield address, listening

    processes.kept_port = closed


def fails():
    """While the others, which hold Python's lock, wait for it within TensorFlow."""

    def fail():
        raise RuntimeError("no runtime")

    tf.distribute.MultiWorkerMirroredStrategy = fail


if __name__ == "__main__":
    scenario, _, _, number, _ = sys.argv[1:]
    processes._GRACE = 0.0
    if number == "1":
        globals()[scenario]()
    main(*sys.argv[1:], {scenario: lambda *_: None})
