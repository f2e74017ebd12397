"""Where `shard` keeps weights and slots: each device has a slice of every variable worth cutting.

A step gathers the weights on all devices, and each device gets the sum of the gradients of its
slices: the partitioner knows them as `Sharded`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import keras

from keras_multigpu.engines.shared import unique
from keras_multigpu.engines.tensorflow.weights.divided import division_of
from keras_multigpu.engines.tensorflow.weights.division import Division, Others
from keras_multigpu.engines.tensorflow.weights.placing import move_variable
from keras_multigpu.engines.wide import find_wide, names_of

# Elements of a variable that is cut; smaller ones are on the first device, of each process.
LEAST = 1024


@dataclasses.dataclass(frozen=True)
class Homes:
    """Where variables are kept.

    Attributes:
        devices: the devices.
        others: the processes that have some of them.
        axes: by a variable's shape, the axis along which it is cut; `None` for the longest one of
            all that are worth cutting.
    """

    devices: tuple[str, ...]
    axes: Mapping[tuple[int, ...], int] | None = None
    others: Others | None = None

    def of(self, shape: Sequence[int]) -> Division | str:
        """Where a variable of this shape is kept: in slices of an axis, or whole."""
        shape = tuple(shape)
        if self.axes is not None:
            axis = self.axes.get(shape)
            division = None if axis is None else Division.even(shape, self.devices, axis)
        else:
            is_large = math.prod(shape) >= LEAST
            is_cut = is_large and len(self.devices) > 1
            division = Division.even(shape, self.devices, None, self.others) if is_cut else None
        first = 0 if self.others is None else self.others.own[0]
        return self.devices[first] if division is None else division

    def lay_out(self, variables: Iterable[keras.Variable]) -> bool:
        """Moves variables to where they are kept; returns whether one was elsewhere."""
        moved = [move_variable(one, self.of(one.shape)) for one in unique(list(variables))]
        return any(moved)


def wide_homes(template: keras.Model, devices: Sequence[str]) -> Homes:
    """Where a model's variables are if large layers are spread over devices."""
    axes: dict[tuple[int, ...], int] = {}
    if len(devices) > 1:
        found, names = find_wide(template, len(devices)), names_of(template)
        for variable in template.variables:
            if names[id(variable)] in found:
                # Slots are known by their shapes: equal ones are cut alike.
                axes.setdefault(tuple(variable.shape), found[names[id(variable)]])
    return Homes(tuple(devices), axes)


def _of_numbers(count: int) -> Homes:
    """Homes on devices of which nothing is known."""
    return Homes(tuple(map(str, range(count))))


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
    found = [math.prod(division.shape_of(number)) for number in range(len(division.sizes))]
    return (*found, *[0] * (count - len(found)))


def fullest_home(weights: Iterable[keras.Variable], count: int) -> float:
    """The share of all elements that the fullest of `count` devices would have: the first."""
    homes = _of_numbers(count)
    kept = [(one.shape, homes.of(one.shape)) for one in unique(list(weights))]
    first = sum(_elements(shape, home, count)[0] for shape, home in kept)
    return first / max(1, sum(math.prod(shape) for shape, _ in kept))


def tables_by_rows(weights: Iterable[keras.Variable], count: int) -> list[keras.Variable]:
    """The tables whose rows `count` devices look up where they are."""
    homes, found = _of_numbers(count), []
    for one in unique(list(weights)):
        home = homes.of(one.shape)
        if hasattr(one, "names_rows_once") and isinstance(home, Division) and not home.axis:
            found.append(one)
    return found
