"""First contact with JAX's coordination service, which runs in process 0."""

from __future__ import annotations

import json
import re
import socket
import time
from typing import BinaryIO

from keras_multigpu.engines.errors import ClusterError
from keras_multigpu.engines.jax.cluster.board import ROOT
from keras_multigpu.engines.remote import Address

# HTTP/2: what a client sends first, types of frames, and flags.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS = 0, 1, 3, 4
_END_OF_STREAM, _END_OF_HEADERS = 1, 4
_FIELDS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/xla.coordination.CoordinationService/TryGetKeyValue",
    ":authority": "coordinator",
    "content-type": "application/grpc",
    "te": "trailers",
}
_RECORD = re.compile(rb'\{".*?"\}')
_INCARNATION = re.compile(rb"service incarnation: requested 0, currently (\d+)")


def await_coordinator(address: Address, number: int, until: float) -> None:
    """Waits until the service answers; refuses a process number that is in use.

    The service itself would give the number to the latest process, and end the earlier training.
    """
    reason = ""
    while time.monotonic() < until:
        try:
            answer = _look_up(address, f"{ROOT}records/{number}")
        except OSError as error:
            reason = str(error)
            time.sleep(0.1)
            continue
        record = _RECORD.search(answer)
        if record:
            known = json.loads(record[0])
            raise ClusterError(
                address.name,
                f"Another process has joined as process {number}: pid {known['pid']} on "
                f"{known['host']}. It still runs, or has ended and was started again.",
                "Give each process a different `process_id`. After a failure, end all processes, "
                "and start all of them again.",
            )
        return
    raise not_joined(address, reason)


def not_joined(address: Address, reason: str) -> ClusterError:
    """The error for processes that did not all join in time."""
    return ClusterError(
        address.name,
        f"Not all processes joined there in time ({reason}).",
        "Start all processes with the same `coordinator`, an address of the host of process 0 "
        "that the others reach, with the same `num_processes`, and each with a different "
        "`process_id`.",
    )


def _look_up(address: Address, key: str) -> bytes:
    """An answer of the service that contains the value of a key, if there is one.

    JAX can ask only after a process has joined, so this speaks gRPC itself, as of JAX 0.10. Other
    versions of JAX don't understand it: then there is no value.
    """
    answer = _ask(address, key, 0)
    found = _INCARNATION.search(answer)  # the service tells its number after a wrong one only
    return _ask(address, key, int(found[1])) if found else answer


def _ask(address: Address, key: str, incarnation: int) -> bytes:
    # Protocol buffers: fields 1 and 2 are a message, whose field 3 is a number, and a text.
    message = b"\n\t\x19" + incarnation.to_bytes(8, "little") + b"\x12" + _text(key)
    request = (
        _PREFACE
        + _frame(_SETTINGS, 0, 0, b"")
        + _frame(
            _HEADERS,
            _END_OF_HEADERS,
            1,
            b"".join(b"\0" + _text(name) + _text(value) for name, value in _FIELDS.items()),
        )
        + _frame(_DATA, _END_OF_STREAM, 1, b"\0" + len(message).to_bytes(4, "big") + message)
    )
    with socket.create_connection((address.ip, address.port), timeout=2.0) as connection:
        connection.sendall(request)
        with connection.makefile("rb") as answer:
            return _read(answer)


def _read(answer: BinaryIO) -> bytes:
    """The headers and data of an answer."""
    content, is_first, is_over = b"", True, False
    while not is_over:
        head = answer.read(9)
        if len(head) < 9 or (is_first and head[3] != _SETTINGS):
            raise ConnectionError("something else than a coordinator answers there")
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
        payload = answer.read(int.from_bytes(head[:3], "big"))
        content += payload if kind in (_DATA, _HEADERS) else b""
        is_first = False
        is_over = stream == 1 and (kind == _RESET or bool(flags & _END_OF_STREAM))
    return content


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    )


def _text(value: str) -> bytes:
    return bytes([len(value)]) + value.encode()
