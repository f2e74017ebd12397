"""All checks of a request, from users and from files."""

from __future__ import annotations

from typing import Any

import keras

from keras_multigpu import engines

_OWN_NAMES = ("template", "devices", "mode")


def check(mode: Any, request: engines.Request) -> None:
    """Checks a request for a mode (a subclass of `ParallelModel`) before anything is built.

    Raises:
        ValueError: if the process, the template, the options or the backend don't allow it.
    """
    engines.current().check(request)
    _check_names(request.template, mode)
    mode._parallel_check(request.options)
    mode._parallel_runner_class().check(request)


def _check_names(template: keras.Model, mode: Any) -> None:
    """Refuses templates with attributes that a parallel model defines, or with parallel parts.

    A method gives way to an attribute that is set on the model: its own code may read it.
    """
    own_names = (*_OWN_NAMES, *mode._parallel_names, *mode._parallel_methods)
    clashes = [
        name
        for name in own_names
        if hasattr(type(template) if name in mode._parallel_methods else template, name)
    ]
    if clashes:
        raise ValueError(
            f"A parallel model defines the attributes {', '.join(own_names)}. Received: "
            f"a model with attributes of the same names: {', '.join(clashes)}. Rename them in "
            f"{type(template).__name__}."
        )
    for layer in engines.all_layers(template):
        if hasattr(type(layer), "_parallel_call_replicas"):
            raise ValueError(
                "A parallel model can't be a part of another one. Received: a model with the "
                f"parallel model {layer.name!r} in it. Build it with `.template` instead, and "
                "make the whole parallel."
            )
