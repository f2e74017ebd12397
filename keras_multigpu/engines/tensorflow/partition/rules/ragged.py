"""Ragged rows: one device splits texts and pads their words; what follows is spread."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import Value
from keras_multigpu.engines.tensorflow.partition.rules.table import rule, split_again
from keras_multigpu.engines.tensorflow.partition.signatures import static_dims


@rule("StringSplitV2", "UnicodeDecode")
def split_texts(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Every text of a vector gives a row of words or of characters."""
    dims = values[0].dims or ()
    planner.cache["texts of", id(op)] = dims[0] if len(dims) == 1 else None
    return planner.fallback(op, values)


@rule("RaggedTensorToTensor")
def pad(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Rows of equal length."""
    kind = op.get_attr("row_partition_types")[0]
    rows = _number(planner, op.inputs[3]) if kind == b"FIRST_DIM_SIZE" else None
    if kind == b"ROW_SPLITS":
        rows = _ranges(planner, op.inputs[3], values[3])
    shape = tf.get_static_value(op.inputs[0])
    is_given = shape is None or (shape.ndim and shape[0] != -1)
    dims = static_dims(op.outputs[0])
    return None if is_given or not dims else split_again(planner, op, values, (rows, *dims[1:]))


@rule("RaggedBincount")
def count(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Counts for each row."""
    _, width = static_dims(op.outputs[0]) or (None, None)
    rows = _ranges(planner, op.inputs[0], values[0])
    return split_again(planner, op, values, (rows, width))


@rule("RaggedRange")
def ranges(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """A row for each start, each limit, or each step."""
    rows: Any = next((value.dims[0] for value in values if value.dims), 1)
    return planner.fallback(op, values, [(rows + 1,), (None,)])


@rule("RaggedGather")
def gather_ragged(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Rows of a ragged tensor, a row for each index."""
    indices = values[-1].dims or ()
    if len(indices) != 1:
        return None
    rest = [static_dims(one) for one in op.outputs[1:]]
    return planner.fallback(op, values, [(indices[0] + 1,), *rest])


def _number(planner: Any, scalar: tf.Tensor) -> Any:
    """The number of texts, if a scalar is that; else `None`."""
    op = _origin(scalar).op
    if op.type == "Minimum":  # of a number, and of what is at least that number
        other = op.inputs[1].op
        is_same = other.type == "Maximum" and op.inputs[0] is other.inputs[0]
        return _number(planner, op.inputs[0]) if is_same else None
    if op.type != "StridedSlice" or op.get_attr("shrink_axis_mask") != 1:
        return None
    texts, begin = op.inputs[0].op, tf.get_static_value(op.inputs[1])
    is_of_shape = texts.type == "StringSplitV2" and op.inputs[0] is texts.outputs[2]
    is_first = begin is not None and [*begin] == [0]
    return _texts(planner, texts) if is_of_shape and is_first else None


def _ranges(planner: Any, splits: tf.Tensor, value: Value | None = None) -> Any:
    """How many rows lie between splits; `None` if that isn't known."""
    if value is not None and value.dims and planner.multiple_of(value.dims[0] - 1) is not None:
        return value.dims[0] - 1
    origin = _origin(splits)
    op = origin.op
    if op.type == "UnicodeDecode":
        return _texts(planner, op) if origin is op.outputs[0] else None
    if op.type == "StringNGrams":
        return _ranges(planner, op.inputs[1])
    if op.type != "ConcatV2" or len(op.inputs) != 3 or op.inputs[0].shape != (1,):
        return None
    sums = _origin(op.inputs[1]).op
    counts = _origin(sums.inputs[0]).op if sums.type == "Cumsum" else sums
    is_one_row = counts.type == "DenseBincount" and counts.inputs[0].shape.rank == 1
    return _number(planner, counts.inputs[1]) if is_one_row else None


def _texts(planner: Any, op: tf.Operation) -> Any:
    return planner.cache.get(("texts of", id(op)))


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    """What has the same numbers, before casts."""
    while tensor.op.type in ("Cast", "Identity"):
        tensor = tensor.op.inputs[0]
    return tensor
