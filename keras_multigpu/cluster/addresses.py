"""Addresses of the form `host:port`, and what they stand for."""

from __future__ import annotations

import re
import socket

from keras_multigpu.engines import Address, ClusterError

_HOST_AND_PORT = re.compile(r"([\w.-]+):(\d{1,5})")


def find_address(argument: str, value: object) -> Address:
    """The address that a text stands for.

    Args:
        argument: the name of the argument, for the error.
        value: what it was given: `"host:port"`.

    Raises:
        ValueError: if it is not of that form.
        ClusterError: if the host's name is not known.
    """
    match = _HOST_AND_PORT.fullmatch(value) if isinstance(value, str) else None
    if match is None or not 0 < int(match[2]) < 65536:
        raise ValueError(
            f"`{argument}` must have the form 'HOST:PORT': a host's name or IPv4 address, and a "
            f"port from 1 to 65535. Received: {value!r}. Write 'gpu7:2222', say."
        )
    host, port = match[1], int(match[2])
    try:
        found = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ClusterError(
            f"{host}:{port}",
            f"The name {host!r} is not known here ({error.strerror}).",
            "Check its spelling, or give the host's IPv4 address.",
        ) from error
    return Address(f"{host}:{port}", str(found[0][4][0]), port)
