"""Times training steps: on one device, and on several where they are here."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu import engines
from keras_multigpu.modes import ParallelModel
from keras_multigpu.parallel import make_parallel
from keras_multigpu.reports.prediction import StepTime
from keras_multigpu.reports.state import Snapshot, build_optimizer, random_state_kept, state_of

ROUNDS = 3
_WARM_UP = 3  # steps; the first one traces and compiles
_LONG_ENOUGH_S = 0.15  # short steps are repeated until a round takes this long
_MOST_STEPS = 100
_MOST_BYTES = 64 * 2**20  # of the batches that are in memory for an epoch


class Stopwatch(keras.callbacks.Callback):
    """Times the epochs and the steps of a `fit`.

    The first step of an epoch also waits for the data to be set up, so it counts as part of the
    epoch's own time. The clock stops at the end of the last epoch: TensorFlow may take seconds
    after that to take down a data pipeline.

    With `every`, it waits for the result of every step, and not only of an epoch's first one.
    `seconds` and `batches` are those of the whole `fit`; `each` and `cpu` hold, with `every`, the
    wall time and the processor time of each step except the first of each epoch.
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
        before, self._in_epoch = self._in_epoch, batch + 1  # steps_per_execution: several at once
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
        now = time.perf_counter()  # the logs are numbers by now, so the steps are done
        self.seconds = now - self._begin
        if known := (self.params or {}).get("steps"):  # the last execution may have fewer steps
            self._in_epoch = min(self._in_epoch, known)
        self.batches += self._in_epoch
        if self._in_epoch > self._first:
            self._timed += self._in_epoch - self._first
            self._timed_s += now - self._first_end

    @property
    def step_seconds(self) -> float | None:
        """The mean time of the steps after the first of an epoch; `None` if there were none."""
        return self._timed_s / self._timed if self._timed else None


@dataclasses.dataclass(frozen=True)
class Timing:
    """The median step of each round: in wall time, and in processor time of all threads."""

    rounds: tuple[float, ...]
    cpu_rounds: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.rounds)

    @property
    def cpu_seconds(self) -> float:
        """The median processor time over the rounds."""
        return statistics.median(self.cpu_rounds)


@dataclasses.dataclass(frozen=True)
class Measured:
    """The timed steps of a model.

    `times` are those on the whole batch (of `rows`), by mode and number of devices; `small` those
    on `fewer` rows on one device, `None` if these are as many.
    """

    rows: int
    fewer: int
    times: Mapping[tuple[str, int], Timing]
    small: Timing | None

    @property
    def step(self) -> StepTime:
        """The time of a step on one device, by the rows."""
        whole = self.times["data", 1].seconds
        if self.small is None:
            return StepTime(0.0, whole / self.rows)
        return StepTime.through(self.rows, whole, self.fewer, self.small.seconds)

    @property
    def cores(self) -> float:
        """The processor cores that one device keeps busy."""
        alone = self.times["data", 1]
        return alone.cpu_seconds / alone.seconds


def take_rows(arrays: Any, rows: int) -> Any:
    """The first rows of arrays in any structure; `None` stays `None`."""
    if arrays is None:
        return None
    return keras.tree.map_structure(lambda part: part[:rows], arrays)


def measure_steps(
    model: keras.Model,
    batch: tuple[Any, Any],
    sizes: tuple[int, int],
    steps: int,
    here: Mapping[str, Sequence[int]],
    placement: Any = None,
) -> Measured:
    """Times the steps of a built model, and restores its state.

    The batch is a pair of inputs and targets (or `None`). `sizes` are the rows of the whole batch
    and of a smaller one, which shows how much of a step depends on the rows. `steps` is the least
    number of steps to time. `here` has, by mode, the numbers of devices above one on which to time
    the whole batch; `placement` is for mode `"model"`.
    """
    rows, fewer = sizes
    whole, part = ((take_rows(batch[0], size), take_rows(batch[1], size)) for size in sizes)
    options = {"committee": {"replicas": "independent"}, "model": {"placement": placement}}

    def train(mode: str, counts: Sequence[int]) -> list[Training]:
        name = "tower" if mode == "committee" else mode
        return [Training(model, one, whole, name, **options.get(mode, {})) for one in counts]

    before, places_kept = Snapshot(state_of(model)), engines.current().places_kept
    with random_state_kept():
        try:
            several = here.get("data", ())
            with places_kept(model):
                small = [Training(model, 1, part)] if fewer < rows else []
                timings = time_in_turn([*train("data", (1, *several)), *small], steps)
            times = {("data", n): one for n, one in zip((1, *several), timings)}
            for mode in [one for one in here if one != "data"]:
                with places_kept(model):
                    # In mode "model" the weights move back to one device for its turn.
                    alone = Training(model, 1, whole, "model" if mode == "model" else "data")
                    found = time_in_turn([alone, *train(mode, here[mode])], steps)
                times |= {(mode, n): one for n, one in zip((1, *here[mode]), found)}
        finally:
            before.restore()
    return Measured(rows, fewer, times, timings[-1] if small else None)


def time_in_turn(trainings: Sequence[Training], steps: int) -> list[Timing]:
    """Times at least `steps` steps of each training, in turn: other work slows all down alike."""
    counts = [one.warm_up(-(-steps // ROUNDS)) for one in trainings]
    found = [[one.time(count) for one, count in zip(trainings, counts)] for _ in range(ROUNDS)]
    return [Timing(*(tuple(part) for part in zip(*rounds))) for rounds in zip(*found)]


def compile_for(parallel: ParallelModel, batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """Makes a parallel model ready to be trained on inputs and targets; returns these.

    Without targets: towards zeros by the mean squared error.
    """
    inputs, targets = batch
    if targets is not None:
        return batch
    parallel.compile(
        optimizer=parallel.optimizer if parallel.compiled else "adam",
        loss="mse",
        jit_compile=parallel.jit_compile if parallel.compiled else "auto",
    )
    outputs = keras.tree.map_structure(keras.ops.convert_to_numpy, parallel.template(inputs))
    return inputs, keras.tree.map_structure(np.zeros_like, outputs)


class Training:
    """A parallel model that can be trained on one batch again and again.

    Without targets it is trained towards zeros by the mean squared error, with the model's own
    optimizer, or Adam; the cost of the model's own loss is left out then.
    """

    def __init__(
        self,
        model: keras.Model,
        devices: int,
        batch: tuple[Any, Any],
        mode: Any = "data",
        **options: Any,
    ):
        self._model = parallel = make_parallel(model, devices, mode, **options)
        self._batch = compile_for(parallel, batch)
        parallel._parallel_place()
        build_optimizer(parallel)
        # Copies: on JAX a step takes over the arrays that it is given.
        self._start = Snapshot(state_of(parallel))
        arrays = keras.tree.flatten(self._batch)
        self._rows = len(arrays[0])
        size = sum(np.asarray(part).nbytes for part in arrays)
        self._most = max(2, _MOST_BYTES // max(size, 1))  # batches in memory

    def warm_up(self, least: int) -> int:
        """Traces and compiles; returns how many steps a round takes, `least` or more."""
        self.time(_WARM_UP)
        step, _ = self.time(_WARM_UP)
        return max(least, min(round(_LONG_ENOUGH_S / step), _MOST_STEPS))

    def time(self, steps: int) -> tuple[float, float]:
        """The median step in seconds, and the processor's seconds in the median step."""
        self._model._parallel_place()
        self._start.restore()
        batches = min(steps + 1, self._most)  # the first of an epoch is not timed
        x, y = keras.tree.map_structure(
            lambda part: np.concatenate([keras.ops.convert_to_numpy(part)] * batches), self._batch
        )
        watch = Stopwatch(every=True)
        self._model.fit(
            x, y, batch_size=self._rows, epochs=-(-steps // (batches - 1)), shuffle=False,
            callbacks=[watch], verbose=0,
        )  # fmt: skip
        return statistics.median(watch.each), statistics.median(watch.cpu)
