"""Connects to the machines whose devices this process drives."""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import tensorflow as tf

from keras_multigpu.engines.cluster.errors import ClusterError
from keras_multigpu.engines.cluster.remote import Address, Remote, check_free
from keras_multigpu.engines.tensorflow.cluster import sockets
from keras_multigpu.engines.tensorflow.cluster.connection import Connection
from keras_multigpu.engines.tensorflow.cluster.runtime import has_started, start_server
from keras_multigpu.engines.tensorflow.cluster.workers import greet

_SILENCE = 300.0  # seconds: the driver's machine may be suspended for a while


class TensorFlowRemote(Remote):
    """One process that drives the devices of several machines.

    `serial` is the number of the latest connection.
    """

    def __init__(self) -> None:
        super().__init__("tensorflow")
        self._connection: Connection | None = None
        self._local: Address | None = None
        self.serial = 0

    def list_devices(self) -> tuple[str, ...]:
        return () if self._connection is None else self._connection.devices

    def serve(self, address: Address, virtual_devices: int) -> tuple[str, ...]:
        start_server(address, virtual_devices)
        threading.Thread(target=_limit_silence, daemon=True).start()
        here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.ip, address.ip)
        (status,) = greet([Address(address.name, here, address.port)], timeout=30.0)
        return status.devices

    def connect(
        self, workers: Sequence[Address], local: Address | None, timeout: float
    ) -> tuple[str, ...]:
        self._check_start(local)
        before = self._connection
        asked = (tuple(workers), timeout)
        if before and (before.workers, before.timeout) == asked and before.fault() is None:
            return before.chosen
        statuses = greet(workers, timeout)
        self.disconnect()
        if self._local is None:
            here = local or _free_address(workers)
            check_free(here)  # TensorFlow takes the port on all addresses
        else:
            here = self._local
        self.serial += 1
        try:
            self._connection = Connection(workers, here, statuses, timeout)
        finally:
            self._local = here if has_started() else None
        # TensorFlow closes its contexts on the workers at exit: do it while they are still watched.
        atexit.unregister(self.disconnect)
        atexit.register(self.disconnect)
        return self._connection.chosen

    def _check_start(self, local: Address | None) -> None:
        """Raises an error if the first connection is too late, or if `local` changes."""
        if self._local is None and has_started():
            raise RuntimeError(
                "The first `connect` must come before TensorFlow starts, that is before the first "
                "tensor or model: existing variables would lose later assignments. Received: a "
                "process in which TensorFlow has started. Restart it (or the notebook's kernel), "
                "and connect right after the imports."
            )
        if self._local is not None and local not in (None, self._local):
            raise ValueError(
                f"`local` can't change while this process lives: it is {self._local.name!r}. "
                f"Received: local={local and local.name!r}. Leave it out, or restart the process "
                "(or the notebook's kernel)."
            )

    def disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @contextlib.contextmanager
    def watch(self, devices: Sequence[str]) -> Iterator[None]:
        """Scope for computing on devices: raises a `ClusterError` for a lost machine.

        It asks the machines first, and handles errors as `explained` does.
        """
        self._check([name for name in devices if "/" in name])
        with self.explained():
            yield

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        try:
            yield
        except tf.errors.OpError as error:
            fault = self._connection.fault(error) if self._connection else None
            if fault is None:
                raise
            self.disconnect()
            raise fault from error

    def _check(self, remote: Sequence[str]) -> None:
        """Raises an error for devices of machines that are lost or not connected.

        Disconnects if any machine is lost: TensorFlow sends every function to all of them.
        """
        gone = [name for name in remote if name not in self.list_devices()]
        if gone:
            raise ClusterError(
                gone[0].partition("/")[0],
                "The worker is not connected.",
                "Call `connect`, and make the model parallel again by "
                "`make_parallel(parallel.template, devices=...)`.",
            )
        fault = self._connection.fault() if self._connection else None
        if fault is not None:
            self.disconnect()
            if remote:
                raise fault


REMOTE = TensorFlowRemote()  # one per process, like TensorFlow's runtime


def _free_address(workers: Sequence[Address]) -> Address:
    """This machine's address for the workers, with a free port.

    Workers on other machines decide: those on this machine reach all its addresses.
    """
    found = [worker.own_ip() for worker in workers]
    ip = next((ip for ip in found if not ipaddress.ip_address(ip).is_loopback), found[0])
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as one:
        one.bind((ip, 0))
        here = Address("", ip, int(one.getsockname()[1]))
    return Address(here.numeric, here.ip, here.port)


def _limit_silence() -> None:
    """In a worker: has the kernel notice connections that something has dropped, old and new."""
    while True:
        with sockets.connections() as found:
            sockets.limit_silence(found, _SILENCE)
        time.sleep(_SILENCE / 2)
