"""How processes communicate through JAX's coordination service.

The service runs in process 0 and stores texts by key.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import jax

from keras_multigpu.engines.cluster.board import BEAT, under

_BEATS = "beats/"


class Board:
    """A board that all processes write to and read.

    A separate thread talks to the service, because its calls may never return. The thread also
    writes a sign of life every second. `client` is JAX's client of the service. `of` names the
    training: a process of an earlier one, at the same address, writes nowhere else.
    """

    def __init__(self, client: Any, number: int, of: str = ""):
        self._client = client
        self._root = f"keras_multigpu/{of}/"  # before the keys of all entries
        self._beats = f"{_BEATS}{number}"
        self._outbox: dict[str, str | None] = {}
        self._entries: dict[str, str] = {}
        self._heard: dict[str, float] = {}
        self._begun = self._latest = time.monotonic()
        self._changed = threading.Condition()
        self._wanted = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keras_multigpu_board", daemon=True)
        self._thread.start()

    def write(self, key: str, value: str | None) -> None:
        """Queues an entry to be written, or to be deleted if it is `None`."""
        with self._changed:
            self._outbox[key] = value
        self._wanted.set()

    def read(self, prefix: str, seconds: float = 0.0) -> dict[str, str]:
        """The entries whose keys start with a prefix, which is removed from the keys.

        With `seconds`, it first waits up to that long for news.
        """
        with self._changed:
            if seconds:
                self._wanted.set()
                self._changed.wait(seconds)
            return under(self._entries, prefix)

    def silence(self, number: int) -> float:
        """Seconds since the last sign of life of a process, or since the board was made."""
        with self._changed:
            return self._latest - self._heard.get(f"{_BEATS}{number}", self._begun)

    def service_silence(self) -> float:
        """Seconds since the service last answered."""
        return time.monotonic() - self._latest

    def stop(self, seconds: float) -> None:
        """Stops the thread; waits up to `seconds` for its current call.

        If a thread returns from C++ after Python has ended, Python kills it, and C++ aborts.
        """
        self._stopped.set()
        self._wanted.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        beat = 0
        while not self._stopped.is_set():
            beat += 1
            with self._changed:
                outbox, self._outbox = self._outbox, {}
            try:
                entries = self._exchange({**outbox, self._beats: str(beat)})
            except jax.errors.JaxRuntimeError:
                with self._changed:  # `service_silence` grows; other code checks it
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
            time.sleep(0.005)  # batches entries written together

    def _exchange(self, outbox: dict[str, str | None]) -> dict[str, str]:
        for key, value in outbox.items():
            if value is None:
                self._client.key_value_delete(self._root + key)
            else:
                self._client.key_value_set(self._root + key, value, allow_overwrite=True)
        found = self._client.key_value_dir_get(self._root)
        return {key[key.index(self._root) + len(self._root) :]: value for key, value in found}
