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
from keras_multigpu.arguments import check_model
from keras_multigpu.modes import watch_kept
from keras_multigpu.reports.inputs import Batch, take_rows


def check_built(model: Any) -> None:
    """Refuses what is not a Keras model, and a model without weights."""
    check_model(model)
    if not (model.built or has_weights(model)):
        raise ValueError(
            f"`model` must be built, so that it has weights. Received: model={model.name!r}, "
            "which is not built. Call it on a batch, train it on one, or give it an input shape."
        )


def has_weights(model: keras.Model) -> bool:
    """Whether a model is built, or has built layers that its own `train_step` calls one by one."""
    own = getattr(model, "template", model)
    layers = engines.all_layers(own)[1:]
    is_of_layers = has_train_step(own) and type(own).build is keras.Model.build
    are_built = bool(layers) and all(one.built for one in layers)
    return engines.is_built(model) or (is_of_layers and are_built)


def has_train_step(model: keras.Model) -> bool:
    """Whether a model, or a parallel model's template, has its own `train_step`."""
    return "train_step" in engines.own_steps(getattr(model, "template", model))


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
    """All that training changes in a built model: weights, seeds, states, metrics, slots."""
    optimizers = [getattr(model, "optimizer", None), *_further_optimizers(model).values()]
    slots = [v for one in _find_optimizers(optimizers) for v in one.variables]
    metrics = model.metrics_variables if model.compiled else []
    # Keras does not list the states of recurrent layers among their variables.
    states = keras.tree.flatten([getattr(one, "states", ()) for one in engines.all_layers(model)])
    states = [one for one in states if isinstance(one, keras.Variable)]
    return list({id(v): v for v in [*model.variables, *states, *metrics, *slots]}.values())


def build_optimizer(model: keras.Model) -> None:
    """Makes the optimizer's state, if a model has an optimizer, so that it can be kept."""
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def call_on_one_row(model: keras.Model, inputs: Any, batch_size: int) -> tuple[Any, bool]:
    """A model's outputs, and whether it takes one row; none, if only its own step can call it.

    They are those of the whole batch if it takes no other.
    """
    with keras.StatelessScope():  # so that seeds and recurrent states stay as they are
        for rows, takes_one in ((1, True), (batch_size, False)):
            try:
                return model(take_rows(inputs, rows)), takes_one
            # Of any type: a stateful recurrent layer's, one of a reshaped batch, a user's `call`.
            except Exception:
                if not (takes_one or has_train_step(model)):
                    raise
    return (), True


@contextlib.contextmanager
def model_kept(model: keras.Model) -> Iterator[None]:
    """Scope in which parallel versions of a model are trained; then all is as it was before."""
    before = Snapshot(model)
    with (
        engines.current().places_kept(model),
        random_state_kept(),
        traced_anew(),
        _further_optimizers_copied(model),
        watch_kept(model),
    ):
        try:
            yield
        finally:
            before.restore()


def _further_optimizers(model: keras.Model) -> dict[str, Any]:
    """The attributes that have optimizers beside Keras's one, alone or in a structure."""
    own = {name: one for name, one in vars(model).items() if name != "optimizer" and name[0] != "_"}
    return {name: one for name, one in own.items() if _find_optimizers(one)}


def _find_optimizers(value: Any) -> list[keras.Optimizer]:
    parts = keras.tree.flatten(value) if isinstance(value, (list, tuple, dict)) else [value]
    return [one for one in parts if isinstance(one, keras.Optimizer)]


def _copied(one: Any) -> Any:
    """A copy of an optimizer that is not built yet; other values as they are."""
    is_unbuilt = isinstance(one, keras.Optimizer) and not one.built
    return type(one).from_config(one.get_config()) if is_unbuilt else one


@contextlib.contextmanager
def _further_optimizers_copied(model: keras.Model) -> Iterator[None]:
    """Scope in which optimizers that only a step of the model's own can build have copies."""
    unbuilt = {
        name: one
        for name, one in _further_optimizers(model).items()
        if not all(optimizer.built for optimizer in _find_optimizers(one))
    }
    for name, one in unbuilt.items():
        setattr(model, name, keras.tree.map_structure(_copied, one))
    try:
        yield
    finally:
        for name, one in unbuilt.items():
            setattr(model, name, one)


@contextlib.contextmanager
def traced_anew() -> Iterator[None]:
    """Scope without TensorFlow's warning, which takes steps of several models for one, retraced."""
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


@contextlib.contextmanager
def step_prepared(model: keras.Model, batch: Batch, training: bool) -> Iterator[None]:
    """Scope for a look at one step, whose weights, slots and metrics exist; restores all."""
    with traced_anew(), watch_kept(model), _further_optimizers_copied(model):
        if not (has_weights(model) if training else engines.is_built(model)):
            model.predict_on_batch(batch[0])
        if training:
            build_optimizer(model)
        before, functions = Snapshot(model), (model.train_function, model.predict_function)
        try:
            if training:
                # Not each model with a step of its own for training has one for tests.
                is_own = has_train_step(model)
                with engines.batches_as_in_fit(model):
                    (model.train_on_batch if is_own else model.test_on_batch)(*batch)
                model.reset_metrics()
            yield
        finally:
            model.train_function, model.predict_function = functions
            model.reset_metrics()
            steps = getattr(model, "_parallel_steps", None)
            # Spread state is not whole on one device in between.
            with steps.using_weights() if steps is not None else contextlib.nullcontext():
                before.restore()
