"""Workers that all tests of clusters share: to start one takes as long as most of the tests."""

import pytest
from support.worker_processes import Worker, free_port

from keras_multigpu import cluster

LOCAL = f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="session")
def workers():
    """Three: the first has two devices, the second is open to all addresses."""
    started = [Worker("--virtual-devices=2"), Worker(host="0.0.0.0"), Worker()]
    try:
        ready = [worker.ready() for worker in started]
        cluster.connect([ready[0].address], local=LOCAL)  # before TensorFlow starts
        yield ready
    finally:
        cluster.disconnect()
        for worker in started:
            worker.end()


@pytest.fixture(scope="session")
def local():
    """Where the workers reach this process."""
    return LOCAL
