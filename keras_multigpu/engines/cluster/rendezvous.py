"""The meeting of processes before a training: each learns who the others are.

Process 0 listens at an address until all others have come. Then the address is free again: the
backend's own service can listen there. Messages are lines of JSON. A process comes with a record, a
dict of texts: "host", "pid", and facts that must be equal in all processes.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Sequence
from typing import Any

from keras_multigpu.engines.cluster.errors import ClusterError
from keras_multigpu.engines.cluster.remote import Address, listening

Record = dict[str, str]
Connections = dict[int, socket.socket]  # by process
# Process 0 says this first: another service at that address doesn't.
_GREETING = b"keras_multigpu\n"
_LONGEST = 10_000  # bytes of a record: nobody can fill the memory of process 0
_PATIENCE = 2.0  # seconds for the greeting and for a record


def meet(
    address: Address, number: int, count: int, mine: Record, equal: Sequence[str], until: float
) -> tuple[list[Record], Connections]:
    """Waits until all `count` processes are there.

    `equal` names the facts in which all must agree; `until` is a time of `time.monotonic`.

    Returns:
        The records of all in order; the connections to all others, or only to process 0.

    Raises:
        ClusterError: if a process is absent until then, differs, or has another one's number.
    """
    if number:
        return _visit(address, {**mine, "process_id": str(number)}, until)
    with listening(address, cure=" Only one process has `process_id=0`.") as server:
        return _Host(address, count, mine, equal).receive(server, until)


def not_joined(address: Address, reason: str) -> ClusterError:
    """The error for processes that did not all join in time."""
    return ClusterError(
        address.name,
        f"Not all processes joined there in time ({reason}).",
        "Start all processes with the same `coordinator`, an address of the host of process 0 "
        "that the others reach, with the same `num_processes`, and each with a different "
        "`process_id`.",
    )


def _visit(address: Address, mine: Record, until: float) -> tuple[list[Record], Connections]:
    """Tries to reach process 0 until it answers."""
    reason = "nobody answers"
    while (left := until - time.monotonic()) > 0:
        try:
            place = (address.ip, address.port)
            with socket.create_connection(place, min(left, _PATIENCE)) as connection:
                answer = _ask(connection, mine, left)
                kept = connection.dup()
        except OSError as error:
            reason = str(error)
            time.sleep(0.1)
            continue
        if "error" in answer:
            kept.close()
            raise ClusterError(*answer["error"])
        return answer["records"], {0: kept}
    raise not_joined(address, reason)


def _ask(connection: socket.socket, mine: Record, seconds: float) -> dict[str, Any]:
    with connection.makefile("rb", buffering=0) as lines:  # it reads no more than its line
        if lines.readline(len(_GREETING)) != _GREETING:
            raise ConnectionError("there is another program, or a training that has begun")
        _send(connection, mine)
        connection.settimeout(seconds)
        answer = lines.readline()
    if not answer.endswith(b"\n"):
        raise ConnectionError("process 0 has left")
    return json.loads(answer)


class _Host:
    """Process 0, which waits for the others."""

    def __init__(self, address: Address, count: int, mine: Record, equal: Sequence[str]):
        self._address, self._count, self._mine, self._equal = address, count, mine, equal
        self._visitors: dict[int, tuple[Record, socket.socket]] = {}

    def receive(self, server: socket.socket, until: float) -> tuple[list[Record], Connections]:
        """Waits for all; each gets the records of all, or the error that this one raises."""
        with contextlib.ExitStack() as connections:
            try:
                while absent := {*range(1, self._count)} - self._present().keys():
                    if (left := until - time.monotonic()) <= 0:
                        reason = f"absent: process {', '.join(map(str, sorted(absent)))}"
                        raise not_joined(self._address, reason)
                    server.settimeout(left)
                    with contextlib.suppress(TimeoutError):
                        self._admit(connections.enter_context(server.accept()[0]))
            except ClusterError as error:
                self._tell_all(_told(error))
                raise
            records = [self._mine, *(self._visitors[k][0] for k in range(1, self._count))]
            kept = {number: one.dup() for number, (_, one) in self._visitors.items()}
            self._tell_all({"records": records})
            return records, kept

    def _present(self) -> dict[int, tuple[Record, socket.socket]]:
        """Those who are here, by number. Who has left can come again."""
        self._visitors = {
            number: (record, connection)
            for number, (record, connection) in self._visitors.items()
            if not select.select([connection], [], [], 0)[0]  # it sends nothing while it waits
        }
        return self._visitors

    def _admit(self, connection: socket.socket) -> None:
        """Adds a process to the visitors; raises a `ClusterError` if it differs from this one."""
        record = _read_record(connection)
        if record is None:
            connection.close()
            return
        number = int(record["process_id"])
        if number in self._present():
            _send(connection, _told(self._in_use(number)))
            return
        self._visitors[number] = record, connection  # before the check: it is told of the error
        for fact in self._equal:
            if record.get(fact) != self._mine[fact]:
                raise ClusterError(
                    f"{record['host']} (process {number}, pid {record['pid']})",
                    f"It has {fact} {record.get(fact)}, and process 0 on {self._mine['host']} has "
                    f"{self._mine[fact]}.",
                    "Make them equal, and start all processes again.",
                )

    def _in_use(self, number: int) -> ClusterError:
        known = self._visitors[number][0]
        return ClusterError(
            self._address.name,
            f"Another process has joined as process {number}: pid {known['pid']} on "
            f"{known['host']}.",
            "Give each process a different `process_id`.",
        )

    def _tell_all(self, message: dict[str, Any]) -> None:
        for _, connection in self._visitors.values():
            _send(connection, message)


def _told(error: ClusterError) -> dict[str, Any]:
    return {"error": [error.host, error.problem, error.cure]}


def _read_record(connection: socket.socket) -> Record | None:
    """What a process tells of itself; `None` if it is not one of ours."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        record = json.loads(_read_line(connection, time.monotonic() + _PATIENCE))
        if isinstance(record, dict) and {"host", "pid", "process_id"} <= record.keys():
            record = {key: str(value) for key, value in record.items()}
            int(record["process_id"])
            return record
    return None


def _read_line(connection: socket.socket, until: float) -> bytes:
    """Greets, and reads a line; it has to be there in time as a whole."""
    connection.settimeout(_PATIENCE)
    connection.sendall(_GREETING)
    line = b""
    while not line.endswith(b"\n") and len(line) < _LONGEST:
        connection.settimeout(max(0.001, until - time.monotonic()))
        received = connection.recv(_LONGEST)
        if not received:
            raise ConnectionError
        line += received
    return line


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends a line, unless the other side has gone: it comes again, or is found to be absent."""
    with contextlib.suppress(OSError):
        connection.settimeout(_PATIENCE)
        connection.sendall(json.dumps(message).encode() + b"\n")
