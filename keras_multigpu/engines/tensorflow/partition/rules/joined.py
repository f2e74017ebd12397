"""Tensors that are joined by their rows: each device joins its slices, and takes them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.forms import ALL_DEVICES
from keras_multigpu.engines.tensorflow.partition.layouts import Joined, Split, Value
from keras_multigpu.engines.tensorflow.partition.program import EACH
from keras_multigpu.engines.tensorflow.partition.sizes import symbols_of


def joined(
    planner: Any, op: tf.Operation, values: Sequence[Value], axis: int, dims: Sequence[Any]
) -> list[Value] | None:
    """Tensors of rows, one after the other, of which each device has its rows."""
    units = [planner.unit_of((value.dims or ())[axis]) for value in values]
    rows = units[0].rows if units[0] is not None else None
    are_sliced = any(value.rows_axis == axis for value in values)
    if planner.way != ALL_DEVICES or planner.is_joined or not are_sliced:
        return None
    if any(one is None or one.rows != rows for one in units):
        return None
    forms: list[Any] = []
    times: list[Any] = []
    for value, unit in zip(values, units):
        if isinstance(value.layout, Joined) and value.layout.axis == axis:
            forms.append(value.layout)
            times += value.layout.times
        elif value.axis == axis or value.is_free:
            forms.append(Split(axis))
            times.append(unit.times)
        else:
            return None

    def emit(local: Any, *parts: Any) -> list[Any]:
        return [tf.concat(parts, axis)]

    items = [planner.get(value, form) for value, form in zip(values, forms)]
    (item,) = planner.add(emit, items, EACH, [values[0].dtype], name=op.name)
    return [planner.value(values[0].dtype, tuple(dims), Joined(axis, rows, tuple(times)), item)]


def piece(planner: Any, value: Value, axis: int, first: Any, size: Any) -> Value | None:
    """Some of the tensors that were joined, if they begin and end so."""
    layout, dtype = value.layout, value.dtype
    if not isinstance(layout, Joined) or layout.axis != axis:
        return None
    ends = [layout.rows * sum(layout.times[:count]) for count in range(len(layout.times) + 1)]
    if first not in ends or size is None or first + size not in ends:
        return None
    begin, end = ends.index(first), ends.index(first + size)
    before, own = layout.times[:begin], layout.times[begin:end]

    def emit(local: Any, part: Any) -> list[Any]:
        sizes = [
            sum(s for _, s in local.extents(Joined(axis, layout.rows, one)))
            for one in (before, own)
        ]
        return [tf.split(part, tf.stack([*sizes, -1]), axis, num=3)[1]]

    given, symbols = [planner.get(value, layout)], symbols_of([layout.size])
    (item,) = planner.add(emit, given, EACH, [dtype], name="piece", symbols=symbols)
    form = Split(axis) if len(own) == 1 else Joined(axis, layout.rows, own)
    dims = list(value.dims or ())
    dims[axis] = size
    return planner.value(dtype, tuple(dims), form, item)


def among_zeros(
    planner: Any,
    op: tf.Operation,
    value: Value,
    dims: Sequence[Any],
    axis: int,
    first: Any,
    size: Any,
) -> Value | None:
    """The gradient of a tensor of rows, with zeros for others that were joined to it."""
    if planner.way != ALL_DEVICES or planner.is_joined or value.axis != axis:
        return None
    if first is None or size is None:
        return None
    sizes = [one for one in (first, size, dims[axis] - first - size) if one != 0]
    units = [planner.unit_of(one) for one in sizes]
    if any(one is None or one.rows != units[0].rows for one in units):
        return None
    layout = Joined(axis, units[0].rows, tuple(one.times for one in units))
    at = 0 if first == 0 else 1

    def emit(local: Any, part: Any) -> list[Any]:
        counts = [count for _, count in local.extents(layout)]
        before = [[0, 0] for _ in dims]
        before[axis] = [sum(counts[:at]), sum(counts[at + 1 :])]
        return [tf.pad(part, before)]

    given, symbols = [planner.get(value, Split(axis))], symbols_of([layout.size])
    (item,) = planner.add(emit, given, EACH, [value.dtype], name=op.name, symbols=symbols)
    return planner.value(value.dtype, tuple(dims), layout, item)
