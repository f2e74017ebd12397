"""Sparse rows: one device adds up what they name; what follows is spread."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import Value
from keras_multigpu.engines.tensorflow.partition.rules.table import rule, split_again


@rule("SparseFillEmptyRows")
def fill_empty_rows(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Every row of the result has an entry."""
    if values[2].const is not None:
        planner.cache["rows of", id(op)] = values[2].const[0]
    return planner.fallback(op, values)


@rule("SegmentSum", "SegmentMean")
def segment(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """As many rows as have entries, if that is known."""
    rows = planner.cache.get(("rows of", id(_filled(op.inputs[1]))))
    return split_again(planner, op, values, (rows, *(values[0].dims or ())[1:]))


def _filled(numbers: tf.Tensor) -> tf.Operation | None:
    """What gave entries of which these are the numbers of rows."""
    op = numbers.op
    while op.type in ("Cast", "Identity"):
        op = op.inputs[0].op
    if op.type != "StridedSlice" or op.inputs[0].op.type != "SparseFillEmptyRows":
        return None
    masks = {name: op.get_attr(name) for name in ("begin_mask", "end_mask", "shrink_axis_mask")}
    begin, strides = tf.get_static_value(op.inputs[1]), tf.get_static_value(op.inputs[3])
    is_first_column = masks == {"begin_mask": 1, "end_mask": 1, "shrink_axis_mask": 2}
    is_all = begin is not None and strides is not None and [*begin, *strides] == [0, 0, 1, 1]
    return op.inputs[0].op if is_first_column and is_all else None
