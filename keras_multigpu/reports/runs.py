"""The runs of a scaling report: how each of them trains, its times, and how two compare."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

import keras

from keras_multigpu.arguments import positive_integer
from keras_multigpu.reports.timing import Stopwatch

_KERAS_BATCH_SIZE = 32


@dataclasses.dataclass(frozen=True)
class Run:
    """The trainings on one number of devices.

    Attributes:
        devices: the number of devices.
        seconds: the time of each repeat, in seconds.
        loss: the loss at the end, `None` if unknown.
        batch_size: rows of a batch, on all the devices together.
        steps: the batches of a repeat.
        step_times: the time of a step in each repeat, in seconds, without the time that epochs
            take besides their steps; empty if this was not measured separately.
        epochs: the epochs of a repeat.

    Example:
        >>> run = Run(2, (5.0, 4.0, 9.0), steps=10, step_times=(0.4, 0.3, 0.5))
        >>> run.median, run.step_seconds, run.epoch_seconds
        (5.0, 0.4, 1.0)
    """

    devices: int
    seconds: tuple[float, ...]
    loss: float | None = None
    batch_size: int | None = None
    steps: int | None = None
    step_times: tuple[float, ...] = ()
    epochs: int = 1

    @property
    def median(self) -> float:
        """The median time of a repeat, in seconds."""
        return statistics.median(self.seconds)

    @property
    def step_seconds(self) -> float | None:
        """The median time of a batch, in seconds."""
        if self.step_times:
            return statistics.median(self.step_times)
        return self.median / self.steps if self.steps else None

    @property
    def epoch_seconds(self) -> float | None:
        """The time of an epoch besides its steps, in seconds; `None` if unknown."""
        if not self.step_times or not self.steps:
            return None
        rest = [all_s - self.steps * one for all_s, one in zip(self.seconds, self.step_times)]
        return max(statistics.median(rest), 0.0) / self.epochs


def comparable_times(run: Run, other: Run) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The times by which two runs are compared: of steps if known, or else of repeats.

    Runs may have different numbers of steps, as larger batches make fewer.
    """
    if run.step_times and other.step_times:
        return run.step_times, other.step_times
    if run.steps and other.steps and run.steps != other.steps:
        return (
            tuple(one / run.steps for one in run.seconds),
            tuple(one / other.steps for one in other.seconds),
        )
    return run.seconds, other.seconds


def find_speedup(run: Run, base: Run, *, weak: bool = False) -> float:
    """The speed-up of a run over another.

    With weak scaling n devices do n times the work in a step, so it compares rows per second.
    """
    work = run.devices / base.devices if weak else 1.0
    own, others = comparable_times(run, base)
    return work * statistics.median(others) / statistics.median(own)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How each run trains; the arguments are those of `scaling`, and checked here."""

    data: Any
    batch_size: int | None = None
    epochs: int = 1
    steps: int | None = None
    warm_up: int = 1
    repeats: int = 3
    weak: bool = False

    def __post_init__(self) -> None:
        _check_data(self.data)
        if self.weak and self.batch_size is None:
            raise ValueError(
                "`weak=True` needs the rows of each device. Received: batch_size=None. Give "
                "`batch_size`, and arrays as `data`."
            )
        for name in ("batch_size", "epochs", "steps", "repeats"):
            if getattr(self, name) is not None:
                positive_integer(name, getattr(self, name))
        if isinstance(self.warm_up, bool) or self.warm_up != 0:
            positive_integer("warm_up", self.warm_up, expected=" or 0")

    def batch_size_on(self, devices: int) -> int | None:
        """Rows of a batch on a number of devices; `None` if the data decide."""
        size = self.batch_size
        if size is None and isinstance(self.data, tuple):
            size = _KERAS_BATCH_SIZE
        return size * devices if self.weak and size else size

    def fit(self, model: keras.Model, epochs: int) -> tuple[keras.callbacks.History, Stopwatch]:
        """Trains a parallel model on the rows in order; returns the history and the times."""
        watch = Stopwatch()
        x, *others = self.data if isinstance(self.data, tuple) else (self.data,)
        given = dict(zip(("y", "sample_weight"), others))
        if self.batch_size is not None:
            given["batch_size"] = self.batch_size_on(len(model.devices))
        given = {name: value for name, value in given.items() if value is not None}
        history = model.fit(
            x, **given, epochs=epochs, steps_per_epoch=self.steps, shuffle=False,
            callbacks=[watch], verbose=0,
        )  # fmt: skip
        return history, watch

    def describe(self) -> dict[str, Any]:
        """The settings that a reader of the figures must know."""
        found = {
            "batch size": self.batch_size_on(1) or "the data's own",
            "epochs": self.epochs,
            "steps of an epoch": self.steps or "all",
            "warm-up": f"{self.warm_up} epoch{'' if self.warm_up == 1 else 's'}",
            "repeats": f"{self.repeats}, in turn",
        }
        if self.weak:
            found["scaling"] = "weak, the batch size is per device"
        return found


def _check_data(data: Any) -> None:
    """Arrays in a tuple, or a source that every run can read from its start."""
    if isinstance(data, Iterator):
        raise TypeError(
            "`data` must be something that every run can read from its start: arrays, a "
            f"`tf.data.Dataset` or a `keras.utils.PyDataset`. Received: data={data!r}, "
            "which can be read only once. Make a Dataset or a PyDataset from it."
        )
    expected = "`data` must be a tuple of inputs, targets and weights, or a source of batches."
    if isinstance(data, tuple) and not 1 <= len(data) <= 3:
        raise ValueError(
            f"{expected} Received: a tuple of {len(data)}. Put several inputs into a list: "
            "`([a, b], y)`."
        )
    if data is None or isinstance(data, (list, dict)) or hasattr(data, "shape"):
        raise ValueError(f"{expected} Received: data of type {type(data).__name__}. Give `(x, y)`.")
