"""Optionals: what a branch keeps for its gradient. Each device has those of its slices."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.constants import constant_of
from keras_multigpu.engines.tensorflow.partition.forms import NeedsOthers
from keras_multigpu.engines.tensorflow.partition.layouts import (
    COPIED,
    WHOLE,
    Elements,
    Kept,
    Layout,
    Partial,
    Split,
    Value,
    Whole,
)
from keras_multigpu.engines.tensorflow.partition.program import EACH, Item
from keras_multigpu.engines.tensorflow.partition.rules.lists import form_of, place_of, written
from keras_multigpu.engines.tensorflow.partition.rules.table import rule
from keras_multigpu.engines.tensorflow.partition.signatures import static_dims
from keras_multigpu.engines.tensorflow.partition.states import is_of_own_rows


@rule("OptionalNone", "OptionalFromValue", needs_ranks=False)
def put(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Nothing, or one tensor; `Split(0)` says that each device has its own, of any axis."""
    if len(values) > 1:
        return None
    known = [Kept(v.dims, _axis(planner, v), _numbers(v), v.elements) for v in values]

    def make(layout: Layout) -> Item | None:
        if isinstance(layout, Partial):
            return None
        own: Layout = WHOLE
        if not isinstance(layout, Whole):
            own = Split(known[0].axis) if known and known[0].axis is not None else COPIED
        place = 0 if isinstance(layout, Whole) else EACH
        return written(planner, op, [planner.get(v, own) for v in values], place)[0]

    elements = Elements(None, None, False, kept=tuple((None, one) for one in known))
    if not any(value.is_spread for value in values):
        return [Value(tf.variant, None, make=make, elements=elements)]
    item = make(Split(0))
    assert item is not None
    return [Value(tf.variant, None, Split(0), {Split(0): item}, elements=elements)]


def _axis(planner: Any, value: Value) -> int | None:
    """The axis along which devices keep slices of it; of an optional, a sign."""
    if value.elements is not None and value.elements.are_optionals:
        return 0 if planner.splits else None
    if is_of_own_rows(value, planner.own_symbols):
        raise NeedsOthers  # the gradient can't count them
    if value.axis is not None or value.is_state or value.dims is None:
        return value.axis
    found = (axis for axis, dim in enumerate(value.dims) if planner.unit_of(dim) is not None)
    return next(found, None)


def _numbers(value: Value) -> tuple[Any, ...] | None:
    return None if value.const is None else tuple(value.const.flat)


@rule("OptionalHasValue", "OptionalGetValue", needs_ranks=False)
def take(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Whether there is a tensor, the same on all devices; or that of the branch in which it is."""
    (one,), tensor = values, op.outputs[0]
    if len(op.outputs) > 1 or one.elements is None or one.elements.kept is None:
        return None
    layout = form_of(one)
    inputs, place = [planner.get(one, layout)], place_of(layout)
    if op.type == "OptionalHasValue":
        form = WHOLE if isinstance(layout, Whole) else COPIED
        return [Value(tensor.dtype, (), WHOLE, {form: written(planner, op, inputs, place)[0]})]
    kept = dict(one.elements.kept)
    known = kept.get(planner.branch if len(kept) > 1 or None not in kept else None)
    if known is None and layout != WHOLE:
        raise NeedsOthers
    known = known or Kept()
    dims = static_dims(tensor) if known.dims is None else known.dims
    dims = None if tensor.dtype == tf.variant else dims
    if known.const is not None and dims is not None:
        const = constant_of(known.const).reshape([int(dim) for dim in dims])
        return [Value(tensor.dtype, dims, const=const)]
    own: Layout = WHOLE if layout == WHOLE or known.axis is None else Split(known.axis)
    if isinstance(own, Split) and dims is not None and planner.unit_of(dims[own.axis]) is None:
        raise NeedsOthers  # what they hold has other rows in other iterations
    shapes = tf.compat.v1.AttrValue.ListValue(shape=[_shape_of(dims, own).as_proto()])
    promised = tf.compat.v1.AttrValue(list=shapes)
    (item,) = written(planner, op, inputs, place, output_shapes=promised)
    value = planner.value(tensor.dtype, dims, own, item, elements=known.of)
    if layout != WHOLE and own == WHOLE:
        value.forms = {COPIED: item}
    return [value]


def _shape_of(dims: Any, layout: Layout) -> tf.TensorShape:
    """A part's shape, as far as it is the same on all devices."""
    if dims is None:
        return tf.TensorShape(None)
    axis = layout.axis if isinstance(layout, Split) else None
    is_known = [isinstance(dim, int) and number != axis for number, dim in enumerate(dims)]
    return tf.TensorShape([dim if known else None for dim, known in zip(dims, is_known)])
