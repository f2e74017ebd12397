"""A model's state, kept while it is looked at."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_multigpu import engines
from keras_multigpu.modes import watch_kept

Batch = tuple[Any, Any, Any]
"""Inputs, targets and sample weights, `None` where absent."""


class Snapshot:
    """Copies, in host memory, of all values that training changes in a model."""

    def __init__(self, model: keras.Model):
        # np.array copies: the backend may return the variable's own memory.
        self._values = [
            (one, np.array(keras.ops.convert_to_numpy(one.value))) for one in state_of(model)
        ]

    def restore(self) -> None:
        """Assigns the copied values."""
        for variable, value in self._values:
            variable.assign(value)


def state_of(model: keras.Model) -> list[keras.Variable]:
    """All that training changes in a built model: weights, seeds, metrics, optimizer state."""
    optimizer: Any = getattr(model, "optimizer", None)
    slots = [] if optimizer is None else optimizer.variables
    return list({id(v): v for v in [*model.variables, *model.metrics_variables, *slots]}.values())


def build_optimizer(model: keras.Model) -> None:
    """Makes the optimizer's state, if a model has an optimizer, so that it can be kept."""
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


@contextlib.contextmanager
def model_kept(model: keras.Model) -> Iterator[None]:
    """Scope in which parallel versions of a model are trained; then all is as it was before."""
    before = Snapshot(model)
    with (
        engines.current().places_kept(model),
        random_state_kept(),
        traced_anew(),
        watch_kept(model),
    ):
        try:
            yield
        finally:
            before.restore()


@contextlib.contextmanager
def traced_anew() -> Iterator[None]:
    """Scope in which TensorFlow doesn't warn of functions that are traced anew.

    It takes the steps of different models for one function that is traced again and again.
    """
    logger = logging.getLogger("tensorflow")

    def is_other(record: logging.LogRecord) -> bool:
        return "triggered tf.function retracing" not in record.getMessage()

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restores Python's and NumPy's random state on exit: new layers draw their seeds from it."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def check_batch(batch: Any, *, with_targets: bool) -> Batch:
    """The parts of a batch: inputs, or a tuple of inputs, targets and sample weights.

    Raises:
        ValueError: if targets are needed, and there are none, or the numbers of rows differ.
    """
    given = batch if isinstance(batch, tuple) else (batch,)
    if with_targets and not 2 <= len(given) <= 3:
        length = f" of {len(batch)}" if isinstance(batch, (tuple, list, dict)) else ""
        raise ValueError(
            "`batch` must be a tuple of inputs, targets and, optionally, sample weights, because "
            f"the model is compiled. Received: {type(batch).__name__}{length}. Give `(x, y)`."
        )
    check_rows(given)
    inputs, targets, weights = [*given, None, None][:3]
    return inputs, targets, weights


def check_rows(given: Any) -> None:
    """Raises a `ValueError` if arrays have no rows, or differ in their number."""
    leaves = [one for one in keras.tree.flatten(given) if one is not None]
    shapes = [tuple(getattr(one, "shape", None) or ()) for one in leaves]
    if not shapes or {one[:1] for one in shapes} != {shapes[0][:1]} or not sum(shapes[0][:1]):
        found = [shape or type(one).__name__ for one, shape in zip(leaves, shapes)]
        raise ValueError(
            "Inputs, targets and sample weights must be arrays with the same number of rows, at "
            f"least one. Received, as shapes: {found}. Give `(x[:32], y[:32])`, for example."
        )


@contextlib.contextmanager
def step_prepared(model: keras.Model, batch: Batch, training: bool) -> Iterator[None]:
    """Scope for a look at one step of a model; its state and its functions are restored.

    All that the first step would make exists already: weights, slots, metrics.
    """
    with traced_anew(), watch_kept(model):
        if not model.built:
            model.predict_on_batch(batch[0])
        if training:
            build_optimizer(model)
        before, functions = Snapshot(model), (model.train_function, model.predict_function)
        try:
            if training:
                model.test_on_batch(*batch)
                model.reset_metrics()
            yield
        finally:
            model.train_function, model.predict_function = functions
            model.reset_metrics()
            steps = getattr(model, "_parallel_steps", None)
            # Spread state is not whole on one device in between.
            with steps.using_weights() if steps is not None else contextlib.nullcontext():
                before.restore()


def is_endless(data: Any) -> bool:
    """Whether a `tf.data.Dataset`, or a `keras.utils.PyDataset`, says that it has no end."""
    if hasattr(data, "cardinality"):
        return int(data.cardinality()) == -1  # `tf.data.INFINITE_CARDINALITY`
    return isinstance(data, keras.utils.PyDataset) and data.num_batches is None


def check_data(data: Any) -> None:
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
    if isinstance(data, tuple):
        check_rows(data)
        if len(data) == 1:
            raise ValueError(f"{expected} Received: a tuple of inputs only. Give `(x, y)`.")
    if data is None or isinstance(data, (list, dict)) or hasattr(data, "shape"):
        raise ValueError(f"{expected} Received: data of type {type(data).__name__}. Give `(x, y)`.")
