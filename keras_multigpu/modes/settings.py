"""The settings of layers: plain values that are attributes, and what a layer was adapted to."""

from __future__ import annotations

import contextlib
import enum
import functools
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
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


class Settings:
    """What is set in the layers of a model, and which of its parts are trained, so far.

    Args:
        template: the model.
    """

    def __init__(self, template: keras.Model):
        self._template = template
        self._values = _settings_of(template)
        self._flags: dict[int, bool] = {}

    def follow(self, models: Iterable[keras.Model]) -> None:
        """Changes settings of clones as they have changed in the template; freezes them alike."""
        before, self._values = self._values, _settings_of(self._template)
        now = self._values.items()
        changed = {key: _changed(before[key], own) for key, own in now if key in before}
        for model in models:
            apart = [
                own
                for one, own in _parts(self._template, model)
                if own.trainable not in (one.trainable, self._flags.get(id(one), own.trainable))
            ]
            _follow(self._template, model, changed)
            if apart:
                _warn_of_freezing(model, apart[0])
        both = _parts(self._template, self._template)
        self._flags = {id(one): one.trainable for one, _ in both}


def _settings_of(model: keras.Model) -> dict[int, dict[str, Any]]:
    """The plain values that are attributes of each layer, by the layer's `id`; not Keras's own."""
    found = {}
    for layer in engines.all_layers(model):
        found[id(layer)] = {
            name: _copied(value)
            for name, value in vars(layer).items()
            if name not in _kerass_own() and _is_plain(value)
        }
        if hasattr(layer, "adapt"):
            found[id(layer)][_ADAPTED] = _Adapted(layer)
    return found


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a layer that differ from those before."""
    return {
        name: value
        for name, value in now.items()
        if name not in before or not _are_equal(before[name], value)
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


def pairs(template: keras.Model, model: keras.Model) -> Iterator[tuple[Any, Any]]:
    """The layers of a model and of its clone, two by two."""
    return zip(engines.all_layers(template), engines.all_layers(model))


def _parts(template: keras.Model, model: keras.Model) -> Iterator[tuple[Any, Any]]:
    """What can be frozen in a model and in its clone, two by two: layers, then their weights."""
    yield from pairs(template, model)
    yield from zip(template.variables, model.variables)


def _warn_of_freezing(model: keras.Model, one: Any) -> None:
    """Warns of a layer, or a weight, that is `trainable` as the template's again."""
    warnings.warn(
        "The members of a committee are frozen and unfrozen as their template is. Received: "
        f"trainable={not one.trainable} for {one.name!r} in the member {model.name!r}, which is "
        "undone. Set it in `parallel.template`, and so in all members: one alone can't be frozen.",
        stacklevel=4,
    )


def _follow(
    template: keras.Model, model: keras.Model, changed: Mapping[int, Mapping[str, Any]]
) -> None:
    """Freezes and unfreezes a clone's parts like the template's, and changes its settings.

    `changed`: new values of settings, by the `id` of the template's layer.
    """
    for layer, own in pairs(template, model):
        settings = dict(changed.get(id(layer), {}))
        if settings.pop(_ADAPTED, None) is not None:
            engines.current().in_fresh_thread(functools.partial(_adapt_alike, layer, own))
        for name, value in settings.items():
            setattr(own, name, _copied(value))
    for one, own in _parts(template, model):
        if own.trainable != one.trainable:
            own.trainable = one.trainable


def _adapt_alike(layer: keras.Layer, own: keras.Layer) -> None:
    """Gives a clone's layer the statistics, or the words, of the template's."""
    for variable, mine in zip(layer.variables, own.variables):
        mine.assign(keras.ops.copy(variable))
    if hasattr(layer, "get_vocabulary") and layer.get_vocabulary() != own.get_vocabulary():
        own.set_vocabulary(layer.get_vocabulary(include_special_tokens=False))
    if hasattr(own, "finalize_state"):
        own.finalize_state()
