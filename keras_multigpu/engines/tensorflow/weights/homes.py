"""Where `shard` keeps weights and slots: each device has a slice of every variable worth cutting.

A step gathers the weights on all devices, and each device gets the sum of the gradients of its
slices: the partitioner knows them as `Sharded`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from keras_multigpu.engines.shared import unique
from keras_multigpu.engines.tensorflow.weights.divided import division_of
from keras_multigpu.engines.tensorflow.weights.division import Division, Others
from keras_multigpu.engines.tensorflow.weights.placing import move_variable
from keras_multigpu.engines.wide import wide_variables

# Elements of a variable that is cut; smaller ones are on the first device, of each process.
LEAST = 1024


@dataclasses.dataclass(frozen=True)
class Homes:
    """Where variables are kept.

    Attributes:
        columns: the devices. Those of a column share what the column has of a variable.
        axes: by a variable's shape, the axis along which it is cut.
        cuts_all: whether others are, too, along the longest axis, if they are worth it.
        others: the processes that have some of the devices.
    """

    columns: tuple[tuple[str, ...], ...]
    axes: Mapping[tuple[int, ...], int] = dataclasses.field(default_factory=dict)
    cuts_all: bool = True
    others: Others | None = None

    @classmethod
    def on(cls, devices: Iterable[str], **options: Any) -> Homes:
        """Homes on devices each of which has its own part."""
        return cls(tuple((device,) for device in devices), **options)

    @property
    def are_again(self) -> bool:
        """Whether the devices of a column divide what the column has."""
        return any(len(column) > 1 for column in self.columns)

    def of(self, shape: Sequence[int]) -> Division | str:
        """Where a variable of this shape is kept: in slices of an axis, or whole."""
        shape, own = tuple(shape), 0 if self.others is None else self.others.own[0]
        axis = self.axes.get(shape)
        is_cut = axis is not None or (self.cuts_all and math.prod(shape) >= LEAST)
        is_cut = is_cut and len(self.columns) > 1
        if not self.are_again:
            devices = [column[0] for column in self.columns]
            division = Division.even(shape, devices, axis, self.others) if is_cut else None
            return devices[own] if division is None else division
        devices = [column[own] for column in self.columns]
        division = Division.even(shape, devices, axis) if is_cut else None
        return devices[0] if division is None else division.again(self.columns, self.others)

    def lay_out(self, variables: Iterable[keras.Variable]) -> bool:
        """Moves variables to where they are kept; returns whether one was elsewhere."""
        moved = [move_variable(one, self.of(one.shape)) for one in unique(list(variables))]
        return any(moved)


def wide_homes(template: keras.Model, columns: Sequence[Sequence[str]], **options: Any) -> Homes:
    """Where a model's variables are if large layers are spread over columns of devices.

    `options` are those of `Homes`.
    """
    axes: dict[tuple[int, ...], int] = {}
    if len(columns) > 1:
        for variable, axis in wide_variables(template, len(columns)):
            # Slots are known by their shapes: equal ones are cut alike.
            axes.setdefault(tuple(variable.shape), axis)
    return Homes(tuple(map(tuple, columns)), axes, **options)


def _of_numbers(count: int) -> Homes:
    """Homes on devices of which nothing is known."""
    return Homes.on(map(str, range(count)))


def make_whole(variables: Iterable[keras.Variable], device: str) -> bool:
    """Joins the variables that are cut, on a device; returns whether there were any."""
    moved = [
        move_variable(one, device)
        for one in unique(list(variables))
        if division_of(one) is not None
    ]
    return any(moved)


def elements_of(variable: keras.Variable, devices: Sequence[str]) -> tuple[int, ...]:
    """How many elements each device keeps of a variable."""
    return _elements(variable.shape, division_of(variable), devices)


def _elements(
    shape: Sequence[int], home: Division | str | None, devices: Sequence[str]
) -> tuple[int, ...]:
    if not isinstance(home, Division):
        return (math.prod(shape), *[0] * (len(devices) - 1))
    found = {device: math.prod(part) for device, part in home.leaves()}
    return tuple(found.get(device, 0) for device in devices)


def fullest_home(weights: Iterable[keras.Variable], count: int) -> float:
    """The share of all elements that the fullest of `count` devices would have: the first."""
    homes = _of_numbers(count)
    kept = [(one.shape, homes.of(one.shape)) for one in unique(list(weights))]
    first = sum(_elements(shape, home, ["0"])[0] for shape, home in kept)
    return first / max(1, sum(math.prod(shape) for shape, _ in kept))


def tables_by_rows(weights: Iterable[keras.Variable], count: int) -> list[keras.Variable]:
    """The tables whose rows `count` devices look up where they are."""
    homes, found = _of_numbers(count), []
    for one in unique(list(weights)):
        home = homes.of(one.shape)
        if hasattr(one, "names_rows_once") and isinstance(home, Division) and not home.axis:
            found.append(one)
    return found
