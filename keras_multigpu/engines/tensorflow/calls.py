"""Other ways for a layer to compute, for the time in which a model is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras


@contextlib.contextmanager
def replaced_calls(
    layers: Iterable[keras.Layer], make: Callable[[keras.Layer, Any], Any]
) -> Iterator[None]:
    """A scope in which layers have another `call`.

    Args:
        layers: the layers.
        make: gives the new `call` of a layer, from the layer and the `call` that it has.
    """
    before = [(layer, vars(layer).get("call")) for layer in layers]
    try:
        for layer, _ in before:
            # The instance's own attribute: Keras would track what is set the ordinary way.
            object.__setattr__(layer, "call", make(layer, layer.call))
        yield
    finally:
        for layer, own in before:
            vars(layer).pop("call", None)
            if own is not None:
                object.__setattr__(layer, "call", own)
