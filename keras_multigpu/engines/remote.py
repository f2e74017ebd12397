"""Devices of other machines, as far as one process of a backend can use them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a process is reached.

    Attributes:
        name: `"host:port"`, as it was given.
        ip: the host's IPv4 address.
        port: the TCP port.
    """

    name: str
    ip: str
    port: int

    @property
    def numeric(self) -> str:
        """The same in numbers: `"10.0.0.7:2222"`."""
        return f"{self.ip}:{self.port}"


class Remote:
    """What a backend can do with other machines' devices. This one can do nothing.

    Args:
        backend: the backend's name in Keras.
    """

    def __init__(self, backend: str):
        self._backend = backend

    def list_devices(self) -> tuple[str, ...]:
        """Names of all devices of the machines that are connected."""
        return ()

    def serve(self, address: Address, virtual_devices: int) -> tuple[str, ...]:
        """Serves this machine's devices, as long as the process lives; gives their names.

        Args:
            address: where: an address of this machine, or 0.0.0.0 for all of them.
            virtual_devices: how many CPU devices to make of its processor.
        """
        raise self._refusal("serve")

    def connect(
        self, workers: Sequence[Address], local: Address | None, timeout: float
    ) -> tuple[str, ...]:
        """Connects to machines whose devices are served; gives the names of their devices.

        Args:
            workers: where they are served.
            local: where the workers reach this process; `None` to find that out.
            timeout: the seconds after which a worker that does not answer is given up.
        """
        raise self._refusal("connect")

    def disconnect(self) -> None:
        """Lets go of all machines that are connected."""
        raise self._refusal("disconnect")

    def watch(self, devices: Sequence[str]) -> contextlib.AbstractContextManager[Any]:
        """A scope in which what goes wrong on other machines is told as a `ClusterError`.

        Args:
            devices: the names of the devices that are used in it.
        """
        return contextlib.nullcontext()

    def explained(self) -> contextlib.AbstractContextManager[Any]:
        """Scope that raises a `ClusterError` in place of the backend's error for a lost worker."""
        return contextlib.nullcontext()

    def _refusal(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"`{what}` needs the Keras backend 'tensorflow', where one process uses the devices "
            f"of several machines. Received: keras.backend.backend()={self._backend!r}. On JAX "
            "every machine runs the same script: call `keras_multigpu.cluster.join` in it."
        )
