"""When the steps of a `fit` end: what a step takes, apart from what an epoch takes besides."""

from __future__ import annotations

import time
from typing import Any

import keras


class Stopwatch(keras.callbacks.Callback):
    """Times the epochs and the steps of a `fit`.

    The first step of an epoch also waits for the data to be set up, so it belongs to what an
    epoch takes besides its steps. The time ends with the last epoch: when `fit` is over,
    TensorFlow may sleep for seconds before it puts a pipeline of data away.

    Args:
        every: wait for the result of every step, and not only for the first one of an epoch.

    Attributes:
        seconds: from the start of the first epoch to the end of the last.
        batches: how many batches were trained on.
        each: the seconds of each step but the first ones of the epochs; only with `every`.
        cpu: the processor's seconds in each of these steps, all threads together.
    """

    def __init__(self, *, every: bool = False):
        super().__init__()
        self.seconds = 0.0
        self.batches = 0
        self.each: list[float] = []
        self.cpu: list[float] = []
        self._every = every
        self._begin = self._end = self._end_cpu = self._first_end = 0.0
        self._in_epoch = self._first = 0  # batches so far
        self._timed_s, self._timed = 0.0, 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts the clock."""
        self._begin = time.perf_counter()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts to count batches."""
        self._in_epoch = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes when a batch ends."""
        before, self._in_epoch = self._in_epoch, batch + 1  # more than one: steps_per_execution
        is_first = before == 0
        if is_first or self._every:
            keras.tree.map_structure(keras.ops.convert_to_numpy, logs)  # waits for them
        now, cpu = time.perf_counter(), time.process_time()
        if is_first:
            self._first, self._first_end = self._in_epoch, now
        elif self._every:
            self.each.append((now - self._end) / (self._in_epoch - before))
            self.cpu.append((cpu - self._end_cpu) / (self._in_epoch - before))
        self._end, self._end_cpu = now, cpu

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds up the steps of the epoch."""
        # The logs are numbers by now: what was computed for them is done.
        now = time.perf_counter()
        self.seconds = now - self._begin
        if known := (self.params or {}).get("steps"):  # the last execution may have fewer steps
            self._in_epoch = min(self._in_epoch, known)
        self.batches += self._in_epoch
        if self._in_epoch > self._first:
            self._timed += self._in_epoch - self._first
            self._timed_s += now - self._first_end

    @property
    def step_seconds(self) -> float | None:
        """The mean time of a step after the first of an epoch; `None` if there was none."""
        return self._timed_s / self._timed if self._timed else None
