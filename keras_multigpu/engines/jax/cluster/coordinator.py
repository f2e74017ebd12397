"""What is at the address where processes come together: nothing yet, JAX, or something else."""

from __future__ import annotations

import socket
import time

from keras_multigpu.engines.errors import ClusterError
from keras_multigpu.engines.remote import Address

# The first bytes of HTTP/2 from a client, and the kind of frame with which a server answers.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = b"\x04"


def check_port(address: Address) -> None:
    """Refuses an address on which this process can't serve."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.ip, address.port))
        except OSError as error:
            raise ClusterError(
                address.name,
                f"Process 0 can't listen there ({error.strerror}).",
                "Give an address of the host of process 0, with a port that nothing else uses.",
            ) from error


def await_answer(address: Address, until: float) -> None:
    """Waits until a server of the protocol that JAX's coordinator speaks answers there."""
    reason = ""
    while time.monotonic() < until:
        try:
            with socket.create_connection((address.ip, address.port), timeout=2.0) as probe:
                probe.sendall(_GREETING)
                answer = probe.recv(9)
            if answer[3:4] == _SETTINGS:
                return
            reason = "something else than a coordinator answers there"
        except OSError as error:
            reason = str(error)
        time.sleep(0.1)
    raise not_together(address, reason)


def not_together(address: Address, reason: str) -> ClusterError:
    """The error of processes that have not come together.

    Args:
        address: where they were to do so.
        reason: what is known of why.
    """
    return ClusterError(
        address.name,
        f"The processes did not come together there in time ({reason}).",
        "Start all processes with the same `coordinator`, an address of the host of process 0 "
        "that the others reach, and the same `num_processes`; and each with a `process_id` of "
        "its own.",
    )
