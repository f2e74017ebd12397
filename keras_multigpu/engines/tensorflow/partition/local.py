"""What nodes may ask of the devices that compute them: their rows, and sizes."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import (
    Joined,
    Layout,
    Owned,
    Sharded,
    Split,
)
from keras_multigpu.engines.tensorflow.partition.program import Across
from keras_multigpu.engines.tensorflow.partition.sizes import BATCH, Dim, Unit, is_known, unit_of


@dataclasses.dataclass
class Local:
    """One device.

    Attributes:
        batch: the number of rows of the batch: an `int`, or a scalar tensor.
        rows: how many of them the device has.
        begin: the first of them.
        index: the device's number.
        count: the number of devices, of all processes.
        sizes: the values of other symbols.
        is_compiled: whether XLA compiles the step on one device: it draws other random numbers.
        home: the device's name, if it computes what is whole outside of compiled functions.
        chosen: how many rows of the batch are chosen, where that is known.
    """

    batch: Any
    rows: Any
    begin: Any
    index: Any
    count: int = 1
    sizes: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_compiled: bool = False
    home: str | None = None
    chosen: Collection[int] = ()

    def __post_init__(self) -> None:
        self._made: dict[Any, Any] = {}

    @property
    def settings(self) -> dict[str, Any]:
        """The numbers of rows and devices, and the device's."""
        names = ("batch", "rows", "begin", "index", "count")
        return {name: getattr(self, name) for name in names}

    @property
    def symbol(self) -> Any:
        """The batch's rows, as a dimension."""
        return self.batch if isinstance(self.batch, int) else Dim.symbol(BATCH)

    def inner(self, *, compiled: bool = False) -> Local:
        """The same device, within a function that captures what it uses, `compiled` or not."""
        home = None if compiled else self.home
        return dataclasses.replace(self, sizes=dict(self.sizes), home=home)

    def dim(self, dim: Any) -> Any:
        """A dimension: an `int`, or a scalar tensor."""
        return int(dim) if not isinstance(dim, Dim) else self._once(dim, lambda: self._sum(dim))

    def _sum(self, dim: Dim) -> Any:
        total: Any = 0
        for symbols, factor in dim.terms.items():
            term: Any = factor
            for name in symbols:
                term = _times(self.batch if name == BATCH else self.sizes[name], term)
            total = term if isinstance(total, int) and total == 0 else total + term
        return total

    def entries(self, unit: Unit) -> Any:
        """How many entries of an axis this device has."""
        return _times(self._share(unit.rows)[1], self.dim(unit.times))

    def first_entry(self, unit: Unit) -> Any:
        """The first of them."""
        return _times(self._share(unit.rows)[0], self.dim(unit.times))

    def _share(self, rows: Any) -> tuple[Any, Any]:
        """The first of this device's rows, and how many they are."""
        if rows == self.symbol:
            return self.begin, self.rows
        return self._once(("share", rows), lambda: self._even(self.dim(rows)))

    def _even(self, size: Any) -> tuple[Any, Any]:
        """Where this device's part of so many begins, and how long it is; they differ by one."""
        each, more = size // self.count, size % self.count
        if isinstance(self.index, int) and isinstance(size, int):
            return self.index * each + min(self.index, more), each + (self.index < more)
        own = tf.cast(self.index < more, tf.int32)
        return self.index * each + tf.minimum(self.index, more), each + own

    def extent(self, dim: Any, layout: Split | Joined | Sharded) -> tuple[Any, Any]:
        """Where this device's slice of an axis begins, and how long it is."""
        if isinstance(layout, Sharded):
            return self._even(dim)
        if isinstance(layout, Joined):
            return None, sum(size for _, size in self.extents(layout))
        unit = unit_of(dim, self.symbol, self.chosen)
        assert unit is not None
        return self.first_entry(unit), self.entries(unit)

    def extents(self, layout: Joined) -> list[tuple[Any, Any]]:
        """Where each of this device's slices of an axis begins, and how long it is."""
        found, before = [], 0
        for times in layout.times:
            unit = Unit(layout.rows, times)
            found.append((self.dim(before) + self.first_entry(unit), self.entries(unit)))
            before = before + layout.rows * times
        return found

    def shape(self, dims: Sequence[Any], dtype: tf.DType, layout: Layout | None = None) -> Any:
        """An integer vector: a shape, of this device's part in a layout."""
        return self._once((tuple(dims), dtype, layout), lambda: self._vector(dims, dtype, layout))

    def _vector(self, dims: Sequence[Any], dtype: tf.DType, layout: Layout | None) -> Any:
        parts: list[Any] = list(dims)
        if isinstance(layout, (Split, Joined, Sharded)):
            parts[layout.axis] = self.extent(dims[layout.axis], layout)[1]
        parts = [part if tf.is_tensor(part) else self.dim(part) for part in parts]
        if all(isinstance(part, int) for part in parts):
            return tf.constant(parts, dtype, shape=[len(parts)])
        return tf.cast(tf.stack(parts), dtype)

    def constant(self, const: np.ndarray, dtype: tf.DType) -> Any:
        """A small integer tensor."""
        flat = list(const.flat)
        if is_known(flat):
            numbers = np.array([int(one) for one in flat], dtype.as_numpy_dtype)
            return tf.constant(numbers.reshape(const.shape), dtype)
        vector = self.shape(flat, dtype)
        return vector if const.ndim == 1 else tf.reshape(vector, const.shape)

    def unless_empty(
        self, unit: Unit, compute: Callable[[], list[Any]], empty: Callable[[], list[Any]]
    ) -> list[Any]:
        """`compute()`; `empty()` if this device has no such rows."""
        _, rows = self._share(unit.rows)
        if isinstance(rows, int):
            return compute() if rows else empty()
        return tf.nest.flatten(tf.cond(rows > 0, lambda: list(compute()), empty))

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Makes a small tensor once in each graph."""
        key = tf.compat.v1.get_default_graph(), key
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _times(rows: Any, factor: Any) -> Any:
    return rows if isinstance(factor, int) and factor == 1 else rows * factor


D = TypeVar("D", bound="Devices")


class Devices:
    """All devices, for crossings.

    Attributes:
        names: their names.
        home: the name of that which has what is whole; it may be none of them.
        locals: a `Local` of each.
        whole: that of a device which computes the whole batch.
        is_compiled: whether XLA compiles what the devices compute.
        wire_dtype: the type in which weights and gradients cross; `None` for their own.
        chosen: how many rows of the batch are chosen, where that is known.
        has_functions: whether what each device computes between two crossings is a function.
        columns: of a mesh, the devices of each of its columns; these are of the first.
    """

    def __init__(
        self,
        names: Sequence[str],
        batch: Any,
        *,
        home: str | None = None,
        is_compiled: bool = False,
        wire_dtype: Any = None,
        has_functions: bool = True,
        chosen: Collection[int] = (),
    ):
        self.names, self.is_compiled, self.wire_dtype = list(names), is_compiled, wire_dtype
        self.has_functions, self.chosen = has_functions, chosen
        self.home = names[0] if home is None else home
        count = len(self.names)
        rows, begins = even(batch, count)
        self.locals = [
            Local(batch, rows[i], begins[i], i, count, is_compiled=is_compiled, chosen=chosen)
            for i in range(count)
        ]
        self.whole = Local(
            batch, batch, 0, 0, is_compiled=is_compiled, home=self.home, chosen=chosen
        )
        self.columns: tuple[Devices, ...] = (self,)

    is_joined = False
    """Whether there are other processes, with more devices."""

    def complete(self, parts: Sequence[Any], layout: Split | Joined | Sharded | Owned) -> list[Any]:
        """All slices in order, from those of this process."""
        if not isinstance(layout, Joined):
            return list(parts)

        def take_apart(local: Local, part: Any) -> list[Any]:
            sizes = [size for _, size in local.extents(layout)]
            return tf.split(part, tf.stack(sizes), layout.axis, num=len(sizes))

        return [one for pieces in zip(*self.each(take_apart, self.locals, parts)) for one in pieces]

    def combine(self, own: Sequence[Any], across: Sequence[Across], wire: tf.DType) -> list[Any]:
        """What all processes make together, each as it is said, of what this one has."""
        return list(own)

    def cut(self, whole: Any, layout: Split | Joined | Sharded, dim: Any) -> list[Any]:
        """The slices of a whole tensor for this process's devices."""
        if isinstance(layout, Joined):
            dims = [layout.rows * times for times in layout.times]
            sizes = tf.stack([self.whole.dim(one) for one in dims])
            pieces = tf.split(whole, sizes, layout.axis, num=len(dims))
            cut = [self.cut(one, Split(layout.axis), d) for one, d in zip(pieces, dims)]
            return [tf.concat(column, layout.axis) for column in zip(*cut)]
        sizes = [local.extent(dim, layout)[1] for local in self.locals]
        return tf.split(whole, tf.stack(sizes), layout.axis, num=len(sizes))

    def inner(self) -> Devices:
        """The same devices, within a function that captures what it uses."""
        made = copy.copy(self)
        made.locals = [one.inner() for one in self.locals]
        made.whole = self.whole.inner()
        made.columns = (made,)
        return made

    def each(self, compute: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
        """What is computed on each device, of one entry of each column."""
        made = []
        for name, *given in zip(self.names, *columns):
            with tf.device(name):
                made.append(compute(*given))
        return made

    def set_size(self, name: str, value: Any) -> None:
        """Sets the value of a symbol."""
        for local in [*self.locals, self.whole]:
            local.sizes.setdefault(name, value)

    @staticmethod
    def mesh(make: Callable[[Sequence[str]], D], names: Sequence[str], width: int) -> D:
        """Devices in rows of `width`; rows of the batch are split over those of a column.

        `make` makes those of a column, of their names.
        """
        made = [make(names[column::width]) for column in range(width)]
        made[0].columns = tuple(made)
        return made[0]


def even(batch: Any, count: int) -> tuple[Any, Any]:
    """How many rows each of several devices has, and the first of them."""
    if isinstance(batch, int):
        rows = [batch // count + (i < batch % count) for i in range(count)]
        return rows, [0, *itertools.accumulate(rows)][:-1]
    sizes = batch // count + tf.cast(tf.range(count) < batch % count, tf.int32)
    return tf.unstack(sizes), tf.unstack(tf.cumsum(sizes, exclusive=True))
