"""Operations on rows: the first axis is the batch, the others belong together."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import Value
from keras_multigpu.engines.tensorflow.partition.operations import create
from keras_multigpu.engines.tensorflow.partition.rules.table import listed, no_axis, rule
from keras_multigpu.engines.tensorflow.partition.signatures import Signature

# {type: the inputs that have no rows}
ROWS: dict[str, tuple[int, ...]] = listed(
    {
        (): "MaxPool MaxPoolGrad MaxPool3D MaxPool3DGrad AvgPool AvgPool3D LRN LRNGrad "
        "DepthToSpace SpaceToDepth ExtractImagePatches ExtractVolumePatches ResizeBicubicGrad "
        "ResizeBilinearGrad SparseSoftmaxCrossEntropyWithLogits",
        (1,): "Conv2D Conv3D DepthwiseConv2dNative Dilation2D Dilation2DBackpropInput ResizeArea "
        "ResizeBicubic ResizeBilinear ResizeNearestNeighbor ResizeNearestNeighborGrad",
        (2,): "InTopKV2",
        (1, 2): "MaxPoolV2",
        (2, 3): "ScaleAndTranslateGrad ImageProjectiveTransformV3",
        (1, 2, 3): "ScaleAndTranslate",
    }
)
# Images: channels last, any axes in front; {type: the inputs beside the images}
IMAGES: dict[str, tuple[int, ...]] = listed(
    {(): "RGBToHSV HSVToRGB", (1,): "AdjustContrastv2 AdjustHue AdjustSaturation"}
)
# {type: the input with the shape of the output, and the other inputs that have no rows}
GRADIENTS: dict[str, tuple[int, ...]] = listed(
    {
        (0,): "AvgPoolGrad AvgPool3DGrad",
        (0, 1): "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput",
    }
)
FILTERS = (
    "Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter "
    "Dilation2DBackpropFilter"
).split()
# {type: the input with an image's new height and width}
SIZES: dict[str, int] = listed(
    {
        1: "ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor ScaleAndTranslate "
        "ResizeNearestNeighborGrad",
        2: "ImageProjectiveTransformV3",
    }
)
# oneDNN's kernels give no rows the sizes of the input
CONVOLUTIONS = ("Conv2D", "Conv3D", "DepthwiseConv2dNative")
# Kernels that end the process if there are no rows (oneDNN's, in single precision)
NEEDS_ROWS = frozenset({"MaxPoolGrad", "MaxPool3DGrad"})


def _row(rank: int, has_rows: bool = True) -> tuple[str | None, ...]:
    return ("row" if has_rows else None, *(None,) * (rank - 1)) if rank else ()


@rule(*ROWS)
def rows(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Each row by itself."""
    without = set(ROWS[op.type])
    if any(tensor.shape.rank is None for tensor in op.outputs):
        return None
    if op.type == "ImageProjectiveTransformV3" and (values[1].dims or ())[0] == 1:
        without.add(1)  # one transformation for all images
    inputs = [_row(value.rank, i not in without) for i, value in enumerate(values)]
    outputs = [_row(tensor.shape.rank) for tensor in op.outputs]
    if op.type in NEEDS_ROWS:
        return Signature(inputs, outputs, dims=[values[0].dims], zero_if_empty=["row"])
    dims = _dims_of(op, values)
    if op.type not in CONVOLUTIONS:
        return Signature(inputs, outputs, dims=dims)
    empty = _of_one_row if dims is None else None
    return Signature(inputs, outputs, dims=dims, zero_if_empty=["row"], write_empty=empty)


def _of_one_row(kind: str, inputs: Any, attributes: Any, name: str) -> list[Any]:
    """None of the rows that the operation gives for one of zeros."""
    images, *others = inputs
    row = tf.zeros(tf.concat([[1], tf.shape(images)[1:]], 0), images.dtype)
    return [tensor[:0] for tensor in create(kind, [row, *others], attributes, name)]


@rule("MaxPoolWithArgmax", "MaxPoolGradWithArgmax")
def pool_with_places(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Each row by itself, if places are those in an image; the kernels take no empty tensors."""
    sizes, given = op.outputs[0].shape[1:], values[0].dims or ()
    if op.get_attr("include_batch_in_index") or not sizes.is_fully_defined():
        return None
    made = [_row(4)] * len(op.outputs)
    dims = [(given[0], *sizes.as_list())] * len(made)
    return Signature([_row(4)] * len(values), made, dims=dims, zero_if_empty=["row"])


def _dims_of(op: tf.Operation, values: list[Value]) -> list[Any] | None:
    """The dimensions of a convolution or an image, if they are known."""
    given = values[0].dims or ()
    if op.type in SIZES:
        size = values[SIZES[op.type]].const
        return None if size is None else [(given[0], *size, given[-1])]
    if op.type == "SparseSoftmaxCrossEntropyWithLogits":
        return [given[:1], given]
    sizes = op.outputs[0].shape[1:]
    if op.type in CONVOLUTIONS and sizes.is_fully_defined():
        return [(given[0], *sizes.as_list())]
    return None


@rule("SoftmaxCrossEntropyWithLogits")
def cross_entropy(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Each row by itself, if logits and labels have the same ones."""
    if values[0].dims != values[1].dims or values[0].rank != 2:
        return None  # broadcast
    pair = _row(2)
    return Signature([pair, pair], [_row(1), pair], dims=[values[0].dims[:1], values[0].dims])  # type: ignore[index]


@rule(*IMAGES)
def images(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Each image by itself; contrast belongs to an image's pixels."""
    rank = values[0].rank
    if rank < 4:
        return None
    inputs = [_row(value.rank, i not in IMAGES[op.type]) for i, value in enumerate(values)]
    return Signature(inputs, [_row(rank)], dims=[values[0].dims])


@rule(*GRADIENTS)
def gradients(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Gradients by rows, of a shape that is an input."""
    if values[0].const is None or len(values[0].const) != op.outputs[0].shape.rank:
        return None
    inputs = [_row(value.rank, i not in GRADIENTS[op.type]) for i, value in enumerate(values)]
    output = _row(len(values[0].const))
    dims = [tuple(values[0].const)]
    guarded = ["row"] if "Conv" in op.type else []
    return Signature(inputs, [output], shapes={0: 0}, dims=dims, zero_if_empty=guarded)


@rule(*FILTERS)
def filters(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Gradients by filters: the rows add up.

    The kernels of grouped and depthwise convolutions give garbage if there are no rows.
    """
    shape = op.outputs[0].shape
    if not shape.is_fully_defined():
        return None
    inputs = [_row(values[0].rank), no_axis(values[1]), _row(values[2].rank)]
    dims, output = [tuple(shape.as_list())], _row(shape.rank, False)
    return Signature(inputs, [output], "sum", dims=dims, zero_if_empty=["row"])
