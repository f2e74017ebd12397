"""serve: this machine's devices, for others."""

from __future__ import annotations

import contextlib
import threading

from keras_multigpu import engines
from keras_multigpu.cluster.addresses import find_address
from keras_multigpu.engines import Address

_NO_PASSWORD = (
    "TensorFlow's server asks for no password and encrypts nothing: whoever reaches it can run "
    "computations with the rights of this process, and read and write its files."
)


def serve(bind: str = "127.0.0.1:2222", *, virtual_devices: int = 1) -> None:
    """Serves this machine's devices to a process that calls `connect`, until it is interrupted.

    TensorFlow's server asks for no password and encrypts nothing: whoever reaches it can run
    computations with the rights of this process, and read and write its files. Unless told
    otherwise only processes of this machine reach it.

    Args:
        bind: `"host:port"`, an address of this machine, to be reached by that address only; or
            `"0.0.0.0:port"` for all its addresses.
        virtual_devices: how many CPU devices to make of its processor.

    Raises:
        ValueError: if an argument is not of the form that it must have.
        ClusterError: if the address is not this machine's, or the port is taken, or this system
            can't close the server's port to other addresses.
        RuntimeError: on a Keras backend other than TensorFlow.

    Example:
        >>> serve("2222")
        Traceback (most recent call last):
        ValueError: `bind` must have the form 'HOST:PORT': a host's name or IPv4 address, and a \
port from 1 to 65535. Received: '2222'. Write 'gpu7:2222', say.
    """
    is_count = isinstance(virtual_devices, int) and not isinstance(virtual_devices, bool)
    if not is_count or virtual_devices < 1:
        raise ValueError(
            "`virtual_devices` must be a positive integer. "
            f"Received: virtual_devices={virtual_devices!r}. Give 1 or more."
        )
    address = find_address("bind", bind)
    devices = engines.current().remote.serve(address, virtual_devices)
    print(_who_reaches(address))
    print(f"Serving {', '.join(devices)} at {address.name}. Ctrl-C ends it.", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()


def _who_reaches(address: Address) -> str:
    """In plain words: who can use the server, and what that means."""
    if address.ip.startswith("127."):
        return (
            "Only processes of this machine reach it. From another machine, use an SSH tunnel, or "
            "bind to an address of a private network."
        )
    where = "any address of this machine" if address.ip == "0.0.0.0" else address.ip
    return (
        f"Every machine that reaches {where} can use it. {_NO_PASSWORD} Let nobody but your own "
        f"machines reach the port {address.port}: use a private network, or a firewall."
    )
