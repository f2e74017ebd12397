"""What workers say of themselves, by TensorFlow's own `GetStatus`."""

from __future__ import annotations

import dataclasses
import re
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc
import tensorflow as tf

from keras_multigpu.engines.cluster.errors import ClusterError
from keras_multigpu.engines.cluster.remote import Address
from keras_multigpu.engines.tensorflow.cluster.runtime import version_job
from keras_multigpu.engines.tensorflow.cluster.watchdog import OPTIONS, STATUS

_START = "`python -m keras_multigpu serve --bind HOST:PORT`"
# The answer is a protocol buffer that contains the names of the devices as plain text.
_DEVICE = re.compile(rb"/job:(\w+)/replica:0/task:0/device:(CPU|GPU):(\d+)")
_Told = TypeVar("_Told")


@dataclasses.dataclass(frozen=True)
class Status:
    """What a worker answers to `GetStatus`.

    Attributes:
        job: the name of its job, which contains its version of TensorFlow.
        devices: its devices, `"gpu:0"`.
        identity: bytes that differ from one process to the next.
    """

    job: str
    devices: tuple[str, ...]
    identity: bytes

    @property
    def chosen(self) -> Sequence[str]:
        """Its GPUs, or its CPU devices if it has none."""
        return [one for one in self.devices if one.startswith("gpu")] or self.devices


def ask(worker: Address, seconds: float, *, patient: bool = False) -> Status | None:
    """A worker's answer within some seconds; `None` without a valid one.

    If `patient`, it also waits for a worker that does not listen yet. Each question has its own
    channel: gRPC delays retries on one that has failed.
    """
    with grpc.insecure_channel(worker.numeric, options=OPTIONS) as channel:
        try:
            answer = channel.unary_unary(STATUS)(b"", timeout=seconds, wait_for_ready=patient)
        except grpc.RpcError:
            return None
    found = _DEVICE.findall(answer)
    devices = tuple(f"{kind.decode().lower()}:{int(index)}" for _, kind, index in found)
    return Status(found[0][0].decode(), devices, answer) if found else None


def of_all(workers: Sequence[Address], find: Callable[[Address], _Told]) -> list[_Told]:
    """What a function finds of each worker, all at the same time."""
    with ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(find, workers))


def greet(workers: Sequence[Address], timeout: float) -> list[Status]:
    """Waits until all workers have answered; refuses other versions of TensorFlow."""
    return of_all(workers, lambda worker: _greet(worker, timeout))


def _greet(worker: Address, timeout: float) -> Status:
    # The rest of the time is for finding out why a worker is silent.
    status = ask(worker, 0.8 * timeout, patient=True)
    if status is None:
        raise ClusterError(worker.name, *_why_silent(worker, 0.1 * timeout))
    if status.job != version_job():
        _, _, version = status.job.partition("_tensorflow_")
        told = f"TensorFlow {version.replace('_', '.')}" if version else "an unknown version"
        raise ClusterError(
            worker.name,
            f"The worker has {told}, and this process has TensorFlow {tf.__version__}.",
            f"Install the same version on all machines, and restart the worker with {_START}.",
        )
    return status


def _why_silent(worker: Address, seconds: float) -> tuple[str, str]:
    """The problem of a worker that did not answer, and the cure."""
    try:
        socket.create_connection((worker.ip, worker.port), seconds).close()
    except ConnectionRefusedError:
        return (
            f"Nobody listens there ({worker.numeric}).",
            f"Start the worker with {_START}, with this port, and an address of its machine that "
            "this one reaches.",
        )
    except OSError as error:
        return (
            f"The machine can't be reached ({worker.numeric}: {error}).",
            "Check the address, the machine, and the firewalls on the way.",
        )
    return (
        "Something listens there, but does not answer as a worker does: it is another program, or "
        "a worker that is frozen.",
        f"Check the port. If it is the worker's, end the worker, and restart it with {_START}.",
    )
