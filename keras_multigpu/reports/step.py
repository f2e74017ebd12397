"""How long a training step takes on one device, measured."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import keras
import numpy as np

from keras_multigpu.parallel import make_parallel
from keras_multigpu.reports.prediction import StepTime
from keras_multigpu.reports.state import Snapshot, state_of

_WARM_UP = 2


def measure_step(
    model: keras.Model, inputs: Any, batch_size: int, fewer: int, steps: int
) -> StepTime:
    """Times training steps on a batch, and on a smaller one.

    The model is trained by its own optimizer (by Adam if it has none) towards outputs of zero: what
    its own loss takes is left out. Afterwards it is as it was.

    Args:
        model: a model that is built.
        inputs: arrays of at least `batch_size` rows, in the structure that the model takes.
        batch_size: rows of the batch.
        fewer: rows of the smaller one.
        steps: how many steps of either to time.
    """
    parallel = make_parallel(model, 1)
    parallel.compile(
        optimizer=parallel.optimizer if parallel.compiled else "adam",
        loss="mse",
        jit_compile=parallel.jit_compile if parallel.compiled else "auto",
    )
    before = Snapshot(state_of(model))
    try:
        sizes = (batch_size, fewer) if fewer < batch_size else (batch_size,)
        batches = [_Repeated(model, take(inputs, rows), steps) for rows in sizes]
        seconds = [_time(parallel, batch) for batch in batches]
    finally:
        before.restore()
    if len(sizes) == 1:
        return StepTime(0.0, seconds[0] / batch_size)
    return StepTime.through(batch_size, seconds[0], fewer, seconds[1])


def _time(model: keras.Model, batches: keras.utils.PyDataset) -> float:
    clock = _Clock()
    model.fit(batches, callbacks=[clock], shuffle=False, verbose=0)
    return statistics.median(
        end - start for start, end in itertools.pairwise(clock.ends[_WARM_UP:])
    )


class _Clock(keras.callbacks.Callback):
    """Notes when each batch ends, and waits for its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        float(logs["loss"])
        self.ends.append(time.perf_counter())


class _Repeated(keras.utils.PyDataset):
    """One batch, again and again."""

    def __init__(self, model: keras.Model, inputs: Any, steps: int):
        super().__init__()
        outputs = keras.tree.map_structure(keras.ops.convert_to_numpy, model(inputs))
        targets = keras.tree.map_structure(np.zeros_like, outputs)
        self._batch = (inputs, targets)
        self._steps = steps

    def __len__(self) -> int:
        return 1 + _WARM_UP + self._steps

    def __getitem__(self, index: int) -> Any:
        return self._batch


def take(inputs: Any, rows: int) -> Any:
    """The first rows of arrays in any structure."""
    return keras.tree.map_structure(lambda part: part[:rows], inputs)


def make_inputs(model: keras.Model, rows: int) -> Any:
    """Inputs for a model that tells their shapes: random numbers, and zeros for integers.

    Args:
        model: a Functional model, or a Sequential one that is built.
        rows: how many rows to make.

    Raises:
        ValueError: if the model does not tell the shape of an input.

    Example:
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> make_inputs(model, 5).shape
        (5, 3)
    """
    # A Sequential model has no `input` of its own, others keep the structure there.
    known = getattr(model, "inputs", None)
    structure = known and (known[0] if isinstance(model, keras.Sequential) else model.input)
    tensors = keras.tree.flatten(structure)
    if not known or any(None in one.shape[1:] or one.dtype == "string" for one in tensors):
        shapes = [(tuple(one.shape), one.dtype) for one in tensors] if known else "not known"
        raise ValueError(
            "`inputs` must be given for a model that does not tell the shapes of its inputs, or "
            f"takes texts. Received: model={model.name!r}, with the input shapes {shapes}. Give "
            f"`inputs=x[:{rows}]`, some rows of your data."
        )
    random = np.random.default_rng(0)

    def make(tensor: Any) -> np.ndarray:
        shape, dtype = (rows, *tensor.shape[1:]), keras.backend.standardize_dtype(tensor.dtype)
        if not keras.backend.is_float_dtype(dtype):
            return np.zeros(shape, dtype)
        return random.normal(size=shape).astype("float32")

    return keras.tree.map_structure(make, structure)
