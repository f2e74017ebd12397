"""Operations on rows: the first axis is the batch, the others belong together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import Value
from keras_multigpu.engines.tensorflow.partition.rules.table import Table
from keras_multigpu.engines.tensorflow.partition.signatures import Signature

RULES = Table()

# {type: the inputs that have no rows}
ROWS: dict[str, tuple[int, ...]] = {
    "Conv2D": (1,),
    "Conv3D": (1,),
    "DepthwiseConv2dNative": (1,),
    "Dilation2D": (1,),
    "MaxPool": (),
    "MaxPoolV2": (1, 2),
    "MaxPoolGrad": (),
    "MaxPoolGradGrad": (),
    "MaxPool3D": (),
    "MaxPool3DGrad": (),
    "MaxPool3DGradGrad": (),
    "AvgPool": (),
    "AvgPool3D": (),
    "LRN": (),
    "LRNGrad": (),
    "DepthToSpace": (),
    "SpaceToDepth": (),
    "ExtractImagePatches": (),
    "ExtractVolumePatches": (),
    "ResizeArea": (1,),
    "ResizeBicubic": (1,),
    "ResizeBicubicGrad": (),
    "ResizeBilinear": (1,),
    "ResizeBilinearGrad": (),
    "ResizeNearestNeighbor": (1,),
    "ResizeNearestNeighborGrad": (1,),
    "ScaleAndTranslate": (1, 2, 3),
    "ImageProjectiveTransformV3": (2, 3),
    "SoftmaxCrossEntropyWithLogits": (),
    "SparseSoftmaxCrossEntropyWithLogits": (),
    "InTopKV2": (2,),
    "CTCLossV2": (),
}
# Images: channels last, any axes in front; {type: the inputs beside the images}
IMAGES: dict[str, tuple[int, ...]] = {
    "RGBToHSV": (),
    "HSVToRGB": (),
    "AdjustContrastv2": (1,),
    "AdjustHue": (1,),
    "AdjustSaturation": (1,),
}
# {type: the input with the shape of the output, and the other inputs that have no rows}
GRADIENTS: dict[str, tuple[int, ...]] = {
    "AvgPoolGrad": (0,),
    "AvgPool3DGrad": (0,),
    "Conv2DBackpropInput": (0, 1),
    "Conv3DBackpropInputV2": (0, 1),
    "DepthwiseConv2dNativeBackpropInput": (0, 1),
}
FILTERS = (
    "Conv2DBackpropFilter",
    "Conv3DBackpropFilterV2",
    "DepthwiseConv2dNativeBackpropFilter",
)
# {type: how many axes at the end belong together}
LAST_AXES: dict[str, int] = {
    "Softmax": 1,
    "LogSoftmax": 1,
    "TopKV2": 1,
    "FFT": 1,
    "FFT2D": 2,
    "FFT3D": 3,
    "IFFT": 1,
    "IFFT2D": 2,
    "IFFT3D": 3,
    "RFFT": 1,
    "RFFT2D": 2,
    "RFFT3D": 3,
    "IRFFT": 1,
    "IRFFT2D": 2,
    "IRFFT3D": 3,
    "Cholesky": 2,
    "CholeskyGrad": 2,
    "LogMatrixDeterminant": 2,
    "MatrixDeterminant": 2,
    "MatrixInverse": 2,
    "MatrixSolve": 2,
    "MatrixTriangularSolve": 2,
    "Qr": 2,
    "Svd": 2,
    "SelfAdjointEigV2": 2,
    "MatrixBandPart": 2,
    "MatrixDiagPartV3": 2,
    "MatrixDiagV3": 1,
    "MatrixSetDiagV3": 2,
}
_KEEP_SHAPE = ("Softmax", "LogSoftmax", "MatrixBandPart")


def _row(rank: int, has_rows: bool = True) -> tuple[str | None, ...]:
    return ("row" if has_rows else None, *(None,) * (rank - 1)) if rank else ()


def _rank(value: Value) -> int:
    return len(value.dims or ())


@RULES.rule(*ROWS)
def rows(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Each row by itself."""
    without = ROWS[op.type]
    if any(tensor.shape.rank is None for tensor in op.outputs):
        return None
    dims = None
    if "CrossEntropy" in op.type:
        dims = [(values[0].dims or ())[: tensor.shape.rank] for tensor in op.outputs]
        if values[0].dims[0] != values[1].dims[0]:  # type: ignore[index]
            return None  # broadcast
    inputs = [_row(_rank(value), i not in without) for i, value in enumerate(values)]
    return Signature(inputs, [_row(tensor.shape.rank) for tensor in op.outputs], dims=dims)


@RULES.rule(*IMAGES)
def images(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Each image by itself; contrast belongs to an image's pixels."""
    rank = _rank(values[0])
    if rank < 4:
        return None
    inputs = [_row(_rank(value), i not in IMAGES[op.type]) for i, value in enumerate(values)]
    return Signature(inputs, [_row(rank)], dims=[values[0].dims])


@RULES.rule(*GRADIENTS)
def gradients(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Gradients by rows, of a shape that is an input."""
    if values[0].const is None:
        return None
    inputs = [_row(_rank(value), i not in GRADIENTS[op.type]) for i, value in enumerate(values)]
    output = _row(len(values[0].const))
    return Signature(inputs, [output], shapes={0: 0}, dims=[tuple(values[0].const)])


@RULES.rule(*FILTERS)
def filters(planner: Any, op: tf.Operation, values: list[Value]) -> Signature:
    """Gradients by filters: the rows add up.

    The kernels of grouped and depthwise convolutions give garbage if there are no rows.
    """
    rank = op.outputs[0].shape.rank
    inputs = [_row(_rank(values[0])), (None,), _row(_rank(values[2]))]
    return Signature(inputs, [_row(rank, False)], "sum", zero_if_empty=True)


@RULES.rule(*LAST_AXES)
def last_axes(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Any axes in front, the last ones belong together."""
    front = _rank(values[0]) - LAST_AXES[op.type]
    if front < 0 or any(tensor.shape.rank is None for tensor in op.outputs):
        return None
    labels = tuple(range(front))
    dims = [values[0].dims] if op.type in _KEEP_SHAPE else None

    def labelled(rank: int, dims: Sequence[Any] | None) -> tuple[Any, ...]:
        if rank < front or (dims is not None and tuple(dims[:front]) != values[0].dims[:front]):  # type: ignore[index]
            return (None,) * rank
        return labels + (None,) * (rank - front)

    inputs = [labelled(_rank(value), value.dims) for value in values]
    if op.type in ("MatrixSolve", "MatrixTriangularSolve", "CholeskyGrad") and None in inputs[1][:front]:
        return None  # broadcast
    return Signature(inputs, [labelled(t.shape.rank, None) for t in op.outputs], dims=dims)
