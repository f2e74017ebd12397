"""Checks that the connections that carry tensors still work."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.cluster.remote import Address
from keras_multigpu.engines.tensorflow.cluster.sockets import bytes_moved, end_connections

_LONGEST = 3.0  # times the patience with a silent link: how long this process may be too busy
_WHILE_ASKING = 16384  # more bytes than a worker's answer to one `GetStatus`


class Link:
    """A thread that sends a number to a worker and back on the connections that training uses.

    `GetStatus` uses a separate connection, so its answers say nothing about the connections that
    carry tensors: a firewall may have dropped one of them.

    Args:
        worker: the worker.
        own_port: the port of this process to which it connects.
        pause: seconds between two numbers.
        round_trip: sends a number to the worker and back.
        compute_here: computes something in this process only.
    """

    def __init__(
        self,
        worker: Address,
        own_port: int,
        pause: float,
        round_trip: Callable[[], Any],
        compute_here: Callable[[], Any],
    ):
        self.stopped = threading.Event()
        self._worker, self._own_port, self._compute_here = worker, own_port, compute_here
        self._begun: float | None = None
        self._moved, self._moved_at = 0, 0.0
        self._thread = threading.Thread(target=self._run, args=(round_trip, pause), daemon=True)
        self._thread.start()

    def is_silent(self, seconds: float) -> bool:
        """Whether nothing has come through for some seconds; call it at short intervals."""
        if self._silence() < seconds:
            return False
        # A number also waits while this process is too busy to compute. Then this call waits as
        # well, and gives the number time to come back afterwards. Not for ever: TensorFlow computes
        # nothing here while it waits for a lost machine to remove a function.
        here = threading.Thread(target=self._compute_here, daemon=True)
        here.start()
        here.join(_LONGEST * seconds)
        return not self.stopped.wait(seconds / 10) and self._silence() > seconds

    def stop(self, until: float) -> None:
        """Stops; a number on its way may come back until then."""
        self.stopped.set()
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            end_connections(self._worker.ip, self._worker.port)
            self._thread.join(1.0)

    def _silence(self) -> float:
        # A number may wait long behind a large tensor on a slow link: bytes that move count too.
        begun, now = self._begun, time.monotonic()
        moved = bytes_moved(self._worker.ip, self._worker.port, self._own_port)
        if moved - self._moved > _WHILE_ASKING:
            self._moved_at = now
        self._moved = moved
        return 0.0 if begun is None else now - max(begun, self._moved_at)

    def _run(self, round_trip: Callable[[], Any], pause: float) -> None:
        while not self.stopped.wait(pause):
            self._begun = time.monotonic()
            with contextlib.suppress(tf.errors.OpError):  # `Guard` finds out what has happened
                round_trip()
            self._begun = None
