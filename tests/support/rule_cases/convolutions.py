"""Cases of convolutions and pools."""

import tensorflow as tf
from keras import ops
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
_add("Conv2D", lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), "B h w c", "3 3 c d", **_DEEP)
_add(
    "Conv2D",
    lambda x, w: tf.nn.conv2d(x, w, 2, "VALID", dilations=1),
    "B h+1 w+1 c",
    "2 2 c d",
    **_DEEP,
)
_add(
    "Conv2D",
    lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"),
    "B h w 2c",
    "3 3 c 2d",
    has_gradient=False,
    **_DEEP,
)
_grouped = tf.function(
    lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), autograph=False, jit_compile=True
)
_add("Conv2D", _grouped, "B h w 2c", "3 3 c 2d", **_DEEP)
for kind in ("SpaceToBatchND", "BatchToSpaceND"):
    _add(
        kind,
        lambda x, w: tf.nn.convolution(x, w, dilations=[2, 1], padding="SAME"),
        "B h+4 w c",
        "3 3 c d",
        **_DEEP,
    )
    _add(kind, lambda x, w: tf.nn.convolution(x, w, dilations=2), "B n+4 c", "3 c d", **_DEEP)
_add(
    "Conv3D",
    lambda x, w: tf.nn.conv3d(x, w, _3D["strides"], "SAME"),
    "B h w n c",
    "2 2 2 c d",
    **_DEEP,
)
_add(
    "DepthwiseConv2dNative",
    lambda x, w: tf.nn.depthwise_conv2d(x, w, **_2D),
    "B h w c",
    "2 2 c d",
    **_DEEP,
)
_add(
    "DepthwiseConv2dNative",
    lambda x, w: tf.nn.depthwise_conv2d(x, w, [1, 2, 2, 1], "VALID"),
    "B h+1 w+1 c",
    "2 2 c 1",
    **_DEEP,
)
CASES["Conv2DBackpropInput"] = [
    case(
        "Conv2DBackpropInput",
        lambda g, w: tf.nn.conv2d_transpose(
            g, w, [tf.shape(g)[0], 8, 8, ops.shape(w)[2]], 2, "SAME"
        ),
        "B 4 4 c",
        "3 3 d c",
        **_DEEP,
    ),
    case(
        "Conv2DBackpropInput",
        lambda g, w: tf.nn.conv2d_transpose(
            g, w, [tf.shape(g)[0], 4, 4, ops.shape(w)[2]], 1, "SAME"
        ),
        "B 4 4 c",
        "3 3 d c",
        **_DEEP,
    ),
]
CASES["Conv3DBackpropInputV2"] = [
    case(
        "Conv3DBackpropInputV2",
        lambda g, w: tf.nn.conv3d_transpose(
            g, w, [tf.shape(g)[0], 4, 4, 4, ops.shape(w)[3]], 2, "SAME"
        ),
        "B 2 2 2 c",
        "2 2 2 d c",
        **_DEEP,
    )
]
CASES["DepthwiseConv2dNativeBackpropInput"] = [
    case(
        "DepthwiseConv2dNativeBackpropInput",
        lambda g, w: tf.nn.depthwise_conv2d_backprop_input(
            [tf.shape(g)[0], 4, 4, ops.shape(w)[2]], w, g, **_2D
        ),
        "B 4 4 2c",
        "2 2 c 2",
        **_DEEP,
    )
]
CASES["Conv2DBackpropFilter"] = [
    case(
        "Conv2DBackpropFilter",
        lambda x, g: raw.Conv2DBackpropFilter(
            input=x, filter_sizes=[3, 3, 2, 2], out_backprop=g, **_2D
        ),
        "B h w 2",
        "B h w 2",
        **_DEEP,
    )
]
CASES["Conv3DBackpropFilterV2"] = [
    case(
        "Conv3DBackpropFilterV2",
        lambda x, g: raw.Conv3DBackpropFilterV2(
            input=x, filter_sizes=[2, 2, 2, 2, 2], out_backprop=g, **_3D
        ),
        "B 3 3 3 2",
        "B 3 3 3 2",
        **_DEEP,
    )
]
CASES["DepthwiseConv2dNativeBackpropFilter"] = [
    case(
        "DepthwiseConv2dNativeBackpropFilter",
        lambda x, g: tf.nn.depthwise_conv2d_backprop_filter(x, [2, 2, 2, 2], g, **_2D),
        "B h w 2",
        "B h w 4",
        **_DEEP,
    )
]
_add(
    "Dilation2D",
    lambda x, w: raw.Dilation2D(
        input=x, filter=w, strides=[1, 1, 1, 1], rates=[1, 1, 1, 1], padding="SAME"
    ),
    "B h w c",
    "2 2 c",
    is_compilable=False,
)
_dilation = {"strides": [1, 1, 1, 1], "rates": [1, 1, 1, 1], "padding": "SAME"}
for _side in ("Input", "Filter"):
    _kind = f"Dilation2DBackprop{_side}"
    _add(
        _kind,
        lambda x, g, w, kind=_kind: getattr(raw, kind)(
            input=x, filter=w, out_backprop=g, **_dilation
        ),
        "B h w c",
        "B h w c",
        "2 2 c",
    )
for _nd, _shape in ((2, "B h+1 w+1 c"), (3, "B h+1 w+1 n+1 c")):
    _name = {2: "", 3: "3D"}[_nd]
    _f = {"is_compilable": _nd == 2}
    for _settings in (_window(_nd), _window(_nd, 3, 1, "SAME")):
        _add(
            f"MaxPool{_name}",
            lambda x, n=_name, s=_settings: getattr(raw, f"MaxPool{n}")(input=x, **s),
            _shape + (":f" if _nd == 3 else ""),
            tolerance=1e-5,
        )
        _add(
            f"AvgPool{_name}",
            lambda x, n=_name, s=_settings: getattr(raw, f"AvgPool{n}")(
                **{"value" if n == "" else "input": x}, **s
            ),
            _shape + (":f" if _nd == 3 else ""),
            tolerance=1e-5,
        )
    _s = _window(_nd, 2, 1, "SAME")
    _of = getattr(raw, f"MaxPool{_name}")
    _grad = getattr(raw, f"MaxPool{_name}Grad")
    _add(
        f"MaxPool{_name}Grad",
        lambda x, g, of=_of, grad=_grad, s=_s: grad(
            orig_input=x, orig_output=of(input=x, **s), grad=g, **s
        ),
        _shape + ":f",
        _shape + ":f",
        tolerance=1e-5,
        has_gradient=False,  # TensorFlow's kernel of it writes over its last input
    )
    _avg = getattr(raw, f"AvgPool{_name}Grad")
    _add(
        f"AvgPool{_name}Grad",
        lambda g, avg=_avg, s=_s: avg(orig_input_shape=tf.shape(g), grad=g, **s),
        _shape + (":f" if _nd == 3 else ""),
        tolerance=1e-5,
    )
_add(
    "MaxPoolWithArgmax",
    lambda x: tf.nn.max_pool_with_argmax(x, 2, 1, "SAME")[0],
    "B h w c",
    is_compilable=False,
)
_add(
    "MaxPoolGradWithArgmax",
    lambda x: tf.gradients(tf.nn.max_pool_with_argmax(x, 2, 2, "VALID")[0] ** 2, x)[0],
    "B h+1 w+1 c",
    has_gradient=False,
    is_compilable=False,
)
_add(
    "MaxPoolV2",
    lambda x: raw.MaxPoolV2(input=x, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="VALID"),
    "B h+1 w+1 c",
    has_gradient=False,
)
