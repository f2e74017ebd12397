"""Cases of operations on images, and on rows of scores."""

import tensorflow as tf
from support.rule_cases.case import case

raw = tf.raw_ops
CASES = {}


def _add(kind, function, *data, **settings):
    CASES.setdefault(kind, []).append(case(kind, function, *data, **settings))


_add("LRN", lambda x: tf.nn.lrn(x), "B h w c:f", tolerance=1e-5)
_add(
    "LRNGrad",
    lambda g, x: raw.LRNGrad(input_grads=g, input_image=x, output_image=tf.nn.lrn(x)),
    "B h w c:f",
    "B h w c:f",
    tolerance=1e-5,
    has_gradient=False,
)
_add("DepthToSpace", lambda x: tf.nn.depth_to_space(x, 2), "B h w 4c")
_add("SpaceToDepth", lambda x: tf.nn.space_to_depth(x, 2), "B 2h 2w c")
_add(
    "ExtractImagePatches",
    lambda x: tf.image.extract_patches(x, [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1], "VALID"),
    "B h+1 w+1 c",
)
_add(
    "ExtractVolumePatches",
    lambda x: tf.extract_volume_patches(x, [1, 2, 2, 2, 1], [1, 2, 2, 2, 1], "VALID"),
    "B h+1 w+1 n+1 c",
    has_gradient=False,
)
_F = {"tolerance": 1e-5}
_add(
    "ResizeArea",
    lambda x: raw.ResizeArea(images=x, size=[2, 2]),
    "B h+1 w+1 c:f",
    is_compilable=False,
    **_F,
)
_add(
    "ResizeBicubic",
    lambda x: raw.ResizeBicubic(images=x, size=[3, 3]),
    "B h w c:f",
    is_compilable=False,
    **_F,
)
_add(
    "ResizeBilinear",
    lambda x: raw.ResizeBilinear(images=x, size=[3, 5], half_pixel_centers=True),
    "B h w c:f",
    **_F,
)
_add(
    "ResizeNearestNeighbor",
    lambda x: raw.ResizeNearestNeighbor(images=x, size=[3, 5]),
    "B h w c:f",
    **_F,
)
_add(
    "ResizeBicubicGrad",
    lambda g, x: raw.ResizeBicubicGrad(grads=g, original_image=x),
    "B n m c:f",
    "B h w c:f",
    is_compilable=False,
    **_F,
)
_add(
    "ResizeBilinearGrad",
    lambda g, x: raw.ResizeBilinearGrad(grads=g, original_image=x),
    "B n m c:f",
    "B h w c:f",
    **_F,
)
_add(
    "ResizeNearestNeighborGrad",
    lambda g: raw.ResizeNearestNeighborGrad(grads=g, size=[2, 2]),
    "B 3 3 c:f",
    is_compilable=False,
    **_F,
)
_add(
    "ScaleAndTranslate",
    lambda x: raw.ScaleAndTranslate(
        images=x, size=[3, 3], scale=[1.5, 1.5], translation=[0.5, 0.0]
    ),
    "B h w c:f",
    is_compilable=False,
    **_F,
)
_add(
    "ScaleAndTranslateGrad",
    lambda g, x: raw.ScaleAndTranslateGrad(
        grads=g, original_image=x, scale=[1.5, 1.5], translation=[0.5, 0.0]
    ),
    "B n m c:f",
    "B h w c:f",
    **_F,
)


def _project(x, t):
    return raw.ImageProjectiveTransformV3(
        images=x,
        transforms=t * 0.1 + [[1.0, 0, 0, 0, 1, 0, 0, 0]],
        output_shape=[3, 3],
        fill_value=0.5,
        interpolation="BILINEAR",
    )


_add("ImageProjectiveTransformV3", _project, "B h w c:f", "B 8:f", is_compilable=False, **_F)
_add(
    "ImageProjectiveTransformV3",
    _project,
    "B h w c:f",
    "1 8:f",
    is_compilable=False,
    whole=("ConcatV2",),
    **_F,
)
_add(
    "SoftmaxCrossEntropyWithLogits",
    lambda x, y: list(raw.SoftmaxCrossEntropyWithLogits(features=x, labels=y)),
    "B n",
    "B n",
    has_gradient=False,
)
_add(
    "SoftmaxCrossEntropyWithLogits",
    lambda x, y: raw.SoftmaxCrossEntropyWithLogits(features=x, labels=tf.nn.softmax(y)).loss,
    "B n",
    "B n",
)
_add(
    "SparseSoftmaxCrossEntropyWithLogits",
    lambda x, y: raw.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=y).loss,
    "B n",
    "B:in",
)
_add("InTopKV2", lambda x, y: raw.InTopKV2(predictions=x, targets=y, k=2), "B n:f", "B:in")
_add("RGBToHSV", lambda x: tf.image.rgb_to_hsv(x), "B h w 3:p", is_compilable=True)
_add("HSVToRGB", lambda x: tf.image.hsv_to_rgb(x), "B h w 3:p")
_add(
    "AdjustContrastv2",
    lambda x: raw.AdjustContrastv2(images=x, contrast_factor=0.5),
    "B h w 3:f",
    **_F,
)
_add("AdjustHue", lambda x: raw.AdjustHue(images=tf.nn.sigmoid(x), delta=0.3), "B h w 3:f", **_F)
_add(
    "AdjustSaturation",
    lambda x: raw.AdjustSaturation(images=tf.nn.sigmoid(x), scale=0.3),
    "B h w 3:f",
    **_F,
)
