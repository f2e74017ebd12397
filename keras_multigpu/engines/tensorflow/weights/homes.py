"""Homes: where the weights of a data-parallel model are stored, with their slots.

The homes are balanced by bytes, so each of n devices keeps and updates an nth of the weights and of
the optimizer's slots. A weight that is too large for that is divided among all devices. Every step
sends each weight from its home to all devices, and sums its gradient there (`exchange.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import keras
import tensorflow as tf

from keras_multigpu.engines.shared import unique
from keras_multigpu.engines.tensorflow.names import full_name
from keras_multigpu.engines.tensorflow.weights.division import Division
from keras_multigpu.engines.tensorflow.weights.lookups import is_table
from keras_multigpu.engines.tensorflow.weights.placing import move_variables

# What a trained weight takes at home, in its own bytes: the weight and two slots, as Adam has.
_WITH_SLOTS = 3
# Smaller weights, in bytes, are never divided: each part is updated by operations of its own.
_LEAST_DIVIDED = 2**16
# Tables of so many bytes are always divided by rows, which are looked up where they are. Indices
# and sums then take fewer bytes than the table, for batches of some thousand rows.
_LEAST_BY_ROWS = 2**20
# No device may keep more than this part of an even share, if dividing weights helps.
_MOST = 1.05

_Home = str | Division


class Homes:
    """Where each weight of a model is stored.

    Args:
        devices: the devices to spread the weights over.
    """

    def __init__(self, devices: Sequence[str]):
        self._loads = dict.fromkeys(map(full_name, devices), 0)
        self._homes: dict[int, tuple[keras.Variable, _Home]] = {}
        self._taken: dict[int, dict[str, int]] = {}  # the bytes of each, by device

    def put(self, model: keras.Model) -> None:
        """Moves the weights of a model home; those that it has no longer have no home."""
        known = set(map(id, model.weights))
        for key in self._homes.keys() - known:
            del self._homes[key]
            for device, size in self._taken.pop(key).items():
                self._loads[device] -= size
        new = [one for one in unique(list(model.weights)) if id(one) not in self._homes]
        found = _find_homes(new, self._loads)
        for weight in new:
            self._homes[id(weight)] = weight, found[id(weight)]
            self._taken[id(weight)] = _bytes_by_device(*self._homes[id(weight)])
            for device, size in self._taken[id(weight)].items():
                self._loads[device] += size
        move_variables([*self._homes.values()], model)

    @property
    def placement(self) -> dict[str, tuple[int, ...]]:
        """How many elements each device keeps of a weight, by the weight's path."""
        found = {}
        for weight, home in self._homes.values():
            kept = _elements_by_device(weight, home)
            found[weight.path] = tuple(kept.get(device, 0) for device in self._loads)
        return found


def fullest_home(weights: Iterable[keras.Variable], count: int) -> float:
    """The share of all bytes that the fullest of `count` homes would have."""
    loads = dict.fromkeys(map(str, range(count)), 0)
    known = unique(list(weights))
    homes = _find_homes(known, loads)
    for weight in known:
        for device, size in _bytes_by_device(weight, homes[id(weight)]).items():
            loads[device] += size
    return max(loads.values()) / max(1, sum(loads.values()))


def tables_by_rows(weights: Iterable[keras.Variable], count: int) -> list[keras.Variable]:
    """The tables that `count` homes would look up where they are."""
    return [one for one in unique(list(weights)) if count > 1 and _is_by_rows(one)]


def _is_by_rows(weight: keras.Variable) -> bool:
    return is_table(weight) and _bytes_of(weight) >= _LEAST_BY_ROWS


def _find_homes(weights: Sequence[keras.Variable], before: Mapping[str, int]) -> dict[int, _Home]:
    """Chooses homes for weights: each, the largest first, where least is; divides large ones.

    `before` are the bytes that each device has already.
    """
    divided: dict[int, _Home] = {}
    for weight in filter(_is_by_rows, weights):  # rows are looked up where they are
        devices = _turned([*before], len(divided))
        division = Division.even(tuple(weight.shape), devices, axis=0)
        if division is not None and len(devices) > 1:
            divided[id(weight)] = division
    while True:
        homes, loads = dict(divided), dict(before)
        for weight in sorted(weights, key=_bytes_at_home, reverse=True):
            if id(weight) not in divided:
                homes[id(weight)] = min(loads, key=loads.__getitem__)
            for device, size in _bytes_by_device(weight, homes[id(weight)]).items():
                loads[device] += size
        fullest = max(loads, key=loads.__getitem__)
        if loads[fullest] <= _MOST * sum(loads.values()) / len(loads):
            return homes
        there = [one for one in weights if homes[id(one)] == fullest]
        for weight in sorted(there, key=_bytes_at_home, reverse=True):
            division = Division.even(tuple(weight.shape), _turned([*loads], len(divided)))
            if division is not None and _bytes_of(weight) >= _LEAST_DIVIDED:
                divided[id(weight)] = division
                break
        else:
            return homes


def _turned(devices: list[str], count: int) -> list[str]:
    """The devices for the next divided weight: where it is joined, another one for each."""
    first = count % len(devices)
    return devices[first:] + devices[:first]


def _elements_by_device(weight: keras.Variable, home: _Home) -> dict[str, int]:
    elements = math.prod(weight.shape)
    if not isinstance(home, Division):
        return {home: elements}
    row = elements // weight.shape[home.axis]
    return {device: size * row for device, size in zip(home.devices, home.sizes)}


def _bytes_by_device(weight: keras.Variable, home: _Home) -> dict[str, int]:
    each = tf.as_dtype(weight._value.dtype).size * (_WITH_SLOTS if weight.trainable else 1)
    return {device: size * each for device, size in _elements_by_device(weight, home).items()}


def _bytes_of(weight: keras.Variable) -> int:
    return math.prod(weight.shape) * tf.as_dtype(weight._value.dtype).size


def _bytes_at_home(weight: keras.Variable) -> int:
    return _bytes_of(weight) * (_WITH_SLOTS if weight.trainable else 1)
