"""Finds operations by which the places of rows in a batch, or their number, may have an effect.

Three rows may not show it: an expert that takes twelve rows, or a row that sees the twentieth
before it. Most such operations have none; they say that many rows must be tried.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.tracing.functions import bodies_of

# What is of the values of all rows, or changes how many there are.
_OF_ALL = re.compile(
    ".*(Bincount|Scatter|Segment|Unique).*|(DynamicPartition|ListDiff|NonMaxSuppression|Where).*"
)
# Along an axis, which is this input.
_ALONG = {
    **dict.fromkeys(("Cumprod", "Cumsum", "CumulativeLogsumexp", "ReverseV2"), 1),
    **{"ConcatV2": -1, "Roll": 2},
}
_PADDING = {"MirrorPad", "Pad", "PadV2"}
_MOVING = {"ExpandDims", "Reshape", "Transpose"}


def sees_places(operation: Any) -> bool:
    """Whether an operation may look at the places of rows, which one of its inputs has."""
    kind = operation.type
    if _OF_ALL.fullmatch(kind):
        return True
    axes = _axes(operation.inputs[0])
    if kind in _ALONG:
        along = tf.get_static_value(operation.inputs[_ALONG[kind]])
        return along is None or any(axes[one] is None for one in along.reshape(-1) if axes)
    if kind in _PADDING:
        sizes = tf.get_static_value(operation.inputs[1])
        return sizes is None or any(any(two) for two, one in zip(sizes, axes) if one is None)
    if kind == "TopKV2":
        return axes[-1:] == [None]
    if kind == "StridedSlice":
        return axes[:1] == [None] and _is_of_some_rows(operation)
    if kind == "Slice":
        sizes = tf.get_static_value(operation.inputs[2])
        return axes[:1] == [None] and (sizes is None or sizes[0] != -1)
    ends = _axes(operation.outputs[0]) if operation.outputs else []
    if kind in _MOVING:
        is_moved = axes[:1] == [None] != ends[:1] and None in ends
        return is_moved and not (kind == "Transpose" and len(axes) > 2)  # recurrent layers do so
    return kind == "MatMul" and ends == [None, None]


def row_size(graph: Any, unknown: int) -> int:
    """How many numbers a graph computes for each row of a batch; unknown axes are this long."""
    total = 0
    for operation in graph.get_operations():
        total += sum(row_size(body, unknown) for body in bodies_of(operation))
        for first, *others in filter(None, map(_axes, operation.outputs)):
            if first is None:
                size = 1
                for axis in others:
                    size *= axis or unknown
                total += size
    return total


def _axes(tensor: Any) -> Sequence[int | None]:
    return tensor.shape.as_list() if tensor.shape.rank else []


def _is_of_some_rows(operation: Any) -> bool:
    """Whether an index takes some of the rows, or puts an axis before them."""
    masks = [operation.get_attr(f"{one}_mask") for one in ("begin", "end", "ellipsis")]
    takes_all = masks[0] & masks[1] & 1
    strides = tf.get_static_value(operation.inputs[3])
    is_in_order = strides is not None and strides.size > 0 and strides[0] == 1
    return not (masks[2] & 1 or (takes_all and is_in_order))
