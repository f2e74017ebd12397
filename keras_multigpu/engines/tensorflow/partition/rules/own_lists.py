"""Lists of the rows that a device goes through, in loops over the rows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.constants import constant_of
from keras_multigpu.engines.tensorflow.partition.forms import NeedsOthers
from keras_multigpu.engines.tensorflow.partition.layouts import (
    COPIED,
    LISTED,
    WHOLE,
    Listed,
    Split,
    Value,
)
from keras_multigpu.engines.tensorflow.partition.operations import operation
from keras_multigpu.engines.tensorflow.partition.program import EACH, Item
from keras_multigpu.engines.tensorflow.partition.signatures import Signature, static_dims
from keras_multigpu.engines.tensorflow.partition.sizes import Dims, is_known


def is_of_row(items: Value, index: Value) -> bool:
    """Whether an element of a list of rows is that of the row that a loop is at."""
    count = None if items.elements is None else items.elements.count
    is_own = (
        index.row_of is not None
        and index.row_of == count
        and (items.is_free or isinstance(items.layout, Listed))
    )
    if isinstance(items.layout, Listed) and not is_own:
        raise NeedsOthers
    return is_own


def own_row(planner: Any, index: Value) -> Item:
    """Where the row's element is in a list of a device's rows."""
    unit = planner.multiple_of(index.row_of)

    def emit(local: Any, number: Any) -> list[Any]:
        return [number - tf.cast(local.first_entry(unit), number.dtype)]

    inputs = [planner.get(index, WHOLE)]
    return planner.add(emit, inputs, EACH, [index.dtype], symbols=unit.symbols)[0]


def _length(local: Any, unit: Any) -> Any:
    """The length of a list of a device's rows; under XLA not 0, even if no loop runs."""
    count = local.entries(unit)
    return tf.maximum(count, 1) if local.is_compiled else count


def own_count(planner: Any, count: Value) -> Item:
    """How many of so many rows are a device's."""
    unit = None if count.const is None else planner.multiple_of(count.const[()])

    def emit(local: Any) -> list[Any]:
        return [tf.cast(_length(local, unit), count.dtype)]

    if unit is None:
        return planner.get(count, COPIED)
    return planner.add(emit, [], EACH, [count.dtype], symbols=unit.symbols)[0]


def of_tensor(planner: Any, op: tf.Operation, x: Value, shape: Value) -> Item | None:
    """Each device's list of its rows of a tensor; `None` if they are not rows."""
    write, unit = operation(op), planner.multiple_of((x.dims or (None,))[0])

    def emit(local: Any, rows: Any, shape: Any) -> list[Any]:
        if local.is_compiled:
            more = _length(local, unit) - local.entries(unit)
            rows = tf.pad(rows, [[0, more], *[[0, 0]] * (rows.shape.rank - 1)])
        return write(local, rows, shape)

    if unit is None:
        return None
    inputs = [planner.get(x, Split(0)), planner.get(shape, COPIED)]
    more = {"name": op.name, "symbols": unit.symbols}
    item: Item = planner.add(emit, inputs, EACH, [tf.variant], **more)[0]
    return item


def stacked(planner: Any, op: tf.Operation, items: Value) -> Value:
    """The rows of a list that each device has of its own."""
    known, static = items.elements, static_dims(op.outputs[0])
    assert known is not None
    dims = known.dims
    if dims is not None and static is not None and len(static) == len(dims) + 1:
        dims = tuple(dim if size is None else size for dim, size in zip(dims, static[1:]))
    if planner.unit_of(known.count) is None or not _are_numbers(dims):
        raise NeedsOthers  # a device without rows could not tell their shape
    assert dims is not None
    shape = constant_of([int(dim) for dim in dims])
    inputs = [planner.get(items, LISTED)]
    inputs.append(planner.get(Value(tf.int32, shape.shape, const=shape), COPIED))
    own = Signature([], [], attributes={"num_elements": tf.compat.v1.AttrValue(i=-1)})
    write = operation(op, {}, own)
    unit, dtype = planner.unit_of(known.count), op.outputs[0].dtype

    def emit(local: Any, *tensors: Any) -> list[Any]:
        (made,) = write(local, *tensors)
        return [made[: local.entries(unit)] if local.is_compiled else made]

    (item,) = planner.add(emit, inputs, EACH, [dtype], name=op.name, symbols=unit.symbols)
    return planner.value(dtype, (known.count, *dims), Split(0), item)


def _are_numbers(dims: Dims | None) -> bool:
    return dims is not None and None not in dims and is_known(dims)
