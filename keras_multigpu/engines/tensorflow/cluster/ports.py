"""A port at which the other processes reach TensorFlow's server, kept for it until it is there."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

from keras_multigpu.engines.cluster.remote import Address
from keras_multigpu.engines.tensorflow.cluster.runtime import environment

# Read when a server starts: it then shares its port with sockets that allow that, of one user.
_SHARES = "TF_GRPC_REUSE_PORT"


class Port:
    """A free port of this machine, which no other process gets as long as this is open.

    It listens until the server takes it over, so that others can try whether they reach it.

    Args:
        ip: the address at which it listens.

    Attributes:
        address: the address and the port.
    """

    def __init__(self, ip: str):
        with contextlib.ExitStack() as opened:
            family = Address(ip, ip, 0).family
            kept = opened.enter_context(_bound(family, "", 0))
            self.address = Address(ip, ip, int(kept.getsockname()[1]))
            self._listening = opened.enter_context(_bound(family, ip, self.address.port))
            self._listening.listen()
            self._opened = opened.pop_all()

    def __enter__(self) -> Port:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @contextlib.contextmanager
    def taken_over(self) -> Iterator[None]:
        """Scope in which TensorFlow's server starts to listen at the port."""
        self._listening.close()
        with environment(_SHARES, "true"):
            yield


def _bound(family: socket.AddressFamily, ip: str, port: int) -> socket.socket:
    """A socket at a port, free if it is 0, that shares it with others of this user."""
    one = socket.socket(family, socket.SOCK_STREAM)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    one.bind((ip, port))
    return one


def find_unreached(addresses: Sequence[str], seconds: float) -> dict[int, str]:
    """The first of some addresses, `"ip:port"`, that does not answer in time, by its number."""
    for number, address in enumerate(addresses):
        ip, _, port = address.rpartition(":")
        try:
            socket.create_connection((ip.strip("[]"), int(port)), seconds).close()
        except OSError:
            return {number: address}
    return {}
