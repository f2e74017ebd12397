"""Operations that are linear in addends: computed by each device on its own, not summed yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import COPIED, SUM, Partial, Value
from keras_multigpu.engines.tensorflow.partition.operations import operation
from keras_multigpu.engines.tensorflow.partition.program import EACH
from keras_multigpu.engines.tensorflow.partition.signatures import static_dims

# All inputs are addends; of what sums later, as little crosses as of what sums now.
_OF_ALL = {"AddN": 0, "AddV2": 0, "Add": 0, "Sub": 0, "Neg": 0, "ConcatV2": 1, "Pack": 0}
"""{type: how many of the last inputs are no addends}."""

_OF_FIRST = frozenset({"Reshape", "Transpose", "ExpandDims", "Squeeze"})

# Where nothing can cross, as in a loop of one device, also what leaves less, or more, to cross.
_ALONE_OF_FIRST = frozenset(
    {"Pad", "PadV2", "Slice", "StridedSlice", "SplitV", "Sum", "Mean", "Tile", "BroadcastTo"}
    | {"GatherV2", "RealDiv", "Cumsum", "ReverseV2"}
)
_ALONE_OF_ONE = frozenset({"Mul", "MatMul", "BatchMatMulV2"})


def addends(planner: Any, op: tf.Operation, values: Sequence[Value]) -> list[Value] | None:
    """The addends of an operation's outputs; `None` if they have to be summed first."""
    places = _places(op, values, planner.is_alone)
    if places is None or not _may_be(values, places, planner.is_alone or planner.is_within):
        return None
    shapes = [static_dims(tensor) for tensor in op.outputs]
    if op.type in ("AddN", "AddV2", "Add", "Sub", "Neg"):
        if any(value.dims != values[0].dims for value in values):
            return None
        shapes = [values[0].dims]
    elif any(shape is None or None in shape for shape in shapes):
        return None
    forms = [SUM if number in places else COPIED for number in range(len(values))]
    inputs = [planner.get(value, form) for value, form in zip(values, forms)]
    types = [tensor.dtype for tensor in op.outputs]
    items = planner.add(operation(op), inputs, EACH, types, name=op.name)
    is_trained = any(values[number].is_trained for number in places)
    return [
        planner.value(dtype, shape, SUM, item, is_trained=is_trained)
        for dtype, shape, item in zip(types, shapes, items)
    ]


def _places(op: tf.Operation, values: Sequence[Value], is_alone: bool) -> range | None:
    """The inputs in which an operation is linear, all together."""
    if op.type in _OF_ALL:
        return range(len(values) - _OF_ALL[op.type])
    if op.type == "Mean" and not values[0].dtype.is_floating:
        return None  # it is rounded
    if op.type in _OF_FIRST or (is_alone and op.type in _ALONE_OF_FIRST):
        return range(1)
    if is_alone and op.type == "Split":
        return range(1, 2)
    if is_alone and op.type in _ALONE_OF_ONE:
        (*sums,) = [number for number, value in enumerate(values) if value.layout == SUM]
        return range(sums[0], sums[0] + 1) if len(sums) == 1 else None
    return None


def _may_be(values: Sequence[Value], places: range, is_within: bool) -> bool:
    """Whether the inputs are addends, or can be, and the others whole.

    Within loops and branches they can: their sums cross once, afterwards.
    """
    inside = [values[number] for number in places]
    others = [value for number, value in enumerate(values) if number not in places]
    return (
        any(value.layout == SUM for value in inside)
        and all(value.axis is None for value in values)
        and all(value.layout == SUM or (is_within and not value.is_spread) for value in inside)
        and not any(isinstance(value.layout, Partial) for value in others)
        and all(value.dtype == inside[0].dtype for value in inside)
        and inside[0].dtype != tf.bool
    )
