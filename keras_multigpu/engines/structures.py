"""The tensors in whatever a model's `call` returns."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu.engines.values import Tensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, np.ndarray, np.generic)


class OpaqueError(TypeError):
    """A value in which tensors can't be found."""


def take_apart(value: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
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
    opened = [take_apart(part) for part in parts]
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
