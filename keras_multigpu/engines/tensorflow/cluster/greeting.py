"""The first words with workers: whether they are some, and of which version."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import tensorflow as tf

from keras_multigpu.engines.errors import ClusterError
from keras_multigpu.engines.remote import Address
from keras_multigpu.engines.tensorflow.cluster.health import Caller, Status
from keras_multigpu.engines.tensorflow.cluster.server import version_job

_START = "`python -m keras_multigpu serve --bind HOST:PORT`"


def greet(workers: Sequence[Address], timeout: float) -> list[Status]:
    """What the workers say of themselves, once all of them have answered.

    Raises:
        ClusterError: if one does not answer in time, or has another version of TensorFlow.
    """
    with ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(lambda worker: _greet(worker, timeout), workers))


def _greet(worker: Address, timeout: float) -> Status:
    caller = Caller(worker)
    try:
        # What is left of the time is for finding out why there was no answer.
        status = caller.ask(0.8 * timeout, patient=True)
    finally:
        caller.close()
    if status is None:
        raise ClusterError(worker.name, *_why_silent(worker, 0.1 * timeout))
    if status.job != version_job():
        _, _, version = status.job.partition("_tensorflow_")
        told = f"TensorFlow {version.replace('_', '.')}" if version else "no version that it tells"
        raise ClusterError(
            worker.name,
            f"The worker has {told}, and this process has TensorFlow {tf.__version__}.",
            f"Install one version on all machines, and start it again by {_START}.",
        )
    return status


def _why_silent(worker: Address, seconds: float) -> tuple[str, str]:
    """What is wrong with a worker that did not answer, and the cure."""
    try:
        socket.create_connection((worker.ip, worker.port), seconds).close()
    except ConnectionRefusedError:
        return (
            f"Nobody listens there ({worker.numeric}).",
            f"Start the worker by {_START}, with this port, and an address of its machine that "
            "can be reached from here.",
        )
    except OSError as error:
        return (
            f"The machine can't be reached ({worker.numeric}: {error}).",
            "Check the address, that the machine is up, and that no firewall is between.",
        )
    return (
        "Something listens there, but does not answer as a worker does: it is another program, or "
        "a worker that is frozen.",
        f"Check the port; if it is the worker's, end it, and start it again by {_START}.",
    )
