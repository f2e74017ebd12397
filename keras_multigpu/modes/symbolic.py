"""Symbolic outputs of a parallel model, on which no parallel model can be built."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import keras


def warn_of_building(model: Any, name: str, value: Any) -> Any:
    """Returns symbolic outputs; warns users of them, who may build a model that is not parallel.

    Keras reads them too: to build a model that calls this one, or to draw it.
    """
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_code.co_name in ("warn_of_building", name, "__getattribute__"):
        frame, level = frame.f_back, level + 1
    caller = frame.f_globals.get("__name__", "") if frame else ""
    is_symbolic = any(isinstance(leaf, keras.KerasTensor) for leaf in keras.tree.flatten(value))
    if is_symbolic and caller.partition(".")[0] not in ("keras", "keras_multigpu"):
        warnings.warn(
            f"`{name}` of a parallel model is its template's: a model that is built on it, such as "
            f"`keras.Model(parallel.input, layer(parallel.{name}))`, runs on one device, without "
            f"the parallel model. Received: {model.name!r}, in mode {model.mode!r}. Call the "
            "parallel model: `outputs = layer(parallel(inputs))`, with `inputs = keras.Input(...)`."
            f" If you mean the template's graph, use `parallel.template.{name}`.",
            stacklevel=level,
        )
    return value
