"""The forms of tensors: the layouts in which devices have them, and how they get others."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.shared import LARGE_BATCH
from keras_multigpu.engines.tensorflow.partition import crossings
from keras_multigpu.engines.tensorflow.partition.layouts import (
    COPIED,
    SUM,
    WHOLE,
    Copied,
    Joined,
    Layout,
    Listed,
    Owned,
    Partial,
    Sharded,
    Split,
    Value,
    Whole,
)
from keras_multigpu.engines.tensorflow.partition.program import ALL, EACH, Crossing, Item, Program
from keras_multigpu.engines.tensorflow.partition.sizes import (
    ROWS,
    SIZE,
    Dim,
    Unit,
    is_known,
    symbols_of,
    unit_of,
)

ALL_DEVICES, EACH_DEVICE, ONE_DEVICE = "all", "each", "one"
"""What a planner plans: what all devices do together; what each does for its rows, where nothing
can cross and what is whole is on each device; what one device does for all."""


class NeedsOthers(Exception):  # noqa: N818 - an answer, caught where the question is asked
    """A device's part needs the other devices."""


@dataclasses.dataclass
class Expected:
    """The rows of the batches that a step is planned for, where only its run knows them.

    A plan is good for `most` rows: with more, other things are better sent.
    """

    rows: int = LARGE_BATCH
    most: float = math.inf


class Forms:
    """Brings values into layouts, as nodes of a program.

    Args:
        count: the number of devices.
        batch: the number of rows: a `Dim`, or the number itself.
        way: `ALL_DEVICES`, `EACH_DEVICE` or `ONE_DEVICE`.
        names: numbers for the names of symbols.

    Attributes:
        is_joined: whether there are devices of other processes, which get numbers only.
        shares: in how many parts variables are; other processes may have more of them.
        is_within: whether it is a function's program, within the step's.
        branch: the number of a branch that is planned.
        expected: how many rows there may be.
        splits: whether what has rows is split.
        rows: numbers of rows beside the batch's, where they have no symbols of their own.
    """

    is_joined = False
    is_within = False
    branch: int | None = None

    def __init__(
        self, count: int, batch: Any, *, way: str = ALL_DEVICES, names: Iterator[int] | None = None
    ):
        self.count, self.batch, self.way, self.shares = count, batch, way, count
        self.names = itertools.count() if names is None else names
        self.program, self.expected = Program(), Expected()
        self.splits = way != ONE_DEVICE
        self.rows: set[Any] = set()

    @property
    def own_symbols(self) -> set[str]:
        """Symbols that nobody outside knows."""
        return set()

    @property
    def is_alone(self) -> bool:
        """Whether it plans what each device does without the others."""
        return self.way == EACH_DEVICE

    # Sizes

    def unit_of(self, dim: Any) -> Unit | None:
        """As `multiple_of`; `None` where nothing is split."""
        return self.multiple_of(dim) if self.splits else None

    def multiple_of(self, dim: Any) -> Unit | None:
        """The rows that a dimension is a multiple of; `None` if it is of none."""
        if dim is None or (isinstance(dim, int) and dim == 0):
            return None
        return unit_of(dim, self.batch, self.rows)

    def has_rows(self, dims: Any) -> bool:
        """Whether a dimension is a multiple of the batch's rows."""
        return any(self.unit_of(dim) is not None for dim in dims or ())

    def value(
        self,
        dtype: tf.DType,
        dims: Any,
        layout: Layout = WHOLE,
        item: Item | None = None,
        **more: Any,
    ) -> Value:
        """A value with its item; dimensions that aren't known become symbols."""
        forms = {} if item is None else {layout: item}
        return self.with_symbols(Value(dtype, dims, layout, forms, **more))

    def with_symbols(self, value: Value) -> Value:
        """A value, with symbols for the dimensions that aren't known."""
        if value.dims is not None and None in value.dims:
            value.dims = tuple(
                self._symbol(value, axis) if dim is None else dim
                for axis, dim in enumerate(value.dims)
            )
        return value

    def _symbol(self, value: Value, axis: int) -> Dim:
        name = f"{SIZE}{next(self.names)}"
        item = next(iter(value.forms.values()))
        assert value.axis != axis, "a split axis is a multiple of the rows"
        self.program.symbols[name] = item, axis
        return Dim.symbol(name)

    def new_rows(self, item: Item) -> Dim:
        """A symbol for the length of an item's first axis: of rows, which are split."""
        name = f"{ROWS}{next(self.names)}"
        self.program.symbols[name] = item, 0
        return Dim.symbol(name)

    # Layouts

    def get(self, value: Value, layout: Layout) -> Item:
        """The item that has a value in a layout."""
        if layout not in value.forms:
            value.forms[layout] = self._convert(value, layout)
        return value.forms[layout]

    def cut_anew(self, value: Value) -> None:
        """Splits what is joined by its rows in their order."""
        if isinstance(value.layout, Joined):
            layout = Split(value.layout.axis)
            self.get(value, layout)
            value.layout = layout

    def _convert(self, value: Value, layout: Layout) -> Item:
        if value.const is not None and isinstance(layout, (Whole, Copied)):
            return self._constant(value, layout)
        made = value.make(layout) if value.make is not None else None
        if made is not None:
            return made
        if self.way != ALL_DEVICES or value.is_free:
            return self._convert_locally(value, layout)
        if value.dtype == tf.resource and value.is_sharded:
            raise NeedsOthers  # no device has the variable
        if isinstance(layout, Whole):
            if COPIED in value.forms:
                return crossings.first(self.program, value.forms[COPIED])
            item = value.forms[value.layout]
            if value.dtype == tf.variant:
                raise NeedsOthers  # the devices' lists are none of all rows
            if self._crosses_with_others(value, value.layout):
                what = self._what("gather", value)
                return crossings.gather_all(self.program, item, value.layout, what)
            if isinstance(value.layout, (Split, Joined, Sharded, Owned)):
                return crossings.gather(self.program, item, value.layout)
            assert isinstance(value.layout, Partial)
            return crossings.reduce(self.program, item, value.layout.kind, self._what("sum", value))
        if isinstance(layout, Copied):
            what = self._what("copy", value)
            is_by_home = WHOLE in value.forms or self._crosses_with_others(value, value.layout)
            if isinstance(value.layout, (Split, Joined, Sharded, Owned)) and not is_by_home:
                item = value.forms[value.layout]
                return crossings.all_gather(self.program, item, value.layout, what)
            return crossings.copy(self.program, self.get(value, WHOLE), what)
        if isinstance(layout, Partial):
            return crossings.on_first(self.program, self.get(value, WHOLE), layout.kind)
        if value.dtype == tf.variant or isinstance(layout, Listed):
            raise NeedsOthers  # a whole list can't be taken apart
        assert not isinstance(layout, Owned)  # nothing is brought into it
        dim = self._along(value, layout)
        if value.layout == SUM and WHOLE not in value.forms:
            what = self._what("sum", value)
            if self._crosses_with_others(value, layout):
                return crossings.sum_shards(self.program, value.forms[SUM], layout, what)
            return crossings.reduce_scatter(self.program, value.forms[SUM], layout, dim, what)
        if COPIED in value.forms and isinstance(layout, Sharded):
            return crossings.own_slice(self.program, value.forms[COPIED], layout, value.dims or ())
        return crossings.scatter(self.program, self.get(value, WHOLE), layout, dim)

    def _crosses_with_others(self, value: Value, layout: Layout) -> bool:
        """Whether several processes have shards of it, of known sizes: many cross in one go."""
        return self.is_joined and isinstance(layout, Sharded) and is_known(value.dims or ())

    def _what(self, kind: str, value: Value) -> Crossing:
        dims: Any = value.dims
        shape = None if dims is None or not is_known(dims) else tuple(map(int, dims))
        return Crossing(kind, shape, value.is_trained)

    def _convert_locally(self, value: Value, layout: Layout) -> Item:
        """On each device all that is whole is there already; its rows are a slice."""
        if isinstance(layout, (Whole, Copied)):
            found = value.forms.get(WHOLE) or value.forms.get(COPIED)
            if found is None and value.is_free and layout != WHOLE:
                whole = self.get(value, WHOLE)
                what = self._what("copy", value)
                is_all = self.way == ALL_DEVICES
                return crossings.copy(self.program, whole, what) if is_all else whole
            if found is None:
                raise NeedsOthers
            return found
        whole = self.get(value, COPIED)
        if isinstance(layout, Partial):
            return crossings.only_on_first(self.program, whole, layout.kind)
        if value.dtype == tf.variant or isinstance(layout, Listed):
            raise NeedsOthers
        assert not isinstance(layout, Owned)
        self._along(value, layout)
        return crossings.own_slice(self.program, whole, layout, value.dims or ())

    def _along(self, value: Value, layout: Split | Joined | Sharded) -> Any:
        """The size of the axis that a layout splits."""
        assert value.dims is not None
        dim = value.dims[layout.axis]
        assert not isinstance(layout, Joined) or layout.along(layout.axis, dim) == layout
        is_possible = self.unit_of(dim) is not None or isinstance(layout, Sharded)
        if not is_possible:
            raise NeedsOthers
        return dim

    def _constant(self, value: Value, layout: Layout) -> Item:
        const = value.const
        assert const is not None
        place = EACH if isinstance(layout, Copied) else 0

        def emit(local: Any) -> list[Any]:
            return [local.constant(const, value.dtype)]

        kind = {"symbols": symbols_of(const.flat), "is_cheap": True, "is_plain": True}
        return self.add(emit, [], place, [value.dtype], **kind)[0]

    def add(
        self, emit: Any, inputs: Sequence[Item], place: int, types: Sequence[Any], **more: Any
    ) -> list[Item]:
        """Adds a node to the program."""
        if self.way != ALL_DEVICES:
            assert place != ALL
            place = EACH
        return self.program.add(emit, inputs, place, types, **more)

    def new_input(self, dtype: tf.DType, place: int = 0) -> Item:
        """One more input of the program, on the first device or at another place."""
        item = Item(dtype, place)
        self.program.inputs.append(item)
        return item

    def outside(self, value: Value) -> Value | None:
        """The value of a resource outside, if it is read there."""
        return None
