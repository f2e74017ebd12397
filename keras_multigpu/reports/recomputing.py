"""Activations that are computed again in the backward pass, instead of kept: `keras.RematScope`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import keras

from keras_multigpu import engines
from keras_multigpu.graphs.graph import is_graph
from keras_multigpu.reports.models import random_state_kept
from keras_multigpu.reports.prediction import Sizes

_WORTH_IT = 0.97  # of a step's memory: recomputing that saves less is no choice
_PASSED_BY_NAME = {"training", "mask"}  # which Keras passes by name


def count_recomputed(
    model: keras.Model,
    count: Callable[[keras.Model], Mapping[int, Sizes]],
    plain: Mapping[int, Sizes],
    rows: int,
) -> tuple[Mapping[int, Sizes], list[str]]:
    """The sizes with layers made in a `keras.RematScope`, or why they are left out.

    `count` counts the sizes of a copy of the model, by the rows of a device. `plain` are those of
    the model itself; they are compared for so many `rows`.
    """
    if not is_graph(model):
        return {}, ["Recomputing is left out: only functional and Sequential models are copied."]
    with random_state_kept():
        copy = keras.models.clone_model(model, clone_function=_recomputing)
    if model.compiled:
        optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
        copy.compile(optimizer, model.loss, jit_compile=model.jit_compile)
    try:
        found = count(copy)
    except Exception as error:  # of many types: the same steps were counted without it before
        return {}, [_why_not_recomputed(model, error)]
    reduced, whole = (
        sizes[rows].work + rows * (sizes[rows].activations or 0) for sizes in (found, plain)
    )
    if reduced > _WORTH_IT * whole:
        return {}, ["Recomputing activations (`keras.RematScope`) saves hardly any memory."]
    return found, []


def _why_not_recomputed(model: keras.Model, error: Exception) -> str:
    """Why activations can't be computed again; `error` is what Keras says of a copy that does."""
    left_out = "Recomputing activations (`keras.RematScope`) is left out"
    kinds = {
        type(layer).__name__
        for layer in engines.all_layers(model)
        if not isinstance(layer, keras.Model)
        and _PASSED_BY_NAME & inspect.signature(layer.call).parameters.keys()
    }
    why = f"which has layers with an argument `training` or `mask` ({', '.join(sorted(kinds))})"
    if not kinds:
        why = f"which fails ({engines.reason_of(error)})"
    return f"{left_out}: on {engines.current().title} Keras can't do it for this model, {why}."


def _recomputing(layer: keras.Layer) -> keras.Layer:
    """A copy of a layer, whose intermediate results are computed again when they are needed."""
    with keras.RematScope("full"):
        return type(layer).from_config(layer.get_config())
