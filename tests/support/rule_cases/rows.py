"""Cases of operations on rows: convolutions, pools, images, matrices."""

import tensorflow as tf

from support.rule_cases.case import case

raw = tf.raw_ops
CASES = {}


def _add(kind, function, *data, **settings):
    CASES.setdefault(kind, []).append(case(kind, function, *data, **settings))


def _window(nd, size=2, stride=2, padding="VALID", **more):
    names = {"ksize": [1, *[size] * nd, 1], "strides": [1, *[stride] * nd, 1], "padding": padding}
    return {**names, **more}


_2D = {"strides": [1, 1, 1, 1], "padding": "SAME"}
_3D = {"strides": [1, 1, 1, 1, 1], "padding": "SAME"}
_DEEP = {"tolerance": 1e-9}
_add("Conv2D", lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), "B 4 4 2", "3 3 2 2", **_DEEP)
_add("Conv2D", lambda x, w: tf.nn.conv2d(x, w, 2, "VALID", dilations=1), "B 5 4 2", "2 2 2 3", **_DEEP)
_add("Conv2D", lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), "B 4 4 4", "3 3 2 2", has_gradient=False, **_DEEP)
_grouped = tf.function(lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), autograph=False, jit_compile=True)
_add("Conv2D", _grouped, "B 4 4 4", "3 3 2 2", **_DEEP)
_add("Conv3D", lambda x, w: tf.nn.conv3d(x, w, _3D["strides"], "SAME"), "B 3 3 3 2", "2 2 2 2 2", **_DEEP)
_add("DepthwiseConv2dNative", lambda x, w: tf.nn.depthwise_conv2d(x, w, **_2D), "B 4 4 2", "2 2 2 2", **_DEEP)
_add("DepthwiseConv2dNative", lambda x, w: tf.nn.depthwise_conv2d(x, w, [1, 2, 2, 1], "VALID"), "B 5 5 2", "2 2 2 1", **_DEEP)
CASES["Conv2DBackpropInput"] = [
    case("Conv2DBackpropInput", lambda g, w: tf.nn.conv2d_transpose(g, w, [tf.shape(g)[0], 8, 8, 3], 2, "SAME"), "B 4 4 2", "3 3 3 2", **_DEEP),
    case("Conv2DBackpropInput", lambda g, w: tf.nn.conv2d_transpose(g, w, [tf.shape(g)[0], 4, 4, 3], 1, "SAME"), "B 4 4 2", "3 3 3 2", **_DEEP),
]
CASES["Conv3DBackpropInputV2"] = [
    case("Conv3DBackpropInputV2", lambda g, w: tf.nn.conv3d_transpose(g, w, [tf.shape(g)[0], 4, 4, 4, 2], 2, "SAME"), "B 2 2 2 2", "2 2 2 2 2", **_DEEP)
]
CASES["DepthwiseConv2dNativeBackpropInput"] = [
    case("DepthwiseConv2dNativeBackpropInput", lambda g, w: tf.nn.depthwise_conv2d_backprop_input([tf.shape(g)[0], 4, 4, 2], w, g, **_2D), "B 4 4 4", "2 2 2 2", **_DEEP)
]
CASES["Conv2DBackpropFilter"] = [
    case("Conv2DBackpropFilter", lambda x, g: raw.Conv2DBackpropFilter(input=x, filter_sizes=[3, 3, 2, 2], out_backprop=g, **_2D), "B 4 4 2", "B 4 4 2", **_DEEP),
]
CASES["Conv3DBackpropFilterV2"] = [
    case("Conv3DBackpropFilterV2", lambda x, g: raw.Conv3DBackpropFilterV2(input=x, filter_sizes=[2, 2, 2, 2, 2], out_backprop=g, **_3D), "B 3 3 3 2", "B 3 3 3 2", **_DEEP)
]
CASES["DepthwiseConv2dNativeBackpropFilter"] = [
    case("DepthwiseConv2dNativeBackpropFilter", lambda x, g: tf.nn.depthwise_conv2d_backprop_filter(x, [2, 2, 2, 2], g, **_2D), "B 4 4 2", "B 4 4 4", **_DEEP)
]
_add("Dilation2D", lambda x, w: raw.Dilation2D(input=x, filter=w, strides=[1, 1, 1, 1], rates=[1, 1, 1, 1], padding="SAME"), "B 4 4 2", "2 2 2", is_compilable=False)
_dilation = {"strides": [1, 1, 1, 1], "rates": [1, 1, 1, 1], "padding": "SAME"}
for _side in ("Input", "Filter"):
    _kind = f"Dilation2DBackprop{_side}"
    _add(_kind, lambda x, g, w, of=getattr(raw, _kind): of(input=x, filter=w, out_backprop=g, **_dilation), "B 4 4 2", "B 4 4 2", "2 2 2")
for _nd, _shape in ((2, "B 4 4 2"), (3, "B 4 4 4 2")):
    _name = {2: "", 3: "3D"}[_nd]
    _f = {"is_compilable": _nd == 2}
    for _settings in (_window(_nd), _window(_nd, 3, 1, "SAME")):
        _add(f"MaxPool{_name}", lambda x, n=_name, s=_settings: getattr(raw, f"MaxPool{n}")(input=x, **s), _shape + (":f" if _nd == 3 else ""), tolerance=1e-5)
        _add(f"AvgPool{_name}", lambda x, n=_name, s=_settings: getattr(raw, f"AvgPool{n}")(**{"value" if n == "" else "input": x}, **s), _shape + (":f" if _nd == 3 else ""), tolerance=1e-5)
    _s = _window(_nd, 2, 1, "SAME")
    _of = getattr(raw, f"MaxPool{_name}")
    _grad = getattr(raw, f"MaxPool{_name}Grad")
    _gradgrad = getattr(raw, f"MaxPool{_name}GradGrad")
    _add(f"MaxPool{_name}Grad", lambda x, g, of=_of, grad=_grad, s=_s: grad(orig_input=x, orig_output=of(input=x, **s), grad=g, **s), _shape + ":f", _shape + ":f", tolerance=1e-5)
    _add(f"MaxPool{_name}GradGrad", lambda x, g, of=_of, grad=_gradgrad, s=_s: grad(orig_input=x, orig_output=of(input=x, **s), grad=g, **s), _shape + ":f", _shape + ":f", tolerance=1e-5)
    _avg = getattr(raw, f"AvgPool{_name}Grad")
    _add(f"AvgPool{_name}Grad", lambda g, avg=_avg, s=_s: avg(orig_input_shape=tf.shape(g), grad=g, **s), _shape + (":f" if _nd == 3 else ""), tolerance=1e-5)
_add("MaxPoolV2", lambda x: raw.MaxPoolV2(input=x, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="VALID"), "B 4 4 2", has_gradient=False)
_add("LRN", lambda x: tf.nn.lrn(x), "B 3 3 2:f", tolerance=1e-5)
_add("LRNGrad", lambda g, x: raw.LRNGrad(input_grads=g, input_image=x, output_image=tf.nn.lrn(x)), "B 3 3 2:f", "B 3 3 2:f", tolerance=1e-5, has_gradient=False)
_add("DepthToSpace", lambda x: tf.nn.depth_to_space(x, 2), "B 2 3 4")
_add("SpaceToDepth", lambda x: tf.nn.space_to_depth(x, 2), "B 2 4 2")
_add("ExtractImagePatches", lambda x: tf.image.extract_patches(x, [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1], "VALID"), "B 4 4 2")
_add("ExtractVolumePatches", lambda x: tf.extract_volume_patches(x, [1, 2, 2, 2, 1], [1, 2, 2, 2, 1], "VALID"), "B 4 4 4 2", has_gradient=False)
_F = {"tolerance": 1e-5}
_add("ResizeArea", lambda x: raw.ResizeArea(images=x, size=[2, 2]), "B 4 4 2:f", is_compilable=False, **_F)
_add("ResizeBicubic", lambda x: raw.ResizeBicubic(images=x, size=[3, 3]), "B 2 4 2:f", is_compilable=False, **_F)
_add("ResizeBilinear", lambda x: raw.ResizeBilinear(images=x, size=[3, 5], half_pixel_centers=True), "B 2 4 2:f", **_F)
_add("ResizeNearestNeighbor", lambda x: raw.ResizeNearestNeighbor(images=x, size=[3, 5]), "B 2 4 2:f", **_F)
_add("ResizeBicubicGrad", lambda g, x: raw.ResizeBicubicGrad(grads=g, original_image=x), "B 3 3 2:f", "B 2 4 2:f", is_compilable=False, **_F)
_add("ResizeBilinearGrad", lambda g, x: raw.ResizeBilinearGrad(grads=g, original_image=x), "B 3 3 2:f", "B 2 4 2:f", **_F)
_add("ResizeNearestNeighborGrad", lambda g: raw.ResizeNearestNeighborGrad(grads=g, size=[2, 2]), "B 3 3 2:f", is_compilable=False, **_F)
_add("ScaleAndTranslate", lambda x: raw.ScaleAndTranslate(images=x, size=[3, 3], scale=[1.5, 1.5], translation=[0.5, 0.0]), "B 2 4 2:f", is_compilable=False, **_F)
_add("ScaleAndTranslateGrad", lambda g, x: raw.ScaleAndTranslateGrad(grads=g, original_image=x, scale=[1.5, 1.5], translation=[0.5, 0.0]), "B 3 3 2:f", "B 2 4 2:f", **_F)
_project = lambda x, t: raw.ImageProjectiveTransformV3(images=x, transforms=t * 0.1 + [[1.0, 0, 0, 0, 1, 0, 0, 0]], output_shape=[3, 3], fill_value=0.5, interpolation="BILINEAR")
_add("ImageProjectiveTransformV3", _project, "B 3 3 2:f", "B 8:f", is_compilable=False, **_F)
_add("ImageProjectiveTransformV3", _project, "B 3 3 2:f", "1 8:f", is_compilable=False, whole=("ConcatV2",), **_F)
_add("SoftmaxCrossEntropyWithLogits", lambda x, y: list(raw.SoftmaxCrossEntropyWithLogits(features=x, labels=y)), "B 3", "B 3", has_gradient=False)
_add("SoftmaxCrossEntropyWithLogits", lambda x, y: raw.SoftmaxCrossEntropyWithLogits(features=x, labels=tf.nn.softmax(y)).loss, "B 3", "B 3")
_add("SparseSoftmaxCrossEntropyWithLogits", lambda x, y: raw.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=y).loss, "B 3", "B:i3")
_add("InTopKV2", lambda x, y: raw.InTopKV2(predictions=x, targets=y, k=2), "B 3:f", "B:i3")
_add("RGBToHSV", lambda x: tf.image.rgb_to_hsv(x), "B 2 2 3:p", is_compilable=True)
_add("HSVToRGB", lambda x: tf.image.hsv_to_rgb(x), "B 2 2 3:p")
_add("AdjustContrastv2", lambda x: raw.AdjustContrastv2(images=x, contrast_factor=0.5), "B 2 2 3:f", **_F)
_add("AdjustHue", lambda x: raw.AdjustHue(images=tf.nn.sigmoid(x), delta=0.3), "B 2 2 3:f", **_F)
_add("AdjustSaturation", lambda x: raw.AdjustSaturation(images=tf.nn.sigmoid(x), scale=0.3), "B 2 2 3:f", **_F)
_add("Softmax", lambda x: tf.nn.softmax(x), "B 3")
_add("Softmax", lambda x: tf.nn.softmax(x), "2 B 2")
_add("LogSoftmax", lambda x: tf.nn.log_softmax(x), "B 3")
_add("TopKV2", lambda x: list(tf.math.top_k(x, 2)), "B 3", whole=("Reshape",))
_add("TopKV2", lambda x: list(tf.math.top_k(x, 2)), "2 B 4", whole=("Reshape",))
for _n, _size in ((1, "4"), (2, "2 4"), (3, "2 2 4")):
    _name = "" if _n == 1 else f"{_n}D"
    for _kind in (f"FFT{_name}", f"IFFT{_name}"):
        _add(_kind, lambda x, kind=_kind: getattr(raw, kind)(input=x), f"B {_size}:c")
        _add(_kind, lambda x, kind=_kind: getattr(raw, kind)(input=x), f"2 B {_size}:c")
    _length = [int(one) for one in _size.split()]
    _add(f"RFFT{_name}", lambda x, n=_name, k=_length: getattr(raw, f"RFFT{n}")(input=x, fft_length=k, Tcomplex=tf.complex128), f"B {_size}")
    _add(f"IRFFT{_name}", lambda x, n=_name, k=_length: getattr(raw, f"IRFFT{n}")(input=x, fft_length=k, Treal=tf.float64), f"B {_size}:c")
    _add(f"RFFT{_name}", lambda x, n=_name, k=_length: getattr(raw, f"RFFT{n}")(input=x, fft_length=k, Tcomplex=tf.complex128), f"1 B {_size}")


def _square(x):
    return tf.matmul(x, x, transpose_b=True) + tf.eye(2, dtype=x.dtype)


_M = {"is_compilable": False}
_add("Cholesky", lambda x: tf.linalg.cholesky(_square(x)), "B 2 2")
_add("CholeskyGrad", lambda x, g: raw.CholeskyGrad(l=tf.linalg.cholesky(_square(x)), grad=g), "B 2 2", "B 2 2", has_gradient=False, **_M)
_add("LogMatrixDeterminant", lambda x: list(tf.linalg.slogdet(_square(x))), "B 2 2", **_M)
_add("MatrixDeterminant", lambda x: tf.linalg.det(_square(x)), "B 2 2", **_M)
_add("MatrixInverse", lambda x: tf.linalg.inv(_square(x)), "B 2 2")
_add("MatrixSolve", lambda x, y: tf.linalg.solve(_square(x), y), "2 B 2 2", "2 B 2 1")
_add("MatrixTriangularSolve", lambda x, y: tf.linalg.triangular_solve(_square(x), y), "B 2 2", "B 2 3")
_add("Qr", lambda x: [one ** 2 for one in tf.linalg.qr(x)], "B 3 2", tolerance=1e-8, **_M)
_add("Svd", lambda x: tf.linalg.svd(x).s if hasattr(tf.linalg.svd(x), "s") else tf.linalg.svd(x)[0], "B 3 2", tolerance=1e-8, **_M)
_add("SelfAdjointEigV2", lambda x: tf.linalg.eigh(_square(x))[0], "B 2 2", tolerance=1e-8, **_M)
_add("MatrixBandPart", lambda x: tf.linalg.band_part(x, 1, 0), "B 2 2")
_add("MatrixBandPart", lambda x: tf.linalg.band_part(x, 0, -1), "2 B 3 2")
_add("MatrixDiagPartV3", lambda x: tf.linalg.diag_part(x), "B 3 2")
_add("MatrixDiagPartV3", lambda x: tf.linalg.diag_part(x, k=(-1, 0)), "B 3 3")
_add("MatrixDiagV3", lambda x: tf.linalg.diag(x), "B 3")
_add("MatrixDiagV3", lambda x: tf.linalg.diag(x, k=(0, 1)), "B 2 3")
_add("MatrixSetDiagV3", lambda x, y: tf.linalg.set_diag(x, y), "B 3 2", "B 2", has_gradient=False)
_add("MatrixSetDiagV3", lambda x, y: tf.linalg.set_diag(x, y, k=-1), "2 B 3 3", "2 B 2", has_gradient=False)
_add("MatrixSetDiagV3", lambda x: tf.linalg.set_diag(x, tf.ones([tf.shape(x)[0], 2], x.dtype)), "B 2 2", has_gradient=False)
_add("MatrixLogarithm", lambda x: tf.math.real(tf.linalg.logm(tf.cast(_square(x), tf.complex128))), "B 2 2", tolerance=1e-8)
_add("MatrixSquareRoot", lambda x: tf.linalg.sqrtm(_square(x)), "B 2 2", tolerance=1e-8)
_add("Eig", lambda x: tf.abs(tf.linalg.eig(x)[0]), "B 2 2", has_gradient=False, tolerance=1e-8)
_add("Lu", lambda x: list(tf.linalg.lu(_square(x))), "B 2 2", has_gradient=False)
