"""Tensor lists: each device has one, of its slices of the elements."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.constants import constant_of
from keras_multigpu.engines.tensorflow.partition.forms import NeedsOthers
from keras_multigpu.engines.tensorflow.partition.layouts import (
    COPIED,
    LISTED,
    WHOLE,
    Copied,
    Elements,
    Layout,
    Listed,
    Partial,
    Split,
    Value,
    Whole,
)
from keras_multigpu.engines.tensorflow.partition.operations import operation
from keras_multigpu.engines.tensorflow.partition.program import EACH, Item
from keras_multigpu.engines.tensorflow.partition.rules import own_lists
from keras_multigpu.engines.tensorflow.partition.rules.elementwise import elementwise
from keras_multigpu.engines.tensorflow.partition.rules.table import rule
from keras_multigpu.engines.tensorflow.partition.signatures import Signature, static_dims
from keras_multigpu.engines.tensorflow.partition.sizes import Dim
from keras_multigpu.engines.tensorflow.partition.states import is_of_own_rows, joined_elements

_ANY = Elements(None, None, False)


def written(
    planner: Any, op: tf.Operation, inputs: Sequence[Item], place: int, **more: Any
) -> list[Item]:
    """The operation, on one or on each device, with these inputs and `more` attributes."""
    types = [tensor.dtype for tensor in op.outputs]
    emit = operation(op, signature=Signature([], [], attributes=more))
    return planner.add(emit, inputs, place, types, name=op.name)


def _shape_item(planner: Any, value: Value, layout: Layout) -> Item:
    """An element's shape: unknown along the axis that is split, and where it isn't a number."""
    form = WHOLE if isinstance(layout, Whole) else COPIED
    if value.const is None or value.const.ndim == 0 or not isinstance(layout, Split):
        return planner.get(value, form)
    numbers = [
        -1 if axis == layout.axis or isinstance(dim, Dim) else dim
        for axis, dim in enumerate(value.const)
    ]
    const = constant_of(numbers)
    return planner.get(Value(value.dtype, const.shape, const=const), form)


def form_of(value: Value) -> Layout:
    """The layout in which a list lies; what is free is made whole."""
    return value.layout if isinstance(value.layout, (Split, Listed)) else WHOLE


def place_of(layout: Layout) -> int:
    """Where lists of a layout are."""
    return EACH if isinstance(layout, (Split, Listed)) else 0


@rule("EmptyTensorList", "TensorListReserve", needs_ranks=False)
def new(planner: Any, op: tf.Operation, values: list[Value]) -> list[Value]:
    """Made in the layout in which it is used."""

    def make(layout: Layout) -> Item | None:
        if isinstance(layout, Partial):
            return None
        form = WHOLE if isinstance(layout, Whole) else COPIED
        inputs = [_shape_item(planner, values[0], layout)]
        if isinstance(layout, Listed):
            inputs.append(own_lists.own_count(planner, values[1]))
        else:
            inputs.append(planner.get(values[1], form))
        return written(planner, op, inputs, 0 if form == WHOLE else EACH)[0]

    count = values[1].const if op.type == "TensorListReserve" else None
    known = Elements(count=None if count is None else count[()])
    return [Value(tf.variant, None, make=make, elements=known)]


@rule("TensorListSetItem", "TensorListPushBack", needs_ranks=False)
def put(planner: Any, op: tf.Operation, values: list[Value]) -> list[Value]:
    """The list lies as its elements do."""
    items = values[0]
    element = values[2] if op.type == "TensorListSetItem" else values[1]
    is_at = op.type == "TensorListSetItem"
    if isinstance(element.layout, Listed) or is_of_own_rows(element, planner.own_symbols):
        raise NeedsOthers
    layout = form_of(element) if form_of(items) == WHOLE else form_of(items)
    layout = LISTED if is_at and own_lists.is_of_row(items, values[1]) else layout

    def make(layout: Layout) -> Item | None:
        if isinstance(layout, Partial):
            return None
        inputs = [planner.get(items, layout)]
        if layout == LISTED:
            inputs += [own_lists.own_row(planner, values[1])] if is_at else []
            inputs.append(planner.get(element, WHOLE))
        else:
            other = WHOLE if isinstance(layout, Whole) else COPIED
            inputs += [planner.get(v, layout if v is element else other) for v in values[1:]]
        return written(planner, op, inputs, 0 if isinstance(layout, Whole) else EACH)[0]

    const = None if element.const is None else tuple(element.const.flat)
    now = Elements(
        element.dims, const, const is not None, row_of=element.row_of, of=element.elements
    )
    if is_at:
        grows = op.get_attr("resize_if_index_out_of_bounds")
        count = None if grows else (items.elements or _ANY).count
        now = dataclasses.replace(now, const=None, is_constant=False, count=count)
    known = joined_elements(items.elements or _ANY, now)
    if layout == WHOLE and items.is_free and element.is_free:  # of nothing that lies anywhere
        return [Value(tf.variant, None, make=make, elements=known)]
    item = make(layout)
    assert item is not None
    return [Value(tf.variant, None, layout, {layout: item}, elements=known)]


@rule("TensorListFromTensor", needs_ranks=False)
def from_tensor(planner: Any, op: tf.Operation, values: list[Value]) -> list[Value]:
    """The first axis is that of the list."""
    x = values[0]
    dims = (None, None) if x.dims is None else (x.dims[1:], x.dims[0])
    known = Elements(dims[0], None, False, dims[1])
    make = _making(planner, op, values)
    if not x.axis:  # any device may have it, in any layout
        return [Value(tf.variant, None, make=make, elements=known)]
    layout = Split(x.axis - 1)
    return [Value(tf.variant, None, layout, {layout: make(layout)}, elements=known)]


def _making(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Makes a list of a tensor's entries, whole or in slices; or of those of a device's rows."""
    x, shape = values

    def make(layout: Layout) -> Item | None:
        if isinstance(layout, Listed):
            return own_lists.of_tensor(planner, op, x, shape)
        whole: Layout = layout
        if isinstance(layout, Split):
            dim = None if x.dims is None else x.dims[layout.axis + 1]
            if planner.unit_of(dim) is None:
                return None
            whole = Split(layout.axis + 1)
        elif not isinstance(layout, (Whole, Copied)):
            return None
        inputs = [planner.get(x, whole), _shape_item(planner, shape, layout)]
        return written(planner, op, inputs, 0 if isinstance(layout, Whole) else EACH)[0]

    return make


@rule("TensorListGetItem", "TensorListPopBack", "TensorListStack", needs_ranks=False)
def take(planner: Any, op: tf.Operation, values: list[Value]) -> list[Value]:
    """One element, the last one, or all."""
    items, tensor = values[0], op.outputs[-1]
    known = items.elements or _ANY
    dims = static_dims(tensor) if known.dims is None else known.dims
    layout, is_all = form_of(items), op.type == "TensorListStack"
    if is_all and known.dims is not None:
        count = op.get_attr("num_elements")
        first = (static_dims(tensor) or (None,))[0] if count < 0 else count
        dims = (known.count if first is None else first, *known.dims)
    other = WHOLE if isinstance(layout, Whole) else COPIED
    is_at = op.type == "TensorListGetItem"
    if is_at and own_lists.is_of_row(items, values[1]):
        layout = LISTED
    if layout == LISTED and is_all:
        return [own_lists.stacked(planner, op, items)]
    inputs = [planner.get(items, layout)]
    inputs += [
        _shape_item(planner, v, layout)
        if number == 1 + is_at
        else own_lists.own_row(planner, v)
        if layout == LISTED
        else planner.get(v, other)
        for number, v in enumerate(values[1:], 1)
    ]
    made = written(planner, op, inputs, place_of(layout))
    axis = Split(layout.axis + is_all) if isinstance(layout, Split) else WHOLE
    dims = None if tensor.dtype == tf.variant else dims
    of = {"row_of": known.row_of, "elements": known.of}
    value = planner.value(tensor.dtype, dims, axis, made[-1], **of)
    if is_all and axis == WHOLE and value.dims and planner.unit_of(value.dims[0]) is not None:
        value.layout = Split(0)  # what follows is spread again
    if known.const is not None and not is_all and known.dims is not None:
        value = Value(tensor.dtype, known.dims, const=constant_of(known.const, known.dims))
    if op.type != "TensorListPopBack":
        return [value]
    known = dataclasses.replace(known, count=None)
    rest = Value(tf.variant, None, layout, {layout: made[0]}, elements=known)
    return [rest, value]


@rule("TensorListLength", needs_ranks=False)
def length(planner: Any, op: tf.Operation, values: list[Value]) -> list[Value]:
    """The same for all devices' lists."""
    count = (values[0].elements or _ANY).count
    if count is not None:  # XLA asks for a constant
        return [Value(tf.int32, (), const=constant_of(count))]
    layout = form_of(values[0])
    if isinstance(layout, Listed):
        raise NeedsOthers
    item = written(planner, op, [planner.get(values[0], layout)], place_of(layout))[0]
    form = WHOLE if isinstance(layout, Whole) else COPIED
    return [Value(tf.int32, (), WHOLE, {form: item})]


@rule("TensorListElementShape", needs_ranks=False)
def element_shape(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Known, if the elements' dimensions are."""
    known = values[0].elements
    if known is None or known.dims is None or None in known.dims:
        return None
    const = constant_of(known.dims)
    return [Value(op.outputs[0].dtype, const.shape, const=const)]


@rule("TensorListResize", needs_ranks=False)
def resize(planner: Any, op: tf.Operation, values: list[Value]) -> list[Value]:
    """Of the same elements."""
    layout = form_of(values[0])
    if isinstance(layout, Listed):
        raise NeedsOthers
    other = WHOLE if isinstance(layout, Whole) else COPIED
    inputs = [planner.get(values[0], layout), planner.get(values[1], other)]
    item = written(planner, op, inputs, place_of(layout))[0]
    known = dataclasses.replace(
        values[0].elements or _ANY, is_constant=False, const=None, count=None
    )
    return [Value(tf.variant, None, layout, {layout: item}, elements=known)]


@rule("ZerosLike", "AddN", needs_ranks=False, is_by_axes=True)
def like(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Of lists; other tensors have their own rule."""
    if values[0].dtype != tf.variant:
        return elementwise(planner, op, values) if all(v.dims is not None for v in values) else None
    layouts = {form_of(value) for value in values if not value.is_free}
    if len(layouts) > 1:
        return None
    known = dataclasses.replace(values[0].elements or _ANY, is_constant=False, const=None)

    def make(layout: Layout) -> Item | None:
        if isinstance(layout, Partial):
            return None
        place = 0 if isinstance(layout, Whole) else EACH
        return written(planner, op, [planner.get(v, layout) for v in values], place)[0]

    if not layouts:
        return [Value(tf.variant, None, make=make, elements=known)]
    (layout,), item = layouts, make(*layouts)
    assert item is not None
    return [Value(tf.variant, None, layout, {layout: item}, elements=known)]
