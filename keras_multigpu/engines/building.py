"""Builds layers outside of the trace that calls them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from keras_multigpu.engines.templates import all_layers


@contextlib.contextmanager
def built_in(
    scope: Callable[[], contextlib.AbstractContextManager[Any]], models: Iterable[keras.Layer]
) -> Iterator[None]:
    """While open, layers are built in a scope of their own.

    In a trace, constants that `build` makes would be tensors of the trace. Layers that a layer
    makes in its `build` are included.
    """
    replaced: dict[int, tuple[keras.Layer, Any, Any]] = {}

    def replace(model: keras.Layer) -> None:
        for layer in all_layers(model):
            if not layer.built and id(layer) not in replaced:
                own, other = layer.build, outside(layer, layer.build)
                replaced[id(layer)] = layer, own, other
                # Keras keeps its wrapper of `build` there. Its `__setattr__` would track the value.
                object.__setattr__(layer, "build", other)

    def outside(layer: keras.Layer, own: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(own)
        def build(*args: Any, **kwargs: Any) -> None:
            with scope():
                own(*args, **kwargs)
            replace(layer)

        return build

    try:
        for model in models:
            replace(model)
        yield
    finally:
        for layer, own, other in replaced.values():
            if vars(layer).get("build") is other:
                object.__setattr__(layer, "build", own)
