"""How long training steps take, timed: on one device, and on several where they are here."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu import engines
from keras_multigpu.parallel import make_parallel
from keras_multigpu.reports.inputs import repeat, take
from keras_multigpu.reports.state import Snapshot, random_state_kept, state_of
from keras_multigpu.reports.timing import Stopwatch
from keras_multigpu.reports.workload import StepTime

ROUNDS = 3
_WARM_UP = 3  # steps, of which the first traces and compiles
_LONG_ENOUGH_S = 0.15  # a round has more steps than asked for, until it takes as long
_MOST_STEPS = 100
_MOST_BYTES = 64 * 2**20  # of the batches that are in memory for an epoch


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of a step, measured in several rounds.

    Attributes:
        rounds: the median step of each round, in seconds.
        cpu_rounds: the processor's time in it, all threads together, which hardly depends on what
            else the machine does.
    """

    rounds: tuple[float, ...]
    cpu_rounds: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median round."""
        return statistics.median(self.rounds)

    @property
    def cpu_seconds(self) -> float:
        """The median processor's time."""
        return statistics.median(self.cpu_rounds)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was timed of a model.

    Attributes:
        rows: of the batch.
        fewer: the rows of a smaller one.
        times: the steps on the whole batch, by mode and number of devices.
        small: the steps on the smaller batch on one device, `None` if it is the same.
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


def measure_steps(
    model: keras.Model,
    batch: tuple[Any, Any],
    sizes: tuple[int, int],
    steps: int,
    here: Mapping[str, Sequence[int]],
    placement: Any = None,
) -> Measured:
    """Times the steps of a model, which is as it was afterwards.

    Args:
        model: a model that is built.
        batch: inputs, and targets or `None`, of at least as many rows as the batch.
        sizes: the rows of the batch, and of a smaller one, to tell apart what depends on the rows.
        steps: how many steps of each to time.
        here: for each mode the numbers of devices, above one, on which to time the whole batch.
        placement: of mode `"model"`.
    """
    rows, fewer = sizes
    whole, part = (_take_rows(batch, size) for size in sizes)

    def trainings(mode: str, counts: Sequence[int]) -> list[Training]:
        name, options = _OPTIONS.get(mode, (mode, {}))
        if mode == "model":
            options = {"placement": placement}
        return [Training(model, count, whole, name, **options) for count in counts]

    before = Snapshot(state_of(model))
    with random_state_kept():
        try:
            with engines.current().places_kept(model):
                small = [Training(model, 1, part)] if fewer < rows else []
                together = [*trainings("data", (1, *here.get("data", ()))), *small]
                timings = time_in_turn(together, steps)
            times = {("data", n): one for n, one in zip((1, *here.get("data", ())), timings)}
            for mode in [one for one in here if one != "data"]:
                with engines.current().places_kept(model):
                    # The weights of mode "model" go back to one device for its turn.
                    alone = Training(model, 1, whole, "model" if mode == "model" else "data")
                    found = time_in_turn([alone, *trainings(mode, here[mode])], steps)
                times |= {(mode, n): one for n, one in zip((1, *here[mode]), found)}
        finally:
            before.restore()
    return Measured(rows, fewer, times, timings[-1] if small else None)


_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "committee": ("tower", {"replicas": "independent"})
}


def time_in_turn(trainings: Sequence[Training], steps: int) -> list[Timing]:
    """Times trainings in turn, so that what else the machine does meets them alike.

    Args:
        trainings: the trainings.
        steps: how many steps of each to time, in all rounds together; short ones are timed more
            often.
    """
    counts = [one.warm_up(-(-steps // ROUNDS)) for one in trainings]
    found = [[one.time(count) for one, count in zip(trainings, counts)] for _ in range(ROUNDS)]
    return [Timing(*(tuple(part) for part in zip(*rounds))) for rounds in zip(*found)]


class Training:
    """Steps of a parallel model on one batch, again and again.

    Without targets the model is trained by its own optimizer (by Adam if it has none) towards
    outputs of zero: what its own loss takes is left out.

    Args:
        model: a model that is built.
        devices: how many devices to use.
        batch: the inputs, and the targets or `None`, with the rows of a batch.
        mode: the mode of `make_parallel`.
        **options: the mode's.
    """

    def __init__(
        self,
        model: keras.Model,
        devices: int,
        batch: tuple[Any, Any],
        mode: str = "data",
        **options: Any,
    ):
        self._model = make_parallel(model, devices, mode, **options)
        inputs, targets = batch
        if targets is None:
            self._model.compile(
                optimizer=self._model.optimizer if self._model.compiled else "adam",
                loss="mse",
                jit_compile=self._model.jit_compile if self._model.compiled else "auto",
            )
            outputs = keras.tree.map_structure(keras.ops.convert_to_numpy, model(inputs))
            targets = keras.tree.map_structure(np.zeros_like, outputs)
        self._model._parallel_place()
        if self._model.optimizer is not None and not self._model.optimizer.built:
            self._model.optimizer.build(self._model.trainable_variables)
        # Values of its own: on JAX a step takes over the arrays that it is given.
        self._start = Snapshot(state_of(self._model))
        self._batch = (inputs, targets)
        arrays = keras.tree.flatten(self._batch)
        self._rows = len(arrays[0])
        size = sum(np.asarray(part).nbytes for part in arrays)
        self._most = max(2, _MOST_BYTES // max(size, 1))  # batches in memory

    def warm_up(self, least: int) -> int:
        """Traces and compiles, and says how many steps a round shall have."""
        self.time(_WARM_UP)
        step, _ = self.time(_WARM_UP)
        return max(least, min(round(_LONG_ENOUGH_S / step), _MOST_STEPS))

    def time(self, steps: int) -> tuple[float, float]:
        """The median step in seconds, and the processor's seconds in the median step."""
        self._model._parallel_place()
        self._start.restore()
        batches = min(steps + 1, self._most)  # the first of an epoch is not timed
        x, y = (repeat(part, batches) for part in self._batch)
        watch = Stopwatch(every=True)
        self._model.fit(
            x,
            y,
            batch_size=self._rows,
            epochs=-(-steps // (batches - 1)),
            shuffle=False,
            callbacks=[watch],
            verbose=0,
        )
        return statistics.median(watch.each), statistics.median(watch.cpu)


def _take_rows(batch: tuple[Any, Any], rows: int) -> tuple[Any, Any]:
    inputs, targets = batch
    return take(inputs, rows), None if targets is None else take(targets, rows)
