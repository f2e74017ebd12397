"""What a call of a template leaves: the tensors in its outputs, and what is beside them."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu.engines import templates
from keras_multigpu.engines.attributes import get_attributes, set_attributes
from keras_multigpu.engines.values import Result, Tensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, np.ndarray, np.generic)


class Noted:
    """A call that notes losses, and what Keras attaches to outputs."""

    def __init__(self, template: keras.Model):
        self._template = template
        self._restore: Any = None
        self._names: list[list[str]] = []

    def call(self, args: Any, kwargs: Any) -> Any:
        """Tensors of the outputs, of what is attached to them, and of the losses."""
        template = self._template
        templates.forget_losses(template)
        tensors, self._restore = _take_apart(template(*args, **kwargs))
        attached = list(map(get_attributes, tensors))
        self._names = [list(one) for one in attached]
        penalties = [one for one in template.trainable_weights if one.regularizer is not None]
        losses = template.losses
        losses = losses[: len(losses) - len(penalties)]
        templates.forget_losses(template)
        return tensors, [list(one.values()) for one in attached], losses

    def result(self, tensors: Any, attached: Any, losses: Any) -> Result:
        """The call's result, of the tensors that the devices computed."""
        for one, names, values in zip(tensors, self._names, attached):
            set_attributes(one, dict(zip(names, values)))
        return Result(self._restore(tensors), losses=losses)


class OpaqueError(TypeError):
    """A value in which tensors can't be found."""


def _take_apart(value: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The tensors of a structure, and a function that replaces them.

    Unlike `keras.tree` it also opens dataclasses and subclasses of `dict`, which a model's `call`
    may return. Plain Python values stay.

    Raises:
        OpaqueError: for any other object, which may hide tensors.
    """
    if keras.ops.is_tensor(value):
        return [value], lambda tensors: tensors[0]
    if isinstance(value, _PLAIN):
        return [], lambda tensors: value
    names, parts, make = _open(value)
    opened = [_take_apart(part) for part in parts]
    tensors = [tensor for own, _ in opened for tensor in own]

    def rebuild(others: Sequence[Tensor]) -> Any:
        rest, made = list(others), []
        for own, restore in opened:
            made.append(restore(rest[: len(own)]))
            del rest[: len(own)]
        return make(dict(zip(names, made)))

    return tensors, rebuild


def _open(value: Any) -> tuple[list[Any], list[Any], Callable[[dict[Any, Any]], Any]]:
    """The names and parts of a container, and a function that rebuilds it from other parts."""
    if isinstance(value, Mapping):
        return list(value), list(value.values()), lambda parts: _like_mapping(value, parts)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(value._fields), list(value), lambda parts: type(value)(**parts)
    if isinstance(value, (list, tuple)):
        kind = list if isinstance(value, list) else tuple
        return list(range(len(value))), list(value), lambda parts: kind(parts.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        parts = [getattr(value, name) for name in names]
        return names, parts, lambda parts: dataclasses.replace(value, **parts)
    raise OpaqueError(
        f"`call` returns an object of type {type(value).__name__}, in which tensors can't be found"
    )


def _like_mapping(value: Any, parts: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return dict(parts)
    made = copy.copy(value)
    for name, part in parts.items():
        made[name] = part
    return made
