"""Trains a model on 1, 2, 4 devices, and reports how the times and the losses compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import check_model, device_counts
from keras_multigpu.parallel import Mode, make_parallel
from keras_multigpu.reports.environment import are_virtual, describe_environment
from keras_multigpu.reports.runs import Plan, Run
from keras_multigpu.reports.scaling_report import ScalingReport
from keras_multigpu.reports.state import Snapshot, build_optimizer, random_state_kept, state_of
from keras_multigpu.reports.timing import Stopwatch

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
            shuffled; a source that shuffles gives each run another order.
        n_gpus: the numbers of devices, as for `make_parallel`.
        mode: the mode of `make_parallel`. With more devices a committee of towers gets more
            members, not more speed, unless `num_replicas` is given. Its further members are
            initialized anew for each number of devices, so the losses differ.
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
    counts = device_counts("n_gpus", n_gpus)
    plan = Plan(data, batch_size, epochs, steps, warm_up, repeats, weak)
    check_model(model, built=True)
    _check_compiled(model, compile_with)
    before = Snapshot(state_of(model))
    with engines.current().places_kept(model), random_state_kept():
        models = [make_parallel(model, count, mode, **options) for count in counts]
        try:
            runs = _measure([_prepare(one, compile_with) for one in models], plan, verbose)
        finally:
            before.restore()
    used = max((one.devices for one in models), key=len)
    settings = {"model": model.name, "mode": mode, **options, **plan.describe()}
    settings |= describe_environment(used)
    return ScalingReport(runs, weak=weak, notes=_notes(runs, plan, used), settings=settings)


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


def _prepare(model: keras.Model, compile_with: Callable[[keras.Model], Any] | None) -> keras.Model:
    """Compiles a parallel model and builds its optimizer, whose state can then be kept."""
    model._parallel_place()
    if compile_with is not None:
        compile_with(model)
    if not model.compiled:
        raise ValueError(
            "The parallel model could not be compiled like the model. Received: "
            f"model={model.template.name!r}, whose outputs the mode changes, or which has an "
            f"optimizer or a metric that can't be copied. Give {_COMPILE}."
        )
    build_optimizer(model)
    return model


def _measure(models: Sequence[keras.Model], plan: Plan, verbose: int) -> list[Run]:
    """Trains the models in turn, each from the same start, and times it."""
    starts = [Snapshot(state_of(model)) for model in models]
    fits: list[list[tuple[Any, Stopwatch]]] = [[] for _ in models]
    rounds = range(0 if plan.warm_up else 1, plan.repeats + 1)  # round 0 is the warm-up
    progress = keras.utils.Progbar(len(models) * len(rounds), verbose=verbose, unit_name="run")
    for number in rounds:
        for place, model in enumerate(models):
            starts[place].restore()
            fit = plan.fit(model, plan.epochs if number else plan.warm_up)
            if number:
                fits[place].append(fit)
            progress.add(1)
    return [_summarize(model, plan, found) for model, found in zip(models, fits)]


def _summarize(model: keras.Model, plan: Plan, fits: Sequence[tuple[Any, Stopwatch]]) -> Run:
    """The timed fits of a model as a run."""
    history, watch = fits[-1]
    steps = [one.step_seconds for _, one in fits]
    return Run(
        len(model.devices),
        tuple(one.seconds for _, one in fits),
        history.history["loss"][-1],
        plan.batch_size_on(len(model.devices)),
        watch.batches,
        tuple(one for one in steps if one is not None),
        len(history.epoch),
    )


def _notes(runs: Sequence[Run], plan: Plan, devices: Sequence[str]) -> list[str]:
    notes = [_VIRTUAL] if are_virtual(devices) else []
    if plan.steps is not None and any(run.steps != plan.steps * plan.epochs for run in runs):
        made = " or ".join(map(str, sorted({run.steps or 0 for run in runs})))
        notes.append(
            f"The data ended early: you asked for steps={plan.steps} in each of {plan.epochs} "
            f"epochs, and the runs had {made} batches. The times are of these batches."
        )
    if not all(run.step_times for run in runs):
        notes.append(
            "An epoch has a single batch, so its time includes the overhead of an epoch. Give more "
            "batches to separate the two."
        )
    return notes
