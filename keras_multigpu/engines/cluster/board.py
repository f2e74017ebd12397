"""How joined processes tell each other what happens, besides the backend: texts by key.

Process 0 keeps the connections on which the others came, and passes on what each of them writes.
Messages are lines of JSON: an entry's key and its value, or the number of a process that is alive
(`beat`) or has gone (`gone`).
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

BEAT = 1.0
"""Seconds between two signs of life."""


class Board:
    """A board that all processes write to and read, as one of them sees it.

    Args:
        number: the number of this process.
        connections: in process 0 those to all others, in the others the one to process 0.
    """

    def __init__(self, number: int, connections: dict[int, socket.socket]):
        self._number, self._connections = number, connections
        self._entries: dict[str, str] = {}
        self._begun = time.monotonic()
        self._heard: dict[int, float] = {}
        self._gone: set[int] = set()
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._stopped = threading.Event()
        for peer, connection in connections.items():
            connection.settimeout(None)
            threading.Thread(target=self._listen, args=(peer, connection), daemon=True).start()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def write(self, key: str, value: str | None) -> None:
        """Writes an entry, or deletes it if it is `None`."""
        message = {"key": key, "value": value}
        self._note(message)
        self._send(message)

    def read(self, prefix: str, seconds: float = 0.0) -> dict[str, str]:
        """The entries whose keys start with a prefix, which is removed from the keys.

        With `seconds`, it first waits up to that long for news.
        """
        with self._changed:
            if seconds:
                self._changed.wait(seconds)
            return under(self._entries, prefix)

    def silence(self, number: int) -> float:
        """Seconds since the last sign of life of a process; endless if its connection ended."""
        with self._changed:
            if number in self._gone:
                return math.inf
            is_passed_on = 0 not in (self._number, number)  # by process 0, which may be silent
            now = self._heard.get(0, self._begun) if is_passed_on else time.monotonic()
            return now - self._heard.get(number, self._begun)

    def stop(self, seconds: float) -> None:
        """Ends the signs of life. The connections end with the process, and tell that it has."""
        self._stopped.set()
        self._thread.join(seconds)

    def _beat(self) -> None:
        latest = time.monotonic()
        while not self._stopped.wait(BEAT / 2):
            self._send({"beat": self._number})
            now = time.monotonic()
            if now - latest > 3 * BEAT:  # this process itself was suspended
                with self._changed:
                    self._begun = now
                    self._heard = dict.fromkeys(self._heard, now)
            latest = now

    def _listen(self, peer: int, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as lines:
            for line in lines:
                self._note(json.loads(line), peer)
        self._note({"gone": peer}, peer)

    def _note(self, message: dict[str, Any], peer: int | None = None) -> None:
        """Notes a message, of this process or of a peer; process 0 passes it on."""
        with self._changed:
            if peer is not None:
                self._heard[peer] = time.monotonic()
            if "beat" in message:
                self._heard[message["beat"]] = time.monotonic()
            elif "gone" in message:
                self._gone.add(message["gone"])
            elif message["value"] is None:
                self._entries.pop(message["key"], None)
            else:
                self._entries[message["key"]] = message["value"]
            self._changed.notify_all()
        if peer is not None and self._number == 0:
            self._send(message, peer)

    def _send(self, message: dict[str, Any], source: int | None = None) -> None:
        """Sends a message to all peers but its source."""
        line = json.dumps(message).encode() + b"\n"
        with self._sending:
            for peer, connection in self._connections.items():
                if peer != source:
                    with contextlib.suppress(OSError):  # its thread notes that it has gone
                        connection.sendall(line)


def under(entries: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The entries whose keys start with a prefix, which is removed from the keys."""
    return {
        key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)
    }
