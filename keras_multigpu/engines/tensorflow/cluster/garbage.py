"""No garbage collection in the threads that watch other machines.

Python collects garbage in whichever thread happens to make an object. Garbage may contain
TensorFlow's functions, which are then removed from every machine; for one that is cut off, this
waits until its connection ends. A thread that has to notice this must not be the one that waits.
"""

from __future__ import annotations

import gc
import threading


class NoCollection:
    """Scope in which no thread collects garbage; any number of threads may be in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside, self._was_enabled = 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._was_enabled:
                gc.enable()


NO_COLLECTION = NoCollection()
