"""How a tensor of the traced step lies on the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.constants import Constant
from keras_multigpu.engines.tensorflow.partition.program import Item
from keras_multigpu.engines.tensorflow.partition.sizes import Dims, quotient, symbols_of


@dataclasses.dataclass(frozen=True)
class Whole:
    """On one device: the one that computed it. Others copy it when they use it."""


@dataclasses.dataclass(frozen=True)
class Copied:
    """The whole tensor, on each device."""


@dataclasses.dataclass(frozen=True)
class Split:
    """Each device has a slice of an axis, in the devices' order.

    The axis has a multiple of the batch's rows; a device has that multiple of its own rows. The
    devices' rows differ by at most one, and may be none.
    """

    axis: int


@dataclasses.dataclass(frozen=True)
class Joined:
    """Each device has its slices of several tensors that are joined along an axis, one by one.

    Attributes:
        axis: the axis.
        rows: whose slices they are, as for `Unit`.
        times: for each of the tensors, how many entries of the axis belong to a row.
    """

    axis: int
    rows: Any
    times: tuple[Any, ...]

    @property
    def size(self) -> Any:
        """The number of entries."""
        return self.rows * sum(self.times)

    def along(self, axis: int, dim: Any) -> Joined | None:
        """The same for an axis of so many entries; `None` if they are none of each row."""
        times = tuple(quotient(dim * one, self.size) for one in self.times)
        return None if None in times else Joined(axis, self.rows, times)


@dataclasses.dataclass(frozen=True)
class Sharded:
    """Each device has a fixed slice of an axis that has no rows: weights, slots and gradients.

    The slices differ by at most one entry. See `Local.extent`.
    """

    axis: int


@dataclasses.dataclass(frozen=True)
class Owned:
    """Each device has the entries of an axis that belong to its shard of a table, however many."""

    axis: int = 0


@dataclasses.dataclass(frozen=True)
class Partial:
    """Each device has an addend: the tensor is their sum, or other `kind` of reduction."""

    kind: str


@dataclasses.dataclass(frozen=True)
class Listed:
    """Each device has a list of the elements of its rows, within a loop over the rows."""


Layout: TypeAlias = Whole | Copied | Split | Joined | Sharded | Owned | Partial | Listed
WHOLE, COPIED, SUM, LISTED = Whole(), Copied(), Partial("sum"), Listed()

Make: TypeAlias = Callable[[Layout], "Item | None"]


@dataclasses.dataclass(frozen=True)
class Kept:
    """What is known of the tensor, or list, in an optional; `axis` is that of devices' slices."""

    dims: tuple[Any, ...] | None = None
    axis: int | None = None
    const: tuple[Any, ...] | None = None
    of: Elements | None = None


@dataclasses.dataclass(frozen=True)
class Elements:
    """What is known of the elements of a tensor list, or of the value of a sharded variable.

    `dims` is `None` while nothing is known; a dimension that differs between elements is `None`.
    `count` is their number, if it is known. `row_of`: as of a `Value`. `of` is what is known of the
    elements of those that are lists, which lie as the list does. `kept` is what optionals hold, by
    the number of the branch that keeps it; `None` if it is the only one.
    """

    dims: tuple[Any, ...] | None = None
    const: tuple[Any, ...] | None = None
    is_constant: bool = True
    count: Any = None
    row_of: Any = None
    of: Elements | None = None
    kept: tuple[tuple[int | None, Kept], ...] | None = None

    @property
    def are_optionals(self) -> bool:
        """Whether it is an optional, or a list of such."""
        return self.kept is not None or (self.of is not None and self.of.are_optionals)

    @property
    def tensor_dims(self) -> tuple[Any, ...] | None:
        """The dimensions of the tensors in it, or in its lists."""
        return self.dims if self.of is None else self.of.tensor_dims


@dataclasses.dataclass(eq=False)
class Value:
    """A tensor of the traced step, as the plan knows it.

    Attributes:
        dtype: its type.
        dims: its dimensions; `None` if not even their number is known.
        layout: the layout in which it was computed.
        forms: the program's item for each layout that it was computed in, or brought to.
        make: computes it in a layout, or returns `None` if it can't; for values that need no rows
            and are computed where they are used: shapes, fills, random numbers.
        const: the numbers and dimensions of a small integer tensor.
        elements: of a tensor list, or of a sharded variable.
        is_trained: whether it is a weight that is trained, or a gradient.
        is_state: whether it is a variable's, or made of variables alone: none of its axes is the
            batch, even if it is as long.
        row_of: how many rows a loop goes through, if it is the number of the row that it is at.
        known: what else is known of it: `("numbers", n)`, it is 0, 1, ... up to n, of the rows;
            `("more", a, b)`, it says whether a > b.
        is_drawn: whether it is random numbers for the batch's rows, which are of a seed's state.
        is_update: whether it is a gradient of a weight, or made of one.
        variable: the name of the variable whose resource it is.
    """

    dtype: tf.DType
    dims: Dims | None
    layout: Layout = WHOLE
    forms: dict[Layout, Item] = dataclasses.field(default_factory=dict)
    make: Make | None = None
    const: Constant | None = None
    elements: Elements | None = None
    is_trained: bool = False
    is_state: bool = False
    known: tuple[Any, ...] | None = None
    is_drawn: bool = False
    row_of: Any = None
    is_update: bool = False
    variable: str = ""

    @property
    def rank(self) -> int:
        """The number of its axes; 0 if it isn't known."""
        return len(self.dims or ())

    @property
    def axis(self) -> int | None:
        """The axis along which it is split."""
        return self.layout.axis if isinstance(self.layout, Split) else None

    @property
    def is_sharded(self) -> bool:
        """Whether each device has its part, whatever rows it has."""
        return isinstance(self.layout, (Sharded, Owned))

    @property
    def is_spread(self) -> bool:
        """Whether the devices hold different parts of it, that depend on the batch's rows."""
        return isinstance(self.layout, (Split, Joined, Partial))

    @property
    def rows_axis(self) -> int | None:
        """The axis of which the devices have rows, in whatever order."""
        return self.layout.axis if isinstance(self.layout, (Split, Joined)) else None

    @property
    def is_free(self) -> bool:
        """Whether each device can compute it in any layout; rows from outside have theirs."""
        return self.const is not None or (self.make is not None and self.axis is None)

    @property
    def is_data(self) -> bool:
        """Whether it is numbers on one device that are not of variables alone."""
        is_other = not self.dtype.is_floating or self.is_free or self.is_spread
        is_of_state = (self.is_state or self.is_update) and not symbols_of(self.dims or ())
        return not (is_other or is_of_state or self.dims == ())
