"""Trains a model on 1, 2, 4 devices, and reports how the times and the losses compare."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from keras_multigpu.arguments import check_model, device_counts, number_of, positive_integer, short
from keras_multigpu.modes import ParallelModel
from keras_multigpu.parallel import MODES, Mode, make_parallel, options_of
from keras_multigpu.reports import doubts, inputs
from keras_multigpu.reports.forms import VIRTUAL, are_virtual, describe_environment
from keras_multigpu.reports.models import check_built, has_weights, model_kept
from keras_multigpu.reports.scaling_report import Run, ScalingReport
from keras_multigpu.reports.timing import Stopwatch, Training

_KERAS_BATCH_SIZE = 32
_DIVIDING = ("placement", "model_devices")
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
        data: a tuple of inputs, targets and, optionally, sample weights (`(x,)` for a model that
            has a loss or a step of its own); or a source that can be read several times: a
            `tf.data.Dataset` or a `keras.utils.PyDataset`. Rows are not shuffled; a source that
            shuffles gives each run another order, unless it is a `HashedDataset`, which each run
            reads from the same epoch.
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
        **options: the mode's options, for `make_parallel`. One device that others are compared with
            has no `placement` and no `model_devices`.

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
    counts = _check_counts(n_gpus)
    check_model(model)
    _check_names(mode, options)
    inputs.check_data(data, batch_size, steps, weak, with_targets=inputs.needs_targets(model))
    _check_numbers(warm_up, batch_size=batch_size, epochs=epochs, steps=steps, repeats=repeats)
    _check_compiled(model, compile_with)
    rows = (batch_size or _KERAS_BATCH_SIZE) if isinstance(data, tuple) else None
    sizes = [rows * count if rows and weak else rows for count in counts]
    rounds = [warm_up] * (warm_up > 0) + [epochs] * repeats
    moves = mode == "model" or options.get("shard") is not None
    if not has_weights(model):  # a Sequential model whose shapes Keras can't infer
        batch = inputs.take_rows(data, rows) if rows else inputs.first_batch(data)
        model(keras.utils.unpack_x_y_sample_weight(batch)[0])
    with model_kept(model):
        models = [
            make_parallel(model, count, mode, **_options_for(count, max(counts), options))
            for count in counts
        ]
        trainings = [_prepare(one, compile_with) for one in models]
        watches = _train_in_turn(trainings, data, sizes, rounds, steps, moves, verbose)
    there = keras.tree.flatten(data)[0].shape[0] if rows else 0
    batches = [size and min(size, there) for size in sizes]
    runs = [_summarize(*one, repeats) for one in zip(counts, batches, watches)]
    used = max((one.devices for one in models), key=len)
    settings = {
        "model": model.name,
        "mode": mode,
        **options,
        "batch size": rows or "the data's own",
        "epochs": epochs,
        "steps of an epoch": steps or "all",
        "warm-up": number_of(warm_up, "epoch"),
        "repeats": f"{repeats}, in turn",
        **({"scaling": "weak, the batch size is per device"} if weak else {}),
        **describe_environment(used),
    }
    notes = [*([VIRTUAL] if are_virtual(used) else []), *doubts.doubt_times(runs, steps, epochs)]
    notes += doubts.find_short(there, sizes) if batch_size else []
    if mode == "data":
        size = None if rows else inputs.rows_of_first_batch(data)
        notes += doubts.find_undivided(runs, used, options.get("model_devices", 1), size)
    members = mode == "tower" and options.get("num_replicas") is None
    return ScalingReport(runs, weak=weak, members=members, notes=notes, settings=settings)


def _options_for(count: int, most: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for so many devices of `most`: one has none of those that divide devices."""
    left_out = _DIVIDING if count == 1 < most else ()
    return {name: value for name, value in options.items() if name not in left_out}


def _check_counts(n_gpus: Any) -> tuple[int, ...]:
    if hasattr(n_gpus, "shape"):
        raise ValueError(
            "`n_gpus` must be a sequence of numbers of devices. Received: an array of shape "
            f"{tuple(n_gpus.shape)}. Give inputs and targets as one argument: "
            "`scaling(model, (x, y))`."
        )
    return device_counts("n_gpus", n_gpus)


def _check_numbers(warm_up: Any, **others: Any) -> None:
    for name, value in others.items():
        if value is not None:
            positive_integer(name, value)
    if isinstance(warm_up, bool) or warm_up != 0:
        positive_integer("warm_up", warm_up, expected=" or 0")


def _check_names(mode: str, options: Mapping[str, Any]) -> None:
    """Refuses misspelt arguments of `scaling`, which would be taken for a mode's options."""
    own = [*inspect.signature(scaling).parameters]
    for name in options.keys() - options_of(mode) if mode in MODES else ():
        alike = difflib.get_close_matches(name, [*own, *options_of(mode)], 1)
        if alike and alike[0] in own:
            raise TypeError(
                f"`scaling` has no argument {name!r}. Received: {name}={short(options[name])}. Did "
                f"you mean `{alike[0]}`?"
            )


def _check_compiled(model: keras.Model, compile_with: Any) -> None:
    check_built(model)
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


def _train_in_turn(
    trainings: Sequence[Training],
    data: Any,
    sizes: Sequence[int | None],
    rounds: Sequence[int],
    steps: int | None,
    moves: bool,  # whether the weights move to a model's devices when its turn comes
    verbose: int,
) -> list[list[Stopwatch]]:
    """Trains the models in turn, each from the same start; each round has so many epochs."""
    # Without a size of batches Keras would divide the rows into `steps`.
    names = ("x", "y", "sample_weight") if isinstance(data, tuple) else ("x",)
    arrays = dict(zip(names, data if isinstance(data, tuple) else (data,)))
    rewind = _rewinder(data)
    progress = keras.utils.Progbar(len(trainings) * len(rounds), verbose=verbose, unit_name="run")
    watches: list[list[Stopwatch]] = [[] for _ in trainings]
    for epochs in rounds:
        for training, size, found in zip(trainings, sizes, watches):
            given = arrays | ({"batch_size": size} if size else {})
            if moves:  # and then the step is traced again, on TensorFlow: not in the timed run
                rewind()
                training.fit(**given, epochs=1, steps_per_epoch=1)
            rewind()
            found.append(training.fit(**given, epochs=epochs, steps_per_epoch=steps))
            progress.add(1)
    rewind()
    return watches


def _rewinder(data: Any) -> Callable[[], Any]:
    """Brings data that shuffle themselves back to the epoch that they are in now."""
    epoch, resume = getattr(data, "epoch", None), getattr(data, "resume", None)
    if callable(resume) and isinstance(epoch, int):
        return lambda: resume(epoch)
    return lambda: None


def _summarize(
    devices: int, batch_size: int | None, watches: Sequence[Stopwatch], repeats: int
) -> Run:
    """The timed trainings of a model, after those that warm up, as a run."""
    timed, last = watches[-repeats:], watches[-1]
    return Run(
        devices,
        seconds=tuple(one.seconds for one in timed),
        loss=last.loss,
        batch_size=batch_size,
        steps=last.batches,
        step_times=tuple(one.step_seconds for one in timed if one.step_seconds is not None),
        epochs=last.epochs,
    )
