"""What processes tell each other, on a board that JAX's coordination service keeps.

It is what JAX has for this: a store of texts by key in the process with number 0.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import jax

_ROOT = "keras_multigpu/"
_BEATS = "beats/"
BEAT = 1.0
"""The seconds from one sign of life to the next."""


class Board:
    """A board on which each process writes, and which all of them read.

    A thread of its own talks to the service, for its calls may never return. It also leaves a
    sign of life each second.

    Args:
        client: JAX's client of the coordination service.
        number: this process's number.
    """

    def __init__(self, client: Any, number: int):
        self._client = client
        self._beats = f"{_BEATS}{number}"
        self._outbox: dict[str, str | None] = {}
        self._entries: dict[str, str] = {}
        self._heard: dict[str, float] = {}
        self._latest = time.monotonic()
        self._changed = threading.Condition()
        self._wanted = threading.Event()
        threading.Thread(target=self._run, name="keras_multigpu_board", daemon=True).start()

    def write(self, key: str, value: str | None) -> None:
        """Has an entry written soon, or taken away where it is `None`."""
        with self._changed:
            self._outbox[key] = value
        self._wanted.set()

    def read(self, prefix: str, seconds: float = 0.0) -> dict[str, str]:
        """The entries whose keys begin with a prefix, by the rest of their keys.

        Args:
            prefix: how the keys begin.
            seconds: how long to wait for news at most.
        """
        with self._changed:
            if seconds:
                self._wanted.set()
                self._changed.wait(seconds)
            return {
                key.removeprefix(prefix): value
                for key, value in self._entries.items()
                if key.startswith(prefix)
            }

    def silence(self, number: int) -> float:
        """For how many seconds a process has given no sign of life."""
        with self._changed:
            return self._latest - self._heard.get(f"{_BEATS}{number}", self._latest)

    def service_silence(self) -> float:
        """For how many seconds the service has not answered."""
        return time.monotonic() - self._latest

    def _run(self) -> None:
        beat = 0
        while True:
            beat += 1
            with self._changed:
                outbox, self._outbox = self._outbox, {}
            try:
                entries = self._exchange({**outbox, self._beats: str(beat)})
            except jax.errors.JaxRuntimeError:
                with self._changed:  # the silence of the service tells
                    self._outbox = {**outbox, **self._outbox}
                time.sleep(BEAT)
                continue
            with self._changed:
                self._latest = time.monotonic()
                for key, value in entries.items():
                    if value != self._entries.get(key):
                        self._heard[key] = self._latest
                self._entries = entries
                self._changed.notify_all()
            self._wanted.wait(BEAT)
            self._wanted.clear()
            time.sleep(0.005)  # what is written together goes together

    def _exchange(self, outbox: dict[str, str | None]) -> dict[str, str]:
        for key, value in outbox.items():
            if value is None:
                self._client.key_value_delete(_ROOT + key)
            else:
                self._client.key_value_set(_ROOT + key, value, allow_overwrite=True)
        found = self._client.key_value_dir_get(_ROOT)
        return {key[key.index(_ROOT) + len(_ROOT) :]: value for key, value in found}
