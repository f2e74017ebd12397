"""How a variable is divided over devices, and how values are divided like it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from keras_multigpu.engines.values import Tensor


class Others(Protocol):
    """Other processes, which have some of a variable's parts."""

    @property
    def own(self) -> Sequence[int]:
        """The numbers of the parts that this process has."""

    def add(self, variable: Any, value: np.ndarray) -> int:
        """Takes a new variable; gives its number, which is alike in all processes."""

    def read(self, variable: Any) -> np.ndarray:
        """The whole value, which all processes read together."""

    def join(self, own: Tensor, division: Division) -> Tensor:
        """The whole value, in a step that all processes make, from what this one has of it."""

    def meet(self, variable: Any, value: Tensor) -> None:
        """Waits until all processes are about to assign the value."""


@dataclasses.dataclass(frozen=True)
class Division:
    """How a variable of a shape is divided: part i is `sizes[i]` long on the axis.

    It is at `homes[i]`: on a device, or divided again. `others` are the processes that have some of
    the parts, if this one has not all.
    """

    shape: tuple[int, ...]
    homes: tuple[str | Division, ...]
    axis: int
    sizes: tuple[int, ...]
    others: Others | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def own(self) -> Sequence[int]:
        """The numbers of the parts that this process has."""
        return range(len(self.sizes)) if self.others is None else self.others.own

    @classmethod
    def even(
        cls,
        shape: Sequence[int],
        devices: Sequence[str],
        axis: int | None = None,
        others: Others | None = None,
    ) -> Division | None:
        """Divides the longest axis, or another one, as evenly as it goes.

        Returns `None` if the axis is too short.
        """
        if axis is None:
            axis = max(range(len(shape)), key=shape.__getitem__, default=None)
        if axis is None or shape[axis] < len(devices):
            return None
        each, left = divmod(shape[axis], len(devices))
        sizes = (each + (place < left) for place in range(len(devices)))
        return cls(tuple(shape), tuple(devices), axis, tuple(sizes), others)

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each part; this process's first of those over which it is divided again."""
        return tuple(
            one.devices[one.own[0]] if isinstance(one, Division) else one for one in self.homes
        )

    @property
    def is_here(self) -> bool:
        """Whether this process has all of it."""
        again = [one for one in self.homes if isinstance(one, Division)]
        return self.others is None and all(one.is_here for one in again)

    @property
    def is_again(self) -> bool:
        """Whether parts are divided again."""
        return any(isinstance(home, Division) for home in self.homes)

    def shape_of(self, number: int) -> tuple[int, ...]:
        """The shape of a part, which may be divided again."""
        return (*self.shape[: self.axis], self.sizes[number], *self.shape[self.axis + 1 :])

    def again(self, columns: Sequence[Sequence[str]], others: Others | None) -> Division:
        """Divides each part over the devices of a column, of which this process has one or more."""
        again = (
            Division.even(self.shape_of(number), column, others=others)
            for number, column in enumerate(columns)
        )
        homes = (made or home for made, home in zip(again, self.homes))
        return dataclasses.replace(self, homes=tuple(homes))

    def leaves(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The device and the shape of each part that is not divided again."""
        for number, home in enumerate(self.homes):
            if isinstance(home, Division):
                yield from home.leaves()
            else:
                yield home, self.shape_of(number)

    def start_of(self, number: int) -> int:
        """Where a part begins on the axis."""
        return sum(self.sizes[:number])

    def split(self, value: Tensor) -> list[Tensor]:
        """This process's parts of a dense value, or of the rows of a sparse gradient."""
        if not isinstance(value, tf.IndexedSlices):
            pieces = tf.split(value, self.sizes, self.axis)
            return [pieces[i] for i in self.own]
        if self.axis:
            pieces = tf.split(value.values, self.sizes, self.axis)
            return [self._rows(pieces[i], value.indices, i) for i in self.own]
        found = []
        for i in self.own:
            rows = value.indices - self.start_of(i)
            is_own = (rows >= 0) & (rows < self.sizes[i])
            own = tf.boolean_mask(value.values, is_own), tf.boolean_mask(rows, is_own)
            found.append(self._rows(*own, i))
        return found

    def _rows(self, values: Tensor, rows: Tensor, number: int) -> tf.IndexedSlices:
        return tf.IndexedSlices(values, rows, tf.constant(self.shape_of(number), rows.dtype))
