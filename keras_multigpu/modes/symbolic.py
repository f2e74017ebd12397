"""Symbolic outputs of a parallel model: models that are built on them call it."""

from __future__ import annotations

import inspect
from typing import Any

import keras

from keras_multigpu.graphs.graph import symbolic_ends


def is_read_by_keras(name: str) -> bool:
    """Whether Keras, or this library, reads a property: the property's function asks this."""
    frame = inspect.currentframe()
    while frame and frame.f_code.co_name in ("is_read_by_keras", name, "__getattribute__"):
        frame = frame.f_back
    reader = frame.f_globals.get("__name__", "") if frame else ""
    return reader.partition(".")[0] in ("keras", "keras_multigpu")


class CalledOutputs:
    """The symbolic outputs of a call of a parallel model on its template's symbolic inputs.

    A model that is built on them calls the parallel model. On the template's outputs it would run
    on one device.
    """

    def __init__(self) -> None:
        self._described: list[Any] = []
        self._made: Any = None

    def of(self, model: Any, described: Any) -> Any:
        """The outputs of a model, in the structure of a call.

        `described` are the outputs that Keras describes the model by: if they change, it is called
        again. What is not symbolic (an attribute of a user's class) is returned as it is.
        """
        tensors = keras.tree.flatten(described)
        if not any(isinstance(one, keras.KerasTensor) for one in tensors):
            return described
        if list(map(id, tensors)) != list(map(id, self._described)):
            self._made = model(symbolic_ends(model.template)[0])
            self._described = tensors
        return self._made
