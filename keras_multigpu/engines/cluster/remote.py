"""Devices of other machines that one process drives: optional for a backend."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from keras_multigpu.engines.cluster.errors import ClusterError


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a process is reached: `"host:port"` as the user wrote it, IP address and port."""

    name: str
    ip: str
    port: int

    @property
    def numeric(self) -> str:
        """The IP address and the port: `"10.0.0.7:2222"`, `"[::1]:2222"`."""
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"

    @property
    def family(self) -> socket.AddressFamily:
        """The kind of its sockets."""
        return socket.AF_INET6 if ":" in self.ip else socket.AF_INET

    def own_ip(self) -> str:
        """The IP address of this machine from which it reaches this one."""
        with socket.socket(self.family, socket.SOCK_DGRAM) as one:
            one.connect((self.ip, self.port))  # sends nothing
            return str(one.getsockname()[0])


def check_free(address: Address) -> None:
    """Raises a `ClusterError` if an address, or its port at all addresses, is no free one here."""
    for ip in (address.ip, ""):
        with listening(address, ip):
            pass


@contextlib.contextmanager
def listening(address: Address, ip: str | None = None, cure: str = "") -> Iterator[socket.socket]:
    """Scope with a socket that listens at an address, or at another IP address's port."""
    with socket.socket(address.family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((address.ip if ip is None else ip, address.port))
            server.listen()
        except OSError as error:
            raise cannot_listen(address, str(error.strerror), cure) from error
        yield server


def cannot_listen(address: Address, reason: str, cure: str = "") -> ClusterError:
    """The error for an address at which this process can't listen."""
    return ClusterError(
        address.name,
        f"This process can't listen there ({reason}).",
        f"Give an address of this machine, with a port that no other process uses.{cure}",
    )


class Remote:
    """What a backend does with other machines' devices; this one refuses everything."""

    def __init__(self, backend: str):
        self._backend = backend

    def list_devices(self) -> tuple[str, ...]:
        """The names of all devices of the connected machines."""
        return ()

    def serve(self, address: Address, virtual_devices: int) -> tuple[str, ...]:
        """Serves this machine's devices while the process lives; returns their names."""
        raise self._refusal("serve")

    def connect(
        self, workers: Sequence[Address], local: Address | None, timeout: float
    ) -> tuple[str, ...]:
        """Connects to machines that serve their devices; returns the names of the devices.

        The workers reach this process at `local`; with `None` the engine finds an address.
        """
        raise self._refusal("connect")

    def disconnect(self) -> None:
        """Disconnects all machines."""
        raise self._refusal("disconnect")

    def explained(self) -> contextlib.AbstractContextManager[Any]:
        """Scope that raises a `ClusterError` in place of the backend's error for a lost worker."""
        return contextlib.nullcontext()

    def _refusal(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"`{what}` needs the Keras backend 'tensorflow', where one process uses the devices "
            f"of several machines. Received: keras.backend.backend()={self._backend!r}. On JAX "
            "every machine runs the same script: call `keras_multigpu.cluster.join` in it."
        )
