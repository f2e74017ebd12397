"""Finds what the results of a traced call have of its batch as a whole: its largest value, say.

Made-up rows may not show it. What it does may be less than rounding, or begin beyond a threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.values import Tensor

# The sizes of a batch are no values of its rows.
_OF_SIZES = {"Shape", "ShapeN", "Rank", "Size", "ZerosLike", "OnesLike"}
_LINEAR = {
    *("Add", "AddN", "AddV2", "Mean", "Neg", "Sub", "Sum"),
    *("Identity", "IdentityN", "PreventGradient", "StopGradient"),
    *("BroadcastTo", "ConcatV2", "ExpandDims", "GatherV2", "Pack", "Reshape", "Squeeze"),
    *("StridedSlice", "Tile", "Transpose", "Unpack"),
}
# Linear in each input.
_PRODUCTS = {"BatchMatMulV2", "Einsum", "MatMul", "Mul", "MulNoNan"}
_QUOTIENTS = {"DivNoNan", "RealDiv"}


class BatchWide:
    """The numbers of a whole batch in a traced call, and where they go.

    Args:
        graph: the call's graph, traced for any number of rows.
        batch: its arguments.
    """

    def __init__(self, graph: Any, batch: Sequence[Tensor]):
        self._of_rows = {id(one) for one in batch if _has_rows(one)}
        # The operation that made the number, by the tensors that have it.
        self._makers: dict[int, Any] = {}
        self._curved: set[int] = set()
        for operation in graph.get_operations():
            if operation.type not in _OF_SIZES:
                self._follow(operation)

    def maker(self, result: Tensor) -> Any:
        """The operation that makes a number of the whole batch for a result, or `None`."""
        return self._makers.get(id(result))

    def is_curved(self, result: Tensor) -> bool:
        """Whether a result is no linear function of such numbers: no sum or mean over rows then."""
        return id(result) in self._curved

    def _follow(self, operation: Any) -> None:
        inputs = [id(one) for one in operation.inputs]
        if self._of_rows.isdisjoint(inputs):
            return
        maker = next((self._makers[one] for one in inputs if one in self._makers), None)
        if maker is not None and operation.type == "Mul" and any(map(_is_zero, operation.inputs)):
            return
        is_curved = not self._curved.isdisjoint(inputs)
        is_curved = is_curved or (maker is not None and not self._is_linear(operation))
        for output in operation.outputs:
            self._of_rows.add(id(output))
            if maker is not None or _is_number(output):
                self._makers[id(output)] = maker or operation
            if is_curved:
                self._curved.add(id(output))

    def _is_linear(self, operation: Any) -> bool:
        if operation.type == "Cast":
            return operation.outputs[0].dtype.is_floating
        of_rows = [id(one) in self._of_rows for one in operation.inputs]
        if operation.type in _PRODUCTS:
            return sum(of_rows) == 1
        if operation.type in _QUOTIENTS:
            return not of_rows[1]
        return operation.type in _LINEAR


def _has_rows(tensor: Tensor) -> bool:
    return tensor.shape.rank is None or None in tensor.shape.as_list()


def _is_number(tensor: Tensor) -> bool:
    """Whether a tensor that is computed of rows has none; integers are sizes, as a rule."""
    return (tensor.dtype.is_floating or tensor.dtype == tf.bool) and not _has_rows(tensor)


def _is_zero(tensor: Tensor) -> bool:
    """Whether a tensor is a constant of zeros, by which code keeps a value without an effect."""
    value = tf.get_static_value(tensor)
    return value is not None and not value.any()
