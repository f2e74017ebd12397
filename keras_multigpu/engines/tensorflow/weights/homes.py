"""Where `shard` keeps weights and slots: each device has a slice of every variable worth cutting.

A step gathers the weights on all devices, and each device gets the sum of the gradients of its
slices: the partitioner knows them as `Sharded`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import keras

from keras_multigpu.engines.shared import unique
from keras_multigpu.engines.tensorflow.weights.divided import division_of
from keras_multigpu.engines.tensorflow.weights.division import Division
from keras_multigpu.engines.tensorflow.weights.placing import move_variable

LEAST = 1024  # elements of a variable that is cut; smaller ones are on the first device


def home_of(shape: Sequence[int], devices: Sequence[str]) -> Division | str:
    """Where a variable of this shape is kept: in slices of its longest axis, or whole."""
    is_large = math.prod(shape) >= LEAST and len(devices) > 1
    division = Division.even(tuple(shape), devices) if is_large else None
    return devices[0] if division is None else division


def lay_out(variables: Iterable[keras.Variable], devices: Sequence[str]) -> bool:
    """Moves variables to where they are kept; returns whether one was elsewhere."""
    moved = [move_variable(one, home_of(one.shape, devices)) for one in unique(list(variables))]
    return any(moved)


def make_whole(variables: Iterable[keras.Variable], device: str) -> bool:
    """Joins the variables that are cut, on a device; returns whether there were any."""
    moved = [
        move_variable(one, device)
        for one in unique(list(variables))
        if division_of(one) is not None
    ]
    return any(moved)


def elements_of(variable: keras.Variable, count: int) -> tuple[int, ...]:
    """How many elements each of `count` devices keeps of a variable."""
    return _elements(variable.shape, division_of(variable), count)


def _elements(shape: Sequence[int], division: Division | str | None, count: int) -> tuple[int, ...]:
    if not isinstance(division, Division):
        return (math.prod(shape), *[0] * (count - 1))
    return tuple(math.prod(division.shape_of(number)) for number in range(count))


def fullest_home(weights: Iterable[keras.Variable], count: int) -> float:
    """The share of all elements that the fullest of `count` devices would have: the first."""
    devices = list(map(str, range(count)))
    kept = [(one.shape, home_of(one.shape, devices)) for one in unique(list(weights))]
    first = sum(_elements(shape, home, count)[0] for shape, home in kept)
    return first / max(1, sum(math.prod(shape) for shape, _ in kept))


def tables_by_rows(weights: Iterable[keras.Variable], count: int) -> list[keras.Variable]:
    """The tables whose rows `count` devices look up where they are."""
    devices = list(map(str, range(count)))
    found = []
    for one in unique(list(weights)):
        home = home_of(one.shape, devices)
        if hasattr(one, "names_rows_once") and isinstance(home, Division) and not home.axis:
            found.append(one)
    return found
