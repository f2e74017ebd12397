"""The machines whose devices this process uses, by TensorFlow's own runtime."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

import tensorflow as tf

from keras_multigpu.engines.errors import ClusterError
from keras_multigpu.engines.remote import Address, Remote
from keras_multigpu.engines.tensorflow.connection import Connection, free_port
from keras_multigpu.engines.tensorflow.greeting import greet
from keras_multigpu.engines.tensorflow.server import check_free, start_server


class TensorFlowRemote(Remote):
    """One process that drives the devices of several machines."""

    def __init__(self) -> None:
        super().__init__("tensorflow")
        self._connection: Connection | None = None

    def list_devices(self) -> tuple[str, ...]:
        return () if self._connection is None else self._connection.devices

    def serve(self, address: Address, virtual_devices: int) -> tuple[str, ...]:
        start_server(address, virtual_devices)
        here = "127.0.0.1" if address.ip == "0.0.0.0" else address.ip
        (status,) = greet([Address(address.name, here, address.port)], timeout=30.0)
        return status.devices

    def connect(
        self, workers: Sequence[Address], local: Address | None, timeout: float
    ) -> tuple[str, ...]:
        before = self._connection
        if before is not None:
            is_same = before.workers == tuple(workers) and local in (None, before.local)
            if is_same and before.fault() is None:
                return before.chosen
        statuses = greet(workers, timeout)
        self.disconnect()
        if local is None:
            ip = _interface(workers)
            local = Address(f"{ip}:{(port := free_port(ip))}", ip, port)
        check_free(local)
        self._connection = Connection(workers, local, statuses, timeout)
        return self._connection.chosen

    def disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @contextlib.contextmanager
    def watch(self, devices: Sequence[str]) -> Iterator[None]:
        remote = [name for name in devices if "/" in name]
        self._check(remote)
        try:
            yield
        except tf.errors.OpError as error:
            fault = self._connection.fault(error) if remote and self._connection else None
            if fault is None:
                raise
            self.disconnect()
            raise fault from error

    def _check(self, devices: Sequence[str]) -> None:
        """Refuses devices of machines that are not connected, or are lost."""
        gone = [name for name in devices if name not in self.list_devices()]
        if gone:
            raise ClusterError(
                gone[0].partition("/")[0],
                "The worker is not connected.",
                "Call `connect`, and make the model parallel again by "
                "`make_parallel(parallel.template, devices=...)`.",
            )
        fault = self._connection.fault() if devices and self._connection else None
        if fault is not None:
            self.disconnect()
            raise fault


REMOTE = TensorFlowRemote()  # TensorFlow's runtime, too, is one for the process


def _interface(workers: Sequence[Address]) -> str:
    """The address of this machine by which its packets to the workers leave it.

    One of another machine is asked: those of this machine reach every address of it.
    """
    found = []
    for worker in workers:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.connect((worker.ip, worker.port))  # sends nothing
            found.append(str(one.getsockname()[0]))
    return next((ip for ip in found if not ip.startswith("127.")), found[0])
