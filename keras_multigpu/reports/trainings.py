"""Trains a model on 1, 2, 4 devices, and reports how the times and the losses compare."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_multigpu.arguments import check_model, device_counts, positive_integer
from keras_multigpu.modes import ParallelModel
from keras_multigpu.parallel import Mode, make_parallel
from keras_multigpu.reports.forms import are_virtual, describe_environment
from keras_multigpu.reports.models import check_data, is_endless, model_kept
from keras_multigpu.reports.scaling_report import Run, ScalingReport
from keras_multigpu.reports.timing import Stopwatch, Training

_KERAS_BATCH_SIZE = 32
_VIRTUAL = "Virtual devices share one processor: their times say nothing about GPUs."
_COMPILE = "`compile_with=lambda parallel: parallel.compile(...)`"


def scaling(
    model: keras.Model,
    data: Any,
    n_gpus: Sequence[int] = (1, 2, 4),
    mode: Mode = "data",
    *,
    batch_size: int | None = None,
    epochs: int = 1,
    steps: int | None = None,
    warm_up: int = 1,
    repeats: int = 3,
    weak: bool = False,
    compile_with: Callable[[keras.Model], Any] | None = None,
    verbose: int = 1,
    **options: Any,
) -> ScalingReport:
    """Trains a model on 1, 2, 4 devices, and reports how the times compare.

    Every run is a `fit` of `make_parallel(model, n, mode)`, on one device too. All runs start from
    the model's current weights and optimizer state, and see the same rows in the same order. The
    numbers of devices take turns, 1 2 4 1 2 4, so that other work on the machine slows them all
    down alike. Afterwards the model's state is restored, also after an error or an interruption.

    Args:
        model: a built and compiled Keras model. It is compiled in the same way for every number of
            devices; each of these keeps a separate optimizer in memory.
        data: a tuple of inputs, targets and, optionally, sample weights; or a source that can be
            read several times: a `tf.data.Dataset` or a `keras.utils.PyDataset`. Rows are not
            shuffled; a source that shuffles gives each run another order, unless it is a
            `HashedDataset`, which each run reads from the same epoch.
        n_gpus: the numbers of devices, as for `make_parallel`.
        mode: the mode of `make_parallel`. With more devices a committee of towers gets more
            members, unless `num_replicas` is given: the speed-up is of members per second. The
            further ones are initialized anew for each number of devices, so the losses differ.
        batch_size: rows of a batch, on all the devices together; `None` for Keras's 32, and for
            sources that yield batches.
        epochs: the epochs of a run.
        steps: batches of an epoch; `None` for all. Needed if the data are endless. If they end
            earlier, the times are those of the batches that there were, and a note says so.
        warm_up: epochs to train on each number of devices before timing, for tracing and compiling.
        repeats: timed runs on each number of devices.
        weak: give each of n devices `batch_size` rows, so that a batch has n times as many. The
            speed-up then compares rows per second, and the losses can't be compared.
        compile_with: compiles a parallel model, if it can't be compiled like the model: because
            the mode changes the outputs, or an optimizer or a metric can't be copied.
        verbose: 1 for a progress bar, 0 for silence.
        **options: the mode's options, for `make_parallel`.

    Returns:
        A report with a row for each number of devices: the median time of a run in seconds, from
        the start of its first epoch to the end of its last; the fastest and the slowest; the time
        of a step, and the overhead of an epoch (setting up the data and its first step); the
        loss of the last epoch; the speed-up of a step and the efficiency.

    Raises:
        ValueError: if the model is not built or not compiled, a number is out of range, or
            `make_parallel` refuses the request.
        TypeError: if the data can be read only once.

    Example:
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> data = np.ones((64, 3)), np.ones((64, 1))
        >>> report = scaling(model, data, n_gpus=(1, 2), batch_size=16, repeats=2, verbose=0)
        >>> [(run.devices, len(run.seconds)) for run in report.runs]
        [(1, 2), (2, 2)]
    """
    if hasattr(n_gpus, "shape"):
        raise ValueError(
            "`n_gpus` must be a sequence of numbers of devices. Received: an array of shape "
            f"{tuple(n_gpus.shape)}. Give inputs and targets as one argument: "
            "`scaling(model, (x, y))`."
        )
    counts = device_counts("n_gpus", n_gpus)
    moves = mode == "model" or options.get("shard") is not None
    schedule = Schedule(data, batch_size, epochs, steps, warm_up, repeats, weak, moves)
    check_model(model, built=True)
    _check_compiled(model, compile_with)
    with model_kept(model):
        models = [make_parallel(model, count, mode, **options) for count in counts]
        runs = schedule.run([_prepare(one, compile_with) for one in models], verbose)
    used = max((one.devices for one in models), key=len)
    settings = {"model": model.name, "mode": mode, **options, **schedule.describe()}
    settings |= describe_environment(used)
    notes = [*([_VIRTUAL] if are_virtual(used) else []), *schedule.notes(runs)]
    members = mode == "tower" and options.get("num_replicas") is None
    return ScalingReport(runs, weak=weak, members=members, notes=notes, settings=settings)


def _check_compiled(model: keras.Model, compile_with: Any) -> None:
    if compile_with is not None and not callable(compile_with):
        raise ValueError(
            "`compile_with` must be a function that compiles a parallel model, or None. Received: "
            f"compile_with={compile_with!r}. Give {_COMPILE}."
        )
    if not model.compiled and compile_with is None:
        raise ValueError(
            f"`model` must be compiled. Received: model={model.name!r}, which is not compiled. "
            f"Compile it, or give {_COMPILE}."
        )


def _prepare(model: ParallelModel, compile_with: Callable[[keras.Model], Any] | None) -> Training:
    """Compiles a parallel model, and keeps the state that all its runs start from."""
    if compile_with is not None:
        compile_with(model)
    if not model.compiled:
        raise ValueError(
            "The parallel model could not be compiled like the model. Received: "
            f"model={model.template.name!r}, whose outputs the mode changes, or which has an "
            f"optimizer or a metric that can't be copied. Give {_COMPILE}."
        )
    return Training(model)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How each run trains; the arguments are those of `scaling`, and checked here.

    `moves` says whether the weights move to a model's devices when its turn comes.
    """

    data: Any
    batch_size: int | None = None
    epochs: int = 1
    steps: int | None = None
    warm_up: int = 1
    repeats: int = 3
    weak: bool = False
    moves: bool = False

    def __post_init__(self) -> None:
        check_data(self.data)
        if self.weak and self.batch_size is None:
            raise ValueError(
                "`weak=True` needs the rows of each device. Received: batch_size=None. Give "
                "`batch_size`, and arrays as `data`."
            )
        if self.batch_size is not None and not isinstance(self.data, tuple):
            raise ValueError(
                "`batch_size` is for arrays. Received: "
                f"batch_size={self.batch_size!r}, and data that come in batches: "
                f"{type(self.data).__name__}. Leave `batch_size` out."
            )
        if self.steps is None and is_endless(self.data):
            raise ValueError(
                "`steps` must say how many batches an epoch has if the data are endless. Received: "
                f"steps=None, and data of type {type(self.data).__name__} without an end. Give "
                "`steps=100`, for example."
            )
        for name in ("batch_size", "epochs", "steps", "repeats"):
            if getattr(self, name) is not None:
                positive_integer(name, getattr(self, name))
        if isinstance(self.warm_up, bool) or self.warm_up != 0:
            positive_integer("warm_up", self.warm_up, expected=" or 0")

    @functools.cached_property
    def begins(self) -> int | None:
        """The epoch from which each run reads data that shuffle themselves; `None` for others."""
        epoch = getattr(self.data, "epoch", None)
        can_resume = callable(getattr(self.data, "resume", None)) and isinstance(epoch, int)
        return epoch if can_resume else None

    def batch_size_on(self, devices: int) -> int | None:
        """Rows of a batch on a number of devices; `None` if the data decide."""
        size = self.batch_size
        if size is None and isinstance(self.data, tuple):
            size = _KERAS_BATCH_SIZE
        return size * devices if self.weak and size else size

    def run(self, trainings: Sequence[Training], verbose: int) -> list[Run]:
        """Trains the models in turn, each from the same start, and times it."""
        fits: list[list[tuple[Any, Stopwatch]]] = [[] for _ in trainings]
        rounds = [self.warm_up] * (self.warm_up > 0) + [self.epochs] * self.repeats
        total = len(trainings) * len(rounds)
        progress = keras.utils.Progbar(total, verbose=verbose, unit_name="run")
        for epochs in rounds:
            for training, found in zip(trainings, fits):
                found.append(self.fit(training, epochs))
                progress.add(1)
        if self.begins is not None:
            self.data.resume(self.begins)
        pairs = zip(trainings, fits)
        return [self._summarize(len(one.model.devices), found) for one, found in pairs]

    def fit(self, training: Training, epochs: int) -> tuple[keras.callbacks.History, Stopwatch]:
        """Trains a parallel model; returns the history and the times."""
        x, *others = self.data if isinstance(self.data, tuple) else (self.data,)
        given = dict(zip(("y", "sample_weight"), others))
        if isinstance(self.data, tuple):  # Keras would divide the rows into `steps`
            given["batch_size"] = self.batch_size_on(len(training.model.devices))
        if self.begins is not None:
            self.data.resume(self.begins)
        given = {name: value for name, value in given.items() if value is not None}
        if self.moves:  # and then the step is traced again, on TensorFlow: not in the timed run
            training.fit(x, **given, epochs=1, steps_per_epoch=1)
        return training.fit(x, **given, epochs=epochs, steps_per_epoch=self.steps)

    def _summarize(self, devices: int, fits: Sequence[tuple[Any, Stopwatch]]) -> Run:
        """The timed fits of a model as a run."""
        timed = [watch for _, watch in fits[-self.repeats :]]
        history = fits[-1][0]
        steps = [one.step_seconds for one in timed if one.step_seconds is not None]
        return Run(
            devices,
            tuple(one.seconds for one in timed),
            history.history["loss"][-1],
            self.batch_size_on(devices),
            timed[-1].batches,
            tuple(steps),
            len(history.epoch),
        )

    def describe(self) -> dict[str, Any]:
        """The settings that a reader of the figures must know."""
        weak = {"scaling": "weak, the batch size is per device"} if self.weak else {}
        return {
            "batch size": self.batch_size_on(1) or "the data's own",
            "epochs": self.epochs,
            "steps of an epoch": self.steps or "all",
            "warm-up": f"{self.warm_up} epoch{'' if self.warm_up == 1 else 's'}",
            "repeats": f"{self.repeats}, in turn",
            **weak,
        }

    def notes(self, runs: Sequence[Run]) -> list[str]:
        """What a reader of the figures must beware of."""
        notes = []
        if self.steps is not None and any(run.steps != self.steps * self.epochs for run in runs):
            made = " or ".join(map(str, sorted({run.steps or 0 for run in runs})))
            notes.append(
                f"The data ended early: you asked for steps={self.steps} in each of {self.epochs} "
                f"epochs, and the runs had {made} batches. The times are of these batches."
            )
        if not all(run.step_times for run in runs):
            notes.append(
                "An epoch has a single batch, so its time includes the overhead of an epoch. Give "
                "more batches to separate the two."
            )
        return notes
