"""`join`: processes that run the same steps, and meet in TensorFlow's collective operations."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import tensorflow as tf

from keras_multigpu.engines.cluster import group, processes
from keras_multigpu.engines.cluster.board import BEAT
from keras_multigpu.engines.cluster.errors import ClusterError
from keras_multigpu.engines.cluster.joint import check_owners
from keras_multigpu.engines.cluster.remote import Address
from keras_multigpu.engines.cluster.rendezvous import Record
from keras_multigpu.engines.shared import unchanged
from keras_multigpu.engines.tensorflow import names
from keras_multigpu.engines.tensorflow.cluster.collectives import Collectives
from keras_multigpu.engines.tensorflow.cluster.joint_batches import JointBatches
from keras_multigpu.engines.tensorflow.cluster.peers import Peers
from keras_multigpu.engines.tensorflow.cluster.runtime import (
    abort_collectives,
    environment,
    find_unreached,
    has_started,
    kept_port,
)
from keras_multigpu.engines.tensorflow.cluster.sockets import close_to_others

_CONFIG = "TF_CONFIG"
# Read when a server starts: it then shares its port with sockets that allow that, of one user.
_SHARES = "TF_GRPC_REUSE_PORT"
# Extra seconds before a process that waits for ever ends, so that the others' errors come first.
_GRACE = 60.0
_READINGS = "readings/"
_known: dict[str, Collectives] = {}  # by the device that sends and receives


class Readings(Protocol):
    """What processes read and assign together, of variables that several have parts of."""

    def settle(self) -> None:
        """Before a step: takes part in what others read."""

    def attend(self) -> None:
        """Takes part, if another process has asked for it, while this one waits."""


class Group(group.Group):
    """A group whose collective operations end when a process is lost.

    Attributes:
        is_in_step: whether this process is in a step, which all make together.
        readings: what they read and assign together.
    """

    is_in_step = False
    _is_exchanging = False
    readings: Readings | None = None

    failures = (
        tf.errors.AbortedError,
        tf.errors.CancelledError,
        tf.errors.DeadlineExceededError,
        tf.errors.InternalError,
        tf.errors.UnavailableError,
        tf.errors.UnknownError,
    )

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Scope of steps: they end with a `ClusterError` if another process is lost, or fails.

        A thread looks at the others meanwhile: in a collective operation TensorFlow waits for them
        for ever.
        """
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(BEAT):
                try:
                    self.check(heeds_failures=not self._computes_alone())
                except ClusterError:  # kept in `broken`, and raised by `explained`
                    abort_collectives()
                    return
                except Warning:  # that a filter makes an error: it is told once, and no failure
                    continue

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            with self.explained():
                yield
        finally:
            is_over.set()
            thread.join()

    def _computes_alone(self) -> bool:
        """Whether this process waits for no other: it traces a step, or is between two steps.

        An error of another one may then be its own too, a moment later: all may go on after it.
        """
        if self.is_in_step:
            return not self.call.coming()
        return self.call.is_loop and not self._is_exchanging

    def ask(self, number: int) -> None:
        """Asks the others to take part in the reading of this number."""
        self._board.write(f"{_READINGS}{self.number}", str(number))

    @property
    def asked(self) -> int:
        """The number of the latest reading that a process has asked for."""
        return max(map(int, self._board.read(_READINGS).values()), default=0)

    def attend(self) -> None:
        if self.readings is not None:
            self.readings.attend()

    def exchanging(self) -> contextlib.AbstractContextManager[None]:
        """Scope of what all processes compute together between two steps."""
        return unchanged(self, "_is_exchanging", True)

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """Scope of a step. Between two steps, in callbacks, each process computes by itself."""
        return unchanged(self, "is_in_step", True)


class _Processes(processes.Processes[Group]):
    """Those with TensorFlow's collective runtime."""

    def __init__(self) -> None:
        super().__init__("TensorFlow", tf.__version__, Group)

    def has_started(self) -> bool:
        return has_started()

    def facts(self, address: Address, number: int) -> dict[str, str]:
        devices = {kind: names.count_own(kind) for kind in ("cpu", "gpu")}
        return {"address": self._here.numeric, "devices": json.dumps(devices)}

    def start(self, group: Group, address: Address, records: Sequence[Record]) -> None:
        self._devices = [json.loads(record["devices"]) for record in records]
        if len(records) > 1:
            addresses = [record["address"] for record in records]
            # Before TensorFlow starts: then nobody would notice one that it waits for.
            group.check_reached(find_unreached(addresses, group.timeout))
            self._listening.close()
            _start(addresses, group.number, group.timeout + _GRACE)

    def join(
        self, address: Address, count: int, number: int, timeout: float, data: str
    ) -> tuple[str, ...]:
        is_new = self.group is None
        is_main = threading.current_thread() is threading.main_thread()
        on_terminate = signal.getsignal(signal.SIGTERM) if is_main else None
        ip = address.own_ip() if number else address.ip
        with kept_port(ip) as (self._here, self._listening):
            known = super().join(address, count, number, timeout, data)
        if is_new and count > 1:
            # TensorFlow's runtime takes the signal for itself: a process would not end by it.
            if on_terminate is not None:
                signal.signal(signal.SIGTERM, on_terminate)
            close_to_others(self._here.ip, self._here.port, "processes", stacklevel=5)
            names.join(number, self._devices)
        return known


PROCESSES = _Processes()


def current() -> Group | None:
    """The group of processes that this one has joined, if any."""
    return PROCESSES.group


def by_process(devices: Sequence[str]) -> list[str]:
    """Devices in the order of the processes that have them: each then has rows in one piece."""
    return sorted(devices, key=lambda one: names.find(one)[0] if "/" not in one else 0)


def peers_of(devices: Sequence[str]) -> Peers | None:
    """What joins a model's replicas on devices of several processes; `None` if all are here."""
    group = current()
    if group is None:
        return None
    owners = [names.find(device)[0] for device in devices]
    if set(owners) == {group.number}:
        return None
    kind = "gpu" if any(device.startswith("gpu") for device in devices) else "cpu"
    return Peers(owners, _collectives(names.full_name(names.first(kind))))


def batches_of(peers: Peers) -> JointBatches:
    """The batches of the steps of a model with replicas in several processes."""
    group = current()
    assert group is not None
    host = names.full_name(names.first("cpu"))
    return JointBatches(peers, host, are_parts=group.data == "parts")


def _collectives(device: str) -> Collectives:
    """The operations of this process on a device: one order for all models."""
    group = current()
    assert group is not None
    if device not in _known:
        with tf.init_scope(), tf.device(device):
            token = tf.Variable(0.0, trainable=False, name="ordering_token")
        _known[device] = Collectives(group.number, len(group.names), device, token)
    return _known[device]


def check_devices(devices: Sequence[str], mode: str) -> None:
    """Raises a `ValueError` for devices of other processes that a model can't use."""
    group = current()
    if group is None:
        return
    owners = {names.find(device)[0] for device in devices if "/" not in device}
    check_owners(group, devices, owners, mode)
    if owners <= {group.number}:
        return
    if len({device.partition(":")[0] for device in devices}) > 1:
        raise ValueError(
            "A model over several processes uses GPUs or CPU devices, not both. Received: "
            f"devices={list(devices)!r}. Leave `n_gpus` and `devices` out to use all GPUs."
        )


def _start(addresses: Sequence[str], number: int, seconds: float) -> None:
    """Starts TensorFlow's runtime with a server for the other processes.

    TensorFlow holds Python's lock while it waits for all of them, so that no thread and no signal
    could end it: after some seconds, this process ends with a traceback.
    """
    config = {
        "cluster": {names.JOINED_JOB: list(addresses)},
        "task": {"type": names.JOINED_JOB, "index": number},
    }
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)  # to the process's own errors
    try:
        with environment(_CONFIG, json.dumps(config)), environment(_SHARES, "true"):
            # Only for the runtime that its constructor sets up: it is never used as a strategy.
            tf.distribute.MultiWorkerMirroredStrategy()
    finally:
        faulthandler.cancel_dump_traceback_later()
