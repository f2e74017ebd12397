"""What nodes may ask of the devices that compute them: their rows, and sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.sizes import BATCH, Dim, divide, is_known


class Local:
    """One device.

    Args:
        batch: the number of rows of the batch: an `int`, or a scalar tensor.
        rows: how many of them the device has.
        begin: the first of them.
        index: the device's number.
        sizes: the values of other symbols.
        is_compiled: whether XLA compiles the step on one device: it draws other random numbers.
    """

    def __init__(
        self,
        batch: Any,
        rows: Any,
        begin: Any,
        index: Any,
        sizes: Mapping[str, Any] | None = None,
        *,
        is_compiled: bool = False,
    ):
        self.batch, self.rows, self.begin, self.index = batch, rows, begin, index
        self.is_compiled = is_compiled
        self.sizes = dict(sizes or {})
        self._made: dict[Any, Any] = {}

    @property
    def settings(self) -> dict[str, Any]:
        """The numbers of rows, and the device's."""
        names = ("batch", "rows", "begin", "index")
        return {name: getattr(self, name) for name in names}

    @property
    def symbol(self) -> Any:
        """The batch's rows, as a dimension."""
        return self.batch if isinstance(self.batch, int) else Dim.symbol(BATCH)

    def inner(self) -> Local:
        """The same device, within a function that captures what it uses."""
        return Local(**self.settings, sizes=self.sizes, is_compiled=self.is_compiled)

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

    def entries(self, unit: Any) -> Any:
        """How many entries of an axis this device has, if `unit` of them belong to a row."""
        return _times(self.rows, self.dim(unit))

    def first_entry(self, unit: Any) -> Any:
        """The first of them."""
        return _times(self.begin, self.dim(unit))

    def shape(self, dims: Sequence[Any], dtype: tf.DType, axis: int | None = None) -> Any:
        """An integer vector; with an axis, that one is of this device's entries."""
        return self._once((tuple(dims), dtype, axis), lambda: self._vector(dims, dtype, axis))

    def _vector(self, dims: Sequence[Any], dtype: tf.DType, axis: int | None) -> Any:
        parts = [
            self.entries(divide(dim, self.symbol)) if number == axis else self.dim(dim)
            for number, dim in enumerate(dims)
        ]
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

    def unless_empty(self, compute: Callable[[], list[Any]], outputs: Sequence[Any]) -> list[Any]:
        """`compute()`; zeros of the outputs' shapes and types if this device has no rows."""

        def zeros() -> list[Any]:
            return [tf.zeros(shape, dtype) for shape, dtype in outputs]

        if isinstance(self.rows, int):
            return compute() if self.rows else zeros()
        return tf.nest.flatten(tf.cond(self.rows > 0, lambda: list(compute()), zeros))

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Makes a small tensor once in each graph."""
        key = tf.compat.v1.get_default_graph(), key
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _times(rows: Any, factor: Any) -> Any:
    return rows if isinstance(factor, int) and factor == 1 else rows * factor


class Devices:
    """All devices, for crossings.

    Attributes:
        names: their names.
        locals: a `Local` of each.
        whole: that of a device which computes the whole batch.
        is_compiled: whether XLA compiles what the devices compute.
        wire_dtype: the type in which weights and gradients cross; `None` for their own.
    """

    def __init__(
        self, names: Sequence[str], batch: Any, *, is_compiled: bool = False, wire_dtype: Any = None
    ):
        self.names, self.is_compiled, self.wire_dtype = list(names), is_compiled, wire_dtype
        count = len(self.names)
        if isinstance(batch, int):
            rows: Any = [batch // count + (i < batch % count) for i in range(count)]
            begins: Any = [0, *itertools.accumulate(rows)][:-1]
        else:
            sizes = batch // count + tf.cast(tf.range(count) < batch % count, tf.int32)
            rows, begins = tf.unstack(sizes), tf.unstack(tf.cumsum(sizes, exclusive=True))
        self.locals = [
            Local(batch, rows[i], begins[i], i, is_compiled=is_compiled) for i in range(count)
        ]
        self.whole = Local(batch, batch, 0, 0, is_compiled=is_compiled)

    def inner(self) -> Devices:
        """The same devices, within a function that captures what it uses."""
        made: Devices = object.__new__(Devices)
        made.names, made.is_compiled = self.names, self.is_compiled
        made.wire_dtype = self.wire_dtype
        made.locals = [one.inner() for one in self.locals]
        made.whole = self.whole.inner()
        return made

    def set_size(self, name: str, value: Any) -> None:
        """Sets the value of a symbol."""
        for local in [*self.locals, self.whole]:
            local.sizes.setdefault(name, value)
