"""Tables, in parts or whole: looked up, summed and changed where their rows are."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.forms import ALL_DEVICES, NeedsOthers
from keras_multigpu.engines.tensorflow.partition.layouts import (
    COPIED,
    SUM,
    WHOLE,
    Layout,
    Owned,
    Sharded,
    Split,
    Value,
)
from keras_multigpu.engines.tensorflow.partition.operations import operation
from keras_multigpu.engines.tensorflow.partition.program import ALL, EACH, Item
from keras_multigpu.engines.tensorflow.partition.rules.lookups import Lookup
from keras_multigpu.engines.tensorflow.partition.sizes import Dim, elements_of
from keras_multigpu.engines.tensorflow.weights.lookups import BY_WEIGHTS, GRADIENT, ROWS, SUMS

_BY_ROWS = Sharded(0)
_FEW = 8  # times as large as what 32 rows name: then that is less to send than the table


def _is_table(planner: Any, value: Value) -> bool:
    return planner.way == ALL_DEVICES and value.layout == _BY_ROWS


def _check_here(planner: Any, value: Value) -> None:
    """Leaves it to all devices together if each would get all of a table for its own rows."""
    outer = planner.outside(value)
    if outer is None or not planner.is_alone:
        return
    # A loop goes through its rows again and again: a copy is less than what they send.
    is_one = planner.branch is not None and outer.layout == WHOLE and COPIED not in outer.forms
    if outer.layout == _BY_ROWS or (is_one and outer.is_state):
        raise NeedsOthers


def _is_much_larger(table: Any, rows: Any) -> bool:
    return elements_of(table) > _FEW * elements_of(rows)


def _stays(planner: Any, table: Any, rows: Value) -> bool:
    """Whether rows of a table that one device has are sent, and not the table to all devices.

    So it is if the rows that the expected batch names are fewer.
    """
    is_one = planner.way == ALL_DEVICES and not planner.is_joined and table not in planner.shards
    if not is_one or rows.axis != 0:
        return False
    most = elements_of(table) * elements_of([planner.batch]) / max(1, elements_of(rows.dims))
    if not isinstance(planner.batch, Dim):
        return most > planner.batch
    if planner.expected.rows < most:
        planner.expected.most = min(planner.expected.most, most)
    return planner.expected.rows < most


def _form_of(rows: Value) -> Layout:
    """How devices get the numbers of rows: those of their own rows at least."""
    return rows.layout if isinstance(rows.layout, Owned) else COPIED


def _checked(numbers: Any, height: int) -> Any:
    """Numbers of rows; the step fails if the table has not all of them."""
    check = tf.debugging.Assert(
        tf.reduce_all((numbers >= 0) & (numbers < tf.cast(height, numbers.dtype))),
        [f"Indices must be from 0 to {height - 1}, the last row of the table. Received:", numbers],
    )
    with tf.control_dependencies([check]):
        return tf.identity(numbers)


def _own(local: Any, numbers: Any, height: int) -> tuple[Any, Any, Any]:
    """Numbers of rows within a device's part, which of them are its own, and how many it has."""
    begin, count = local.extent(height, _BY_ROWS)
    numbers = numbers - tf.cast(begin, numbers.dtype)
    return numbers, (numbers >= 0) & (numbers < tf.cast(count, numbers.dtype)), count


def _of_own(is_own: Any, entries: Any) -> Any:
    """Zeros in place of the entries that belong to other devices."""
    more = [1] * (entries.shape.rank - is_own.shape.rank)
    is_own = tf.reshape(is_own, tf.concat([tf.shape(is_own), more], 0))
    return tf.where(is_own, entries, tf.zeros([], entries.dtype))


def rows_of(planner: Any, op: tf.Operation, values: list[Value]) -> list[Value] | None:
    """`GatherV2` of rows, if they are few: each device takes its own, or one device takes all."""
    table, numbers = values[0], values[1]
    if op.get_attr("batch_dims"):
        return None
    dims, dtype = (*(numbers.dims or ()), *(table.dims or ())[1:]), op.outputs[0].dtype
    if _is_much_larger(table.dims, dims):
        _check_here(planner, table)
    if table.layout == WHOLE and table.is_state and COPIED not in table.forms:
        found = dataclasses.replace(numbers, dims=dims)
        if not _stays(planner, table.dims, found):
            return None
        (item,) = planner.whole(op, values)
        value = planner.value(dtype, dims, WHOLE, item)
        value.layout = Split(0)  # what follows is spread again
        return [value]
    if not _is_table(planner, table):
        return None
    is_owned, height = isinstance(numbers.layout, Owned), _rows(table)
    if not is_owned and not (_is_much_larger(table.dims, dims) and dtype != tf.bool):
        return None

    def emit(local: Any, part: Any, numbers: Any) -> list[Any]:
        numbers = numbers if is_owned else _checked(numbers, height)
        own, is_own, _ = _own(local, numbers, height)
        return [_of_own(is_own, tf.gather(part, tf.where(is_own, own, 0)))]

    inputs = [planner.get(table, _BY_ROWS), planner.get(numbers, _form_of(numbers))]
    (item,) = planner.add(emit, inputs, EACH, [dtype], name=op.name)
    layout: Layout = Owned() if is_owned else SUM
    value = planner.value(dtype, dims, layout, item)
    if numbers.axis is not None:
        split = Split(numbers.axis)
        return [planner.value(dtype, dims, split, planner.get(value, split))]
    return [value]


def sums_by_rows(planner: Any, op: tf.Operation, values: list[Value]) -> list[Value] | None:
    """`UnsortedSegmentSum` that makes a table's gradient, if the rows are few.

    Each device adds up those of its part, or one device adds up all.
    """
    entries, numbers, count = values
    if count.const is None or planner.way != ALL_DEVICES or entries.dtype == tf.bool:
        return None
    if isinstance(count.const[()], Dim):
        return None  # a sum for each row, or for several
    height, rank = count.const[()], len(numbers.dims or ())
    dims = (height, *(entries.dims or ())[rank:])
    if _stays(planner, dims, entries):
        (item,) = planner.whole(op, values)
        return [planner.value(entries.dtype, dims, WHOLE, item)]
    is_owned = isinstance(numbers.layout, Owned)
    if planner.shards.get(dims) != 0 or (numbers.layout == Owned()) != (entries.layout == Owned()):
        return None
    if not is_owned and not _is_much_larger(dims, entries.dims):
        return None

    def emit(local: Any, entries: Any, numbers: Any) -> list[Any]:
        own, is_own, count = _own(local, numbers, int(height))
        return [tf.math.unsorted_segment_sum(entries, tf.where(is_own, own, -1), count)]

    inputs = [planner.get(value, _form_of(numbers)) for value in (entries, numbers)]
    (item,) = planner.add(emit, inputs, EACH, [entries.dtype], name=op.name)
    return [planner.value(entries.dtype, dims, _BY_ROWS, item)]


def add_rows(planner: Any, op: tf.Operation, values: list[Value]) -> list[Value] | None:
    """Adds rows to a variable: each device to those that it has, or its part of each."""
    handle, numbers, entries = values
    assert handle.elements is not None
    assert handle.elements.dims is not None
    write, height = operation(op), handle.elements.dims[0]
    if numbers.dims is None or entries.dims is None or len(entries.dims) <= len(numbers.dims):
        return None
    assert isinstance(handle.layout, Sharded)
    is_by_rows = handle.layout == _BY_ROWS
    form = _form_of(numbers) if is_by_rows else COPIED
    own_form = form if is_by_rows else Sharded(handle.layout.axis - 1 + len(numbers.dims))
    if form == Owned() and entries.layout != form:
        form = own_form = COPIED

    def emit(local: Any, handle: Any, numbers: Any, entries: Any) -> list[Any]:
        if is_by_rows:
            numbers = numbers if form == Owned() else _checked(numbers, height)
            own, is_own, _ = _own(local, numbers, height)
            numbers, entries = tf.where(is_own, own, 0), _of_own(is_own, entries)
        return write(local, handle, numbers, entries)

    forms = (handle.layout, form, own_form)
    inputs = [planner.get(value, layout) for value, layout in zip(values, forms)]
    planner.add(emit, inputs, EACH, [], name=op.name, after=planner.after(op, EACH))
    return []


# The functions of `weights/lookups.py`


def _sums(planner: Any, op: tf.Operation, values: list[Value]) -> list[Value] | None:
    table, indices = values[:2]

    def emit(lookup: Any, part: Any, *given: Any) -> list[Any]:
        return [lookup(*given).sums(part)]

    return _summed(planner, op, emit, values, (_rows(indices), *(table.dims or ())[1:]))


def _gradient(planner: Any, op: tf.Operation, values: list[Value]) -> list[Value] | None:
    """Of a table: dense, or the touched rows and their numbers."""
    shape, *given = values
    table = _table_of(planner, shape, given)
    if table is None:
        return None
    is_dense, types = len(op.outputs) == 1, [tensor.dtype for tensor in op.outputs]

    def emit(lookup: Any, upstream: Any, *given: Any) -> list[Any]:
        found = lookup(*given)
        return [found.gradient(upstream)] if is_dense else [*found.touched(upstream)]

    items = _looked_up(planner, op, emit, given, table, types)
    if is_dense:
        return [Value(types[0], table, _BY_ROWS, {_BY_ROWS: items[0]})]
    entries, numbers = (Value(t, None, Owned(), {Owned(): i}) for t, i in zip(types, items))
    name = f"size{next(planner.names)}"
    entries.dims, numbers.dims = (Dim.symbol(name), table[1]), (Dim.symbol(name),)
    planner.program.symbols[name] = planner.get(numbers, WHOLE), 0  # of all devices' rows
    return [entries, numbers]


def _by_weights(planner: Any, op: tf.Operation, values: list[Value]) -> list[Value] | None:
    def emit(lookup: Any, part: Any, upstream: Any, indices: Any) -> list[Any]:
        return [lookup(indices).of_weights(part, upstream)]

    return _summed(planner, op, emit, values, values[2].dims)


FUNCTIONS = {
    (SUMS, 1): _sums,
    (GRADIENT, 1): _gradient,
    (ROWS, 2): _gradient,
    (BY_WEIGHTS, 1): _by_weights,
}
"""{name and number of results of a function that is called: rule}; a tape's variant has more."""


def _rows(value: Value) -> Any:
    return (value.dims or (None,))[0]


def _have_rows(planner: Any, values: Sequence[Value]) -> bool:
    """Whether all have the same rows, which are split."""
    dims = {_rows(value) for value in values}
    is_split = any(value.axis == 0 for value in values)
    return is_split and len(dims) == 1 and planner.unit_of(dims.pop()) is not None


def _table_of(planner: Any, shape: Value, given: Sequence[Value]) -> tuple[int, ...] | None:
    """The shape of a table that the devices have by rows; `None` for others."""
    if shape.const is None or planner.way != ALL_DEVICES or not _have_rows(planner, given):
        return None
    dims = tuple(int(one) for one in shape.const)
    return dims if planner.shards.get(dims) == 0 else None


def _looked_up(
    planner: Any,
    op: tf.Operation,
    emit: Callable[..., list[Any]],
    values: Sequence[Value],
    table: Any,
    types: Sequence[tf.DType],
) -> list[Item]:
    """What each device makes of lookups in its part of a table, for the whole batch."""
    name = op.name.rpartition("/")[0]
    has_part = values[0].layout == _BY_ROWS

    def one(local: Any, *given: Any) -> list[Any]:
        return emit(functools.partial(Lookup, local, table, op.outputs[0].dtype, name), *given)

    def write(devices: Any, *given: Any) -> list[Any]:
        return list(map(list, zip(*devices.each(one, devices.locals, *given))))

    forms = [_BY_ROWS if has_part and not number else COPIED for number in range(len(values))]
    inputs = [planner.get(value, form) for value, form in zip(values, forms)]
    return planner.add(write, inputs, ALL, types, gives=EACH, name=op.name)


def _summed(
    planner: Any,
    op: tf.Operation,
    emit: Callable[..., list[Any]],
    values: Sequence[Value],
    dims: Any,
) -> list[Value] | None:
    """A value with the batch's rows, of which each device makes addends by its part of a table."""
    table, *others = values
    _check_here(planner, table)
    if not _is_table(planner, table) or not _have_rows(planner, others):
        return None
    dtype, split = op.outputs[0].dtype, Split(0)
    wide = tf.float32 if dtype.size < 4 else dtype

    def added(lookup: Any, *given: Any) -> list[Any]:
        return [tf.cast(one, wide) for one in emit(lookup, *given)]

    def cast(local: Any, total: Any) -> list[Any]:
        return [tf.cast(total, dtype)]

    (item,) = _looked_up(planner, op, added, values, table.dims, [wide])
    own = planner.get(Value(wide, dims, SUM, {SUM: item}), split)
    (item,) = planner.add(cast, [own], EACH, [dtype], name=op.name)
    return [Value(dtype, dims, split, {split: item})]
