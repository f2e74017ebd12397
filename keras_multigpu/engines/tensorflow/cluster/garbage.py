"""Garbage collection while other machines are in use."""

from __future__ import annotations

import gc
import threading
import time

_PAUSE = 0.1  # seconds
_BETWEEN_FULL = 60.0  # seconds: a full collection looks through everything that was imported


class Collector:
    """Collects garbage in a thread of its own, and in no other.

    Python collects garbage in whichever thread happens to make an object. Garbage may contain
    TensorFlow's functions, which are then removed from every machine; for one that is cut off,
    this waits until its connection ends. A thread that has to notice this must not be the one that
    waits.
    """

    def __init__(self) -> None:
        self._was_enabled, self._stopped = gc.isenabled(), threading.Event()
        gc.disable()
        if self._was_enabled:
            threading.Thread(target=_collect, args=(self._stopped,), daemon=True).start()

    def stop(self) -> None:
        """Leaves the collection to all threads again."""
        self._stopped.set()
        if self._was_enabled:
            gc.enable()


def _collect(stopped: threading.Event) -> None:
    latest = time.monotonic()
    while not stopped.wait(_PAUSE):
        due = [
            generation
            for generation, (count, most) in enumerate(zip(gc.get_count(), gc.get_threshold()))
            if 0 < most < count
        ]
        if 2 in due and time.monotonic() - latest > _BETWEEN_FULL:
            gc.collect()
            latest = time.monotonic()
        elif due:
            gc.collect(min(due[-1], 1))
