"""The settings of layers: plain values that are attributes, and what a layer was adapted to."""

from __future__ import annotations

import contextlib
import enum
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from keras_multigpu import engines

_ADAPTED = "what it was adapted to"
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic, np.ndarray, enum.Enum)
# What Keras sets after a layer or a model was made.
_LATER = """
    _build_shapes_dict _called _parent_path _is_compiled _saved_model_inputs_spec
    """.split()


@functools.cache
def _kerass_own() -> frozenset[str]:
    """The attributes that Keras itself sets, in plain layers and models."""
    # Their names and types are given: Keras counts no name, and its default type stays open.
    options = {"name": "plain", "dtype": "float32"}
    plain = keras.layers.Layer(**options), keras.Model(**options)
    return frozenset({*_LATER, *(name for one in plain for name in vars(one))})


def settings_of(model: keras.Model) -> dict[int, dict[str, Any]]:
    """The plain values that are attributes of each layer, by the layer's `id`; not Keras's own."""
    found = {}
    for layer in model._flatten_layers():
        found[id(layer)] = {
            name: _copied(value)
            for name, value in vars(layer).items()
            if name not in _kerass_own() and _is_plain(value)
        }
        if hasattr(layer, "adapt"):
            found[id(layer)][_ADAPTED] = _Adapted(layer)
    return found


def changed_settings(
    before: Mapping[int, Mapping[str, Any]], now: Mapping[int, Mapping[str, Any]]
) -> dict[int, dict[str, Any]]:
    """The settings that differ, of layers that are in both."""
    return {
        key: {
            name: value
            for name, value in own.items()
            if name not in before[key] or not _are_equal(before[key][name], value)
        }
        for key, own in now.items()
        if key in before
    }


class _Adapted:
    """What `adapt`, or a given vocabulary, has replaced in a layer."""

    def __init__(self, layer: keras.Layer):
        self._parts = [getattr(layer, name, None) for name in ("mean", "lookup_table")]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Adapted)
        return all(one is part for one, part in zip(self._parts, other._parts))

    __hash__ = None  # type: ignore[assignment]


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, types.FunctionType):
        return not any(isinstance(one, keras.layers.Layer) for one in _kept_by(value))
    return isinstance(value, _PLAIN)


def _kept_by(function: types.FunctionType) -> Iterator[Any]:
    """What a function has from where it was made: the defaults, and the variables around it."""
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it has no value yet
            yield cell.cell_contents


def _copied(value: Any) -> Any:
    """A plain value without Keras's wrappers of containers, which know their layer."""
    if isinstance(value, Mapping):
        return {key: _copied(part) for key, part in value.items()}
    if type(value) is tuple:
        return tuple(map(_copied, value))
    if isinstance(value, list):
        return list(map(_copied, value))
    return value.copy() if isinstance(value, np.ndarray) else value


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return type(one) is type(other) and bool(one == other)


def flags_of(template: keras.Model) -> dict[int, bool]:
    """Whether each layer and each weight is trained, by its `id`."""
    return {id(one): one.trainable for one in (*template._flatten_layers(), *template.variables)}


def frozen_apart(
    template: keras.Model, model: keras.Model, flags: Mapping[int, bool]
) -> Iterator[Any]:
    """The layers and weights of a clone that were frozen or unfrozen alone.

    `flags`: those of the template, and of the clone, before.
    """
    for one, own in (*pairs(template, model), *zip(template.variables, model.variables)):
        if own.trainable not in (one.trainable, flags.get(id(one), own.trainable)):
            yield own


def follow(
    template: keras.Model, model: keras.Model, changed: Mapping[int, Mapping[str, Any]]
) -> None:
    """Freezes and unfreezes a clone's layers like the template's, and changes their settings.

    `changed`: new values of settings, by the `id` of the template's layer.
    """
    for layer, own in pairs(template, model):
        if own.trainable != layer.trainable:
            own.trainable = layer.trainable
        settings = dict(changed.get(id(layer), {}))
        if settings.pop(_ADAPTED, None) is not None:
            engines.current().in_fresh_thread(functools.partial(_adapt_alike, layer, own))
        for name, value in settings.items():
            setattr(own, name, _copied(value))
    for variable, own in zip(template.variables, model.variables):
        if own.trainable != variable.trainable:
            own.trainable = variable.trainable


def _adapt_alike(layer: keras.Layer, own: keras.Layer) -> None:
    """Gives a clone's layer the statistics, or the words, of the template's."""
    for variable, mine in zip(layer.variables, own.variables):
        mine.assign(keras.ops.copy(variable))
    if hasattr(layer, "get_vocabulary") and layer.get_vocabulary() != own.get_vocabulary():
        own.set_vocabulary(layer.get_vocabulary(include_special_tokens=False))
    if hasattr(own, "finalize_state"):
        own.finalize_state()


def pairs(template: keras.Model, model: keras.Model) -> Iterator[tuple[Any, Any]]:
    """The layers of a model and of its clone, two by two."""
    # Keras has no public walk over the layers within layers.
    return zip(template._flatten_layers(), model._flatten_layers())
