"""Diagonals of square matrices whose rows, or columns, are the batch's: of similarities."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.constants import numbers_of
from keras_multigpu.engines.tensorflow.partition.layouts import COPIED, Split, Value
from keras_multigpu.engines.tensorflow.partition.program import EACH
from keras_multigpu.engines.tensorflow.partition.rules.matrices import last_axes
from keras_multigpu.engines.tensorflow.partition.rules.table import rule


@rule("MatrixDiagPartV3", "MatrixSetDiagV3", "MatrixDiagV3")
def diagonals(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Each device's rows, or columns, have its part of the diagonal; of whole matrices, all."""
    makes = op.type == "MatrixDiagV3"
    dims = values[0].dims or ()
    square = (*dims, *dims[-1:]) if makes else dims
    if not _is_plain(op, values) or len(square) < 2 or square[-1] != square[-2]:
        return last_axes(planner, op, values)
    rank, at = len(square), Split(len(square) - 2)  # of a diagonal, the last axis
    matrix = None if makes else values[0]
    axis = at.axis if matrix is None or matrix.axis != rank - 1 else rank - 1
    tensors = values[:2] if op.type == "MatrixSetDiagV3" else values[:1]
    if all(one.axis is None or one.axis < rank - 2 for one in tensors):
        return last_axes(planner, op, values)
    layouts = [Split(axis) if one is matrix else at for one in tensors]
    inputs = [planner.get(one, layout) for one, layout in zip(tensors, layouts)]
    inputs += [planner.get(values[4], COPIED)] if makes else []

    def emit(local: Any, *given: tf.Tensor) -> list[Any]:
        is_on = _on_diagonal(local, square[-1], axis == rank - 1)
        if op.type == "MatrixSetDiagV3":
            own = tf.expand_dims(given[1], -2 if axis == rank - 1 else -1)
            return [tf.where(is_on, own, given[0])]
        if makes:
            return [tf.where(is_on, given[0][..., None], given[1])]
        return [tf.reduce_sum(tf.where(is_on, given[0], 0), -2 if axis == rank - 1 else -1)]

    (item,) = planner.add(emit, inputs, EACH, [values[0].dtype], name=op.name)
    made = (square[:-1], at) if op.type == "MatrixDiagPartV3" else (square, Split(axis))
    return [planner.value(values[0].dtype, *made, item)], "spread"


def _is_plain(op: tf.Operation, values: list[Value]) -> bool:
    """Whether it is the main diagonal, of numbers."""
    place = values[2 if op.type == "MatrixSetDiagV3" else 1]
    sizes = [values[0].dims[-1], -1] if op.type == "MatrixDiagV3" and values[0].dims else []
    return (
        numbers_of(place.const) == [0]
        and values[0].dtype != tf.bool
        and values[0].dtype.is_numpy_compatible
        and values[0].dtype != tf.string
        and all(one.const is not None and one.const[()] in sizes for one in values[2:4] if sizes)
    )


def _on_diagonal(local: Any, size: Any, are_columns: bool) -> tf.Tensor:
    """Of a device's rows, or columns, of a square matrix, which entries are on the diagonal."""
    begin, count = local.extent(size, Split(0))
    own, every = begin + tf.range(count), tf.range(local.dim(size))
    return every[:, None] == own if are_columns else own[:, None] == every
