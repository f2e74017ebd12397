"""Times training steps: on one device, and on several where they are here."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu import engines
from keras_multigpu.modes import ParallelModel
from keras_multigpu.parallel import make_parallel
from keras_multigpu.reports.inputs import map_arrays, needs_targets, take_rows
from keras_multigpu.reports.models import Snapshot, build_optimizer, model_kept
from keras_multigpu.reports.workload import StepTime

ROUNDS = 5
_WARM_UP = 3  # steps; the first one traces and compiles
_LONG_ENOUGH_S = 0.15  # short steps are repeated until a round takes this long
_MOST_STEPS = 100
_STEADY = 1.1  # by as much may the rounds that are kept differ
_PATIENCE = 10  # while they differ more: rounds that are long enough, or as much time
_MOST_BYTES = 64 * 2**20  # of the batches that are in memory for an epoch


class Stopwatch(keras.callbacks.Callback):
    """Times the epochs and the steps of a `fit`.

    A step is all that `fit` does for a batch: Keras's loop and the batch's way to the device, too.
    The first one of an epoch also waits for the data to be set up, so it counts as part of the
    epoch's own time. The clock stops at the end of the last epoch: TensorFlow may take seconds
    after that to take down a data pipeline.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.batches, self.epochs = 0.0, 0, 0  # of the whole `fit`
        self.loss: float | None = None  # of the last epoch
        self._timed = np.zeros(3)  # steps after the first of an epoch, and both clocks

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts the clock."""
        self._begin = time.perf_counter()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts to count batches."""
        self._first, self._done = np.zeros(3), 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes when a batch ends; with `steps_per_execution`, several at once."""
        if not self._done:
            keras.tree.map_structure(keras.ops.convert_to_numpy, logs)  # waits for them
            self._first = np.array([batch + 1, time.perf_counter(), time.process_time()])
        self._done = batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds up the steps of the epoch; the logs are numbers, so they are done."""
        # The last execution may have fewer steps.
        done = min(self._done, (self.params or {}).get("steps") or self._done)
        now = np.array([done, time.perf_counter(), time.process_time()])
        self.seconds = now[1] - self._begin
        self.batches, self.epochs = self.batches + done, epoch + 1
        self.loss = (logs or {}).get("loss")
        if done > self._first[0]:
            self._timed += now - self._first

    @property
    def step_seconds(self) -> float | None:
        """The mean time of the steps after the first of an epoch; `None` if there were none."""
        return float(self._timed[1] / self._timed[0]) if self._timed[0] else None

    @property
    def step_cpu_seconds(self) -> float | None:
        """The processor's seconds in such a step, of all threads; `None` if there were none."""
        return float(self._timed[2] / self._timed[0]) if self._timed[0] else None


@dataclasses.dataclass(frozen=True)
class Timing:
    """The mean step of each round: in wall time, and in processor time of all threads."""

    rounds: tuple[float, ...]
    cpu_rounds: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.rounds)

    @property
    def is_steady(self) -> bool:
        """Whether the rounds hardly differ."""
        return max(self.rounds) <= _STEADY * min(self.rounds)

    @property
    def cpu_seconds(self) -> float:
        """The median of the processor's seconds."""
        return statistics.median(self.cpu_rounds)


@dataclasses.dataclass(frozen=True)
class Measured:
    """The timed steps of a model."""

    rows: int  # of the whole batch
    fewer: int  # on which one device was timed too, if these are not as many
    times: Mapping[tuple[str, int, int], Timing]  # by mode, number of devices and rows

    @property
    def alone(self) -> Timing:
        """The steps on the whole batch, on one device."""
        return self.times["data", 1, self.rows]

    @property
    def step(self) -> StepTime:
        """The time of a step on one device, by the rows."""
        whole = self.alone.seconds
        if self.fewer == self.rows:
            return StepTime(0.0, whole / self.rows)
        small = self.times["data", 1, self.fewer].seconds
        return StepTime.through(self.rows, whole, self.fewer, small)

    @property
    def spread(self) -> list[float]:
        """How far off `step` may be: its rounds by their median, on as many rows, and the inverse.

        A speed-up divides one time by another: either may be too long.
        """
        timings = [self.times["data", 1, rows] for rows in {self.rows, self.fewer}]
        ratios = [one / timing.seconds for timing in timings for one in timing.rounds]
        return [*ratios, *(1 / one for one in ratios)]

    @property
    def cores(self) -> float:
        """The processor cores that one device keeps busy."""
        return self.alone.cpu_seconds / self.alone.seconds


def measure_steps(
    model: keras.Model,
    batch: tuple[Any, Any],  # inputs and targets, as for `compile_for`
    sizes: tuple[int, int],  # the rows of the batch, and fewer: how much depends on the rows?
    steps: int,  # the least number of steps to time
    here: Mapping[str, Sequence[int]],  # by mode, numbers of devices above one for the whole batch
    placement: Any = None,  # in mode "model"
) -> Measured:
    """Times the steps of a built model, and restores its state."""
    rows, fewer = sizes
    options = {"committee": {"replicas": "independent"}, "model": {"placement": placement}}

    def train(mode: str, devices: int, rows: int) -> Steps:
        # A placement names further devices, so that one device has none.
        own = options.get(mode, {}) if devices > 1 else {}
        name: Any = "tower" if mode == "committee" else mode
        return Steps(make_parallel(model, devices, name, **own), take_rows(batch, rows))

    times: dict[tuple[str, int, int], Timing] = {}
    with model_kept(model):
        # One device is timed once, and again beside what else is timed of a mode.
        for mode in dict.fromkeys(("data", *(one for one in here if here[one]))):
            # In mode "model" the weights move back to one device for its turn.
            asked = [("model" if mode == "model" else "data", 1, rows)]
            asked += [(mode, count, rows) for count in here.get(mode, ())]
            asked += [("data", 1, fewer)] if mode == "data" and fewer < rows else []
            with engines.current().places_kept(model):
                found = _time_in_turn([train(*one) for one in asked], -(-steps // ROUNDS))
            times |= {(mode, *one[1:]): timing for one, timing in zip(asked, found)}
    return Measured(rows, fewer, times)


def _time_in_turn(several: Sequence[Steps], least: int) -> list[Timing]:
    """Times steps in turn, for other work slows all down alike, and keeps the fastest rounds.

    Other programs make rounds longer, never shorter. If those kept differ, more are timed.
    """
    counts = [one.warm_up(least) for one in several]
    rounds: list[list[tuple[float, float]]] = [[] for _ in several]
    end = time.perf_counter() + _PATIENCE * _LONG_ENOUGH_S * len(several)
    while True:
        for own, one, count in zip(rounds, several, counts):
            own.append(one.time(count))
        found = [Timing(*zip(*sorted(own)[:ROUNDS])) for own in rounds]
        is_over = time.perf_counter() > end or all(one.is_steady for one in found)
        if len(rounds[0]) >= ROUNDS and is_over:
            return found


def compile_for(parallel: ParallelModel, batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """Makes a parallel model ready to be trained on inputs and targets; returns these.

    Without targets, a model that is compiled, and whose loss needs none, is trained as it is; other
    models towards zeros by the mean squared error, with their own optimizer, or Adam. The cost of
    their own loss is left out then.
    """
    inputs, targets = batch
    if targets is not None or (parallel.compiled and not needs_targets(parallel)):
        return batch
    own = parallel.optimizer if parallel.compiled else "adam"
    jit_compile = parallel.jit_compile if parallel.compiled else "auto"
    keras.Model.compile(parallel, own, "mse", jit_compile=jit_compile)  # the class may have another
    outputs = keras.tree.map_structure(keras.ops.convert_to_numpy, parallel.template(inputs))
    return inputs, keras.tree.map_structure(np.zeros_like, outputs)


def renew_optimizer(parallel: ParallelModel, parts: int = 1) -> None:
    """Takes a new optimizer without slots, which adds up the gradients of so many parts."""
    # The slots of one that is built are where they were before.
    is_built = isinstance(parallel.optimizer, keras.Optimizer) and parallel.optimizer.built
    if parts == 1 and not is_built:
        return
    optimizer = type(parallel.optimizer).from_config(parallel.optimizer.get_config())
    if parts > 1:
        # An optimizer of one's own may have no such argument; loss scaling hands it on.
        getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps = parts
    # Not `parallel.compile`: the class may have a custom one.
    keras.Model.compile(parallel, optimizer, parallel.loss, jit_compile=parallel.jit_compile)


class Training:
    """A compiled parallel model that is trained again and again from the same state."""

    def __init__(self, parallel: ParallelModel):
        parallel._parallel_place()
        build_optimizer(parallel)
        self.model = parallel
        # Copies: on JAX a step takes over the arrays that it is given.
        self._start = Snapshot(parallel)

    def fit(self, **given: Any) -> Stopwatch:
        """Trains on the rows in order, and times it."""
        self._start.restore()
        watch = Stopwatch()
        self.model.fit(**given, shuffle=False, callbacks=[watch], verbose=0)
        return watch


def _repeat(rows: np.ndarray, times: int) -> Any:
    """The rows, several times; Keras takes texts as tensors only."""
    repeated = np.concatenate([rows] * times)
    return keras.ops.convert_to_tensor(repeated) if repeated.dtype == object else repeated


class Steps:
    """Steps of a parallel model on one batch."""

    def __init__(self, parallel: ParallelModel, batch: tuple[Any, Any]):
        given = compile_for(parallel, batch)
        self._batch = map_arrays(keras.ops.convert_to_numpy, given)
        self._training = Training(parallel)

    def warm_up(self, least: int) -> int:
        """Traces and compiles; returns how many steps a round takes, `least` or more."""
        self.time(_WARM_UP)
        step, _ = self.time(_WARM_UP)
        return max(least, min(round(_LONG_ENOUGH_S / step), _MOST_STEPS))

    def time(self, steps: int) -> tuple[float, float]:
        """The mean step of a `fit` in seconds, and the processor's seconds in it."""
        self._training.model._parallel_place()
        arrays = [one for one in keras.tree.flatten(self._batch) if one is not None]
        most = _MOST_BYTES // max(sum(part.nbytes for part in arrays), 1)  # batches in memory
        first = self._training.model.steps_per_execution  # of an epoch: these are not timed
        batches = max(min(steps + first, most), first + 1)
        epochs = -(-steps // (batches - first))
        x, y = map_arrays(functools.partial(_repeat, times=batches), self._batch)
        watch = self._training.fit(x=x, y=y, batch_size=len(arrays[0]), epochs=epochs)
        assert watch.step_seconds is not None
        assert watch.step_cpu_seconds is not None
        return watch.step_seconds, watch.step_cpu_seconds
