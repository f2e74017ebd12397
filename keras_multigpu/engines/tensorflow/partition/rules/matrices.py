"""Operations on the last axes: softmax, sorting, transforms, matrices."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.constants import numbers_of
from keras_multigpu.engines.tensorflow.partition.layouts import Value
from keras_multigpu.engines.tensorflow.partition.rules.table import listed, no_axis, rule
from keras_multigpu.engines.tensorflow.partition.signatures import Signature

# {type: how many axes at the end belong together}
LAST_AXES: dict[str, int] = listed(
    {
        1: "Softmax LogSoftmax TopKV2 FFT IFFT RFFT IRFFT MatrixDiagV3",
        2: "FFT2D IFFT2D RFFT2D IRFFT2D Cholesky CholeskyGrad LogMatrixDeterminant Eig Lu Qr Svd "
        "MatrixDeterminant MatrixInverse MatrixLogarithm MatrixSquareRoot MatrixSolve "
        "MatrixTriangularSolve TridiagonalSolve SelfAdjointEigV2 MatrixBandPart MatrixDiagPartV3 "
        "MatrixSetDiagV3",
        3: "FFT3D IFFT3D RFFT3D IRFFT3D",
    }
)
_KEEP_SHAPE = (
    "Softmax LogSoftmax MatrixBandPart MatrixSetDiagV3 MatrixInverse Cholesky MatrixLogarithm "
    "MatrixSquareRoot FFT FFT2D FFT3D IFFT IFFT2D IFFT3D"
).split()
_SOLVES = ("MatrixSolve", "MatrixTriangularSolve", "TridiagonalSolve")
_WITH_TWO = (*_SOLVES, "CholeskyGrad", "MatrixSetDiagV3")


@rule(*[one for one in LAST_AXES if "Diag" not in one])
def last_axes(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Any axes in front, the last ones belong together."""
    ranks = [tensor.shape.rank for tensor in op.outputs]
    if None in ranks:
        return None
    # Several diagonals are an axis more of the input.
    front = ranks[0] - 2 if op.type == "MatrixDiagV3" else values[0].rank - LAST_AXES[op.type]
    if front < 0 or not all(
        _has_front(op, value, values[0], front) for value in _matrices(op, values)
    ):
        return None
    labels: tuple[Any, ...] = tuple(range(front))
    with_front = list(map(id, _matrices(op, values)))
    inputs = [
        labels + (None,) * (value.rank - front) if id(value) in with_front else no_axis(value)
        for value in values
    ]
    outputs = [
        labels + (None,) * (rank - front) if rank >= front else (None,) * rank for rank in ranks
    ]
    dims: Any = [values[0].dims] if op.type in _KEEP_SHAPE else None
    if op.type in _SOLVES:  # every column by itself
        inputs[1], dims = (*labels, None, "column"), [values[1].dims]
        outputs = [inputs[1]]
    if op.type == "TopKV2" and values[1].const is not None:
        dims = [(*(values[0].dims or ())[:-1], values[1].const[()])] * 2
    if op.type == "MatrixDiagV3" and [numbers_of(v.const) for v in values[1:4]] == [
        [0],
        [-1],
        [-1],
    ]:
        dims = [(*(values[0].dims or ()), (values[0].dims or ())[-1])]
    given = values[0].dims or ()
    if op.type == "MatrixDiagPartV3" and given[-1] == given[-2]:
        dims = [given[:-1]] if numbers_of(values[1].const) == [0] else None
    return Signature(inputs, outputs, dims=dims)


def _matrices(op: tf.Operation, values: list[Value]) -> list[Value]:
    """The inputs that have rows; the others are sizes, places of diagonals, fills."""
    return values[:2] if op.type in _WITH_TWO else values[:1]


def _has_front(op: tf.Operation, value: Value, first: Value, front: int) -> bool:
    """Whether nothing is broadcast."""
    is_aligned = op.type == "MatrixSetDiagV3" or value.rank == first.rank
    return is_aligned and (value.dims or ())[:front] == (first.dims or ())[:front]
