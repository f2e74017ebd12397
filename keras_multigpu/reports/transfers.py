"""What crosses between the devices in a step: counted before anything is trained."""

from __future__ import annotations

from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.engines import Transfer
from keras_multigpu.modes import ParallelModel
from keras_multigpu.reports.environment import describe_environment
from keras_multigpu.reports.state import Snapshot, state_of
from keras_multigpu.reports.transfers_report import CROSSING, TransfersReport


def transfers(parallel: ParallelModel, batch: Any) -> TransfersReport:
    """Counts what crosses between the devices in a training step and in a prediction.

    On TensorFlow the graphs are read that it makes for each device, on JAX the program that XLA
    compiles: no GPU is needed, virtual devices (`keras_multigpu.use_virtual_devices`) give the
    same counts. The step is compiled for this batch, and on TensorFlow it is run once; the
    model's weights, its metrics and its optimizer are as before afterwards. XLA's collective
    operations are counted as rings of devices do them.

    Args:
        parallel: a model that `make_parallel` has made. If it is not compiled, the prediction is
            counted only.
        batch: the inputs, or a tuple of inputs, targets and, if there are any, sample weights,
            as arrays. The number of rows is what counts, not what is in them.

    Returns:
        A report with a row for each step, pair of devices and kind: `"inputs"`, `"weights"`,
        `"activations"`, `"gradients"`, `"other"`.

    Raises:
        ValueError: if the model is not parallel, or the batch has no targets.

    Example:
        >>> import numpy as np
        >>> from keras_multigpu import make_parallel
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, use_bias=False)])
        >>> parallel = make_parallel(model, n_gpus=2)
        >>> parallel.compile("sgd", "mse")
        >>> report = transfers(parallel, (np.ones((6, 8)), np.ones((6, 4))))
        >>> sum(one.bytes for one in report.training if one.kind == "gradients") >= 8 * 4 * 4
        True
    """
    given = _check(parallel, batch)
    predicted = _count(parallel, given, training=False)
    trained: list[Transfer] = []
    if parallel.compiled:
        trained = _count(parallel, given, training=True)
    rows = len(keras.tree.flatten(given[0])[0])
    # `advise` tells towers with weights of their own from those that share them.
    is_committee = parallel._parallel_options.get("replicas") == "independent"
    least = parallel._parallel_least_bytes(rows)
    if _is_whole_on_each(parallel, rows):
        least = sum(one.bytes or 0 for one in trained if one.kind in CROSSING)
    return TransfersReport(
        trained,
        predicted,
        parallel.devices,
        least,
        mode="committee" if is_committee else parallel.mode,
        batch_size=rows,
        hosts={name: engines.current().host_of(name) for name in parallel.devices},
        settings=describe_environment(parallel.devices),
        notes=[_whole(parallel, rows)] if _is_whole_on_each(parallel, rows) else [],
    )


def _is_whole_on_each(parallel: Any, rows: int) -> bool:
    """Whether each device computes the whole batch, as in data mode on JAX, which slices evenly."""
    is_sliced = parallel.mode == "data" and engines.current().partitions
    return is_sliced and bool(rows % len(parallel.devices))


def _whole(parallel: Any, rows: int) -> str:
    count = len(parallel.devices)
    more = count * (rows // count + 1)
    return (
        f"{count} devices don't divide {rows} rows: each computes the whole batch, so none has to "
        f"send anything, and none saves time. Give a batch of {more} rows, say."
    )


def _check(parallel: Any, batch: Any) -> tuple[Any, ...]:
    if not isinstance(parallel, ParallelModel):
        raise ValueError(
            "`parallel` must be a model that `make_parallel` has made. Received: "
            f"parallel={parallel!r}. Make it parallel first: `make_parallel(model, n_gpus)`."
        )
    given = batch if isinstance(batch, tuple) else (batch,)
    if parallel.compiled and not 2 <= len(given) <= 3:
        raise ValueError(
            "`batch` must be a tuple of inputs, targets and, if there are any, sample weights, "
            f"since the model is compiled. Received: {type(batch).__name__} of {len(given)}. "
            "Give `(x, y)`."
        )
    return (*given, *[None] * (3 - len(given)))


def _count(parallel: Any, batch: tuple[Any, ...], training: bool) -> list[Transfer]:
    """The transfers of a step; the model is as before afterwards."""
    if not parallel.built:
        parallel.predict_on_batch(batch[0])
    before = Snapshot(state_of(parallel))
    functions = {name: getattr(parallel, name) for name in ("train_function", "predict_function")}
    try:
        if training:  # what a first step would make is made beforehand
            parallel.optimizer.build(parallel.trainable_variables)
            before.add(parallel.optimizer.variables)
            parallel.test_on_batch(*batch)
            parallel.reset_metrics()
        return engines.current().count_transfers(parallel, batch, training)
    finally:
        for name, function in functions.items():
            setattr(parallel, name, function)
        parallel.reset_metrics()
        before.restore()
