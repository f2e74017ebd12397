"""Cases of operations that compute element by element."""

import inspect

import tensorflow as tf
from support.rule_cases.case import case

from keras_multigpu.engines.tensorflow.partition.rules.elementwise import ELEMENTWISE

raw = tf.raw_ops

_INTEGERS = """
    BitwiseAnd BitwiseOr BitwiseXor Invert LeftShift RightShift PopulationCount Mod TruncateMod
""".split()
_NUMBERS = "Abs Add AddV2 Maximum Minimum Mul Neg Sign Square Sub".split()
_BOOLEANS = "LogicalAnd LogicalNot LogicalOr".split()
_POSITIVE = """
    Acosh Asin Acos Atanh BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Erfinv Igamma
    Igammac
    IgammaGradA Betainc RandomGammaGrad Log Ndtri Polygamma Pow Rsqrt Sqrt Zeta
""".split()
_OTHER = {
    "Add": lambda x, y: raw.Add(x=x, y=y),
    "FloorMod": lambda x, y: tf.math.floormod(x, y),
    "Mod": lambda x, y: raw.Mod(x=x, y=y + 1),
    "TruncateMod": lambda x, y: raw.TruncateMod(x=x, y=y + 1),
    "Angle": lambda x, y: raw.Angle(input=tf.complex(x, x * 2.0), Tout=tf.float64),
    "AsString": lambda x, y: raw.AsString(input=x),
    "Cast": lambda x, y: tf.cast(x, tf.float32),
    "CheckNumerics": lambda x, y: raw.CheckNumerics(tensor=x, message=""),
    "CheckNumericsV2": lambda x, y: raw.CheckNumericsV2(tensor=x, message=""),
    "ClipByValue": lambda x, y: raw.ClipByValue(t=x, clip_value_min=-1.0, clip_value_max=0.5),
    "Complex": lambda x, y: raw.Complex(real=x, imag=y, Tout=tf.complex128),
    "ComplexAbs": lambda x, y: raw.ComplexAbs(x=tf.complex(x, x), Tout=tf.float64),
    "Conj": lambda x, y: raw.Conj(input=tf.complex(x, x)),
    "Imag": lambda x, y: raw.Imag(input=tf.complex(x, -x), Tout=tf.float64),
    "Real": lambda x, y: raw.Real(input=tf.complex(x, -x), Tout=tf.float64),
    "SelectV2": lambda x, y: tf.where(x > 0.0, x, y),
}
_UNARY_OTHER = {"Acosh": lambda x: tf.acosh(x + 1.0)}
_STRINGS = {
    "RegexFullMatch": lambda x: raw.RegexFullMatch(input=x, pattern=".*2.*"),
    "StaticRegexFullMatch": lambda x: raw.StaticRegexFullMatch(input=x, pattern=".*2.*"),
    "StaticRegexReplace": lambda x: raw.StaticRegexReplace(input=x, pattern="b", rewrite="x"),
    "StringLength": lambda x: tf.strings.length(x),
    "StringLower": lambda x: tf.strings.lower(x),
    "StringStrip": lambda x: tf.strings.strip(x),
    "StringToHashBucket": lambda x: raw.StringToHashBucket(string_tensor=x, num_buckets=7),
    "StringToHashBucketFast": lambda x: tf.strings.to_hash_bucket_fast(x, 7),
    "StringToHashBucketStrong": lambda x: tf.strings.to_hash_bucket_strong(x, 7, [1, 2]),
    "StringToNumber": lambda x: tf.strings.to_number(tf.as_string(tf.strings.length(x))),
    "StringUpper": lambda x: tf.strings.upper(x),
    "DecodeBase64": lambda x: tf.io.decode_base64(tf.io.encode_base64(x)),
    "EncodeBase64": lambda x: tf.io.encode_base64(x),
}
_UNARY = [("B n",), ("n B",), ("B",), ("B n 1",)]
_BINARY = [
    ("B n", "B n"),
    ("n B", "B"),
    ("B n", "n"),
    ("B 1", "1 n"),
    ("n B m", "B 1"),
    ("1 B", "n 1"),
]
_NOT_COMPILED = (
    "BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Dawsn Expint "
    "FresnelCos FresnelSin Spence CheckNumerics CheckNumericsV2 BesselI0 BesselI1".split()
)


def _by_name(kind, count):
    names = list(inspect.signature(getattr(raw, kind)).parameters)[:count]
    return lambda *tensors: getattr(raw, kind)(**dict(zip(names, tensors)))


def _arity(kind):
    names = inspect.signature(getattr(raw, kind)).parameters.items()
    return sum(one.default is inspect.Parameter.empty for _, one in names)


def _cases(kind):
    if kind in _STRINGS:
        return [
            case(kind, _STRINGS[kind], "B n:s", is_compilable=False),
            case(kind, _STRINGS[kind], "n B:s", is_compilable=False),
        ]
    letter = (
        ":i9"
        if kind in _INTEGERS
        else ":b"
        if kind in _BOOLEANS
        else ":p"
        if kind in _POSITIVE
        else ":n"
        if kind in _NUMBERS
        else ""
    )
    count = 2 if kind in _OTHER else _arity(kind)
    function = {**_OTHER, **_UNARY_OTHER}.get(kind) or _by_name(kind, count)
    same = kind.endswith("Grad") or kind in ("ApproximateEqual", "Betainc")
    if kind == "Betainc":
        return [
            case(kind, function, *[shape + letter] * 3, has_gradient=False)
            for shape in ("B n", "n B")
        ]
    shapes = _UNARY if count == 1 else [_BINARY[0], ("n B", "n B")] if same else _BINARY
    settings = {"is_compilable": kind not in (*_NOT_COMPILED, "AsString")}
    settings["tolerance"] = 1e-6 if kind == "Cast" else 1e-10
    return [case(kind, function, *(one + letter for one in shape), **settings) for shape in shapes]


CASES = {kind: _cases(kind) for kind in (*ELEMENTWISE, "Greater", "SelectV2")}
CASES.update(
    {
        kind: [
            case(
                kind, lambda x, kind=kind: 2.0 * getattr(raw, kind)(input=x), "B n", traceless=True
            ),
            case(
                kind, lambda x, kind=kind: 2.0 * getattr(raw, kind)(input=x), "n B", traceless=True
            ),
        ]
        for kind in ("Identity", "StopGradient", "PreventGradient", "Snapshot")
    }
)
CASES["PreventGradient"] = [
    case(
        "PreventGradient",
        lambda x: 2.0 * raw.PreventGradient(input=x),
        "B n",
        traceless=True,
        has_gradient=False,
    )
]
CASES["IdentityN"] = [
    case(
        "IdentityN",
        lambda x, y: [2.0 * one for one in tf.identity_n([x, y])],
        "B n",
        "n B",
        traceless=True,
    )
]
CASES["EnsureShape"] = [
    case("EnsureShape", lambda x: 2.0 * tf.ensure_shape(x, [None, 3]), "B 3", traceless=True)
]
CASES["Bitcast"] = [
    case("Bitcast", lambda x: tf.bitcast(x, tf.int64), "B n"),
    case("Bitcast", lambda x: tf.bitcast(x, tf.int64), "n B"),
]
CASES["Select"] = [
    case("Select", lambda x, y: raw.Select(condition=x > 0.0, x=x, y=y), "B n", "B n"),
    case("Select", lambda c, x, y: raw.Select(condition=c > 0.0, x=x, y=y), "B", "B n m", "B n m"),
    case("Select", lambda c, x, y: raw.Select(condition=c > 0.0, x=x, y=y), "", "n B", "n B"),
]
CASES["BiasAdd"] = [
    case("BiasAdd", lambda x, b: tf.nn.bias_add(x, b), "B n", "n"),
    case("BiasAdd", lambda x, b: tf.nn.bias_add(x, b), "n B", "B"),
    case("BiasAdd", lambda x, b: tf.nn.bias_add(x, b), "n B c", "c"),
    case("BiasAdd", lambda x, b: tf.nn.bias_add(x, b, "NCHW"), "B c n m", "c"),
    case("BiasAdd", lambda x, b: tf.nn.bias_add(x, b, "NCHW"), "n c B m", "c"),
]
CASES["BiasAddGrad"] = [
    case("BiasAddGrad", lambda x: raw.BiasAddGrad(out_backprop=x), "B n"),
    case("BiasAddGrad", lambda x: raw.BiasAddGrad(out_backprop=x), "n B"),
    case("BiasAddGrad", lambda x: raw.BiasAddGrad(out_backprop=x, data_format="NCHW"), "B c n m"),
    case("BiasAddGrad", lambda x: raw.BiasAddGrad(out_backprop=x, data_format="NCHW"), "n c B m"),
]


def _quantize(x):
    return tf.quantization.quantize_and_dequantize_v2(x, -1.0, 1.0, range_given=True)


CASES["QuantizeAndDequantizeV4"] = [
    case("QuantizeAndDequantizeV4", _quantize, "B n", is_compilable=False, has_gradient=False)
]
CASES["FakeQuantWithMinMaxVars"] = [
    case(
        "FakeQuantWithMinMaxVars",
        lambda x: tf.quantization.fake_quant_with_min_max_vars(x, -1.0, 1.0),
        "B n:f",
        tolerance=1e-5,
    ),
    case(
        "FakeQuantWithMinMaxVars",
        lambda x: tf.quantization.fake_quant_with_min_max_vars(x, -1.0, 1.0),
        "n B:f",
        tolerance=1e-5,
    ),
]
CASES["FakeQuantWithMinMaxArgs"] = [
    case(
        "FakeQuantWithMinMaxArgs",
        lambda x: tf.quantization.fake_quant_with_min_max_args(x, -1.0, 1.0),
        "B n:f",
        tolerance=1e-5,
    )
]
CASES["FakeQuantWithMinMaxVarsGradient"] = [
    case(
        "FakeQuantWithMinMaxVarsGradient",
        lambda g, x: list(
            raw.FakeQuantWithMinMaxVarsGradient(gradients=g, inputs=x, min=-0.5, max=0.5)
        ),
        *data,
        tolerance=1e-5,
    )
    for data in (("B n:f", "B n:f"), ("n B:f", "n B:f"))
]
CASES["FakeQuantWithMinMaxArgsGradient"] = [
    case(
        "FakeQuantWithMinMaxArgsGradient",
        lambda g, x: raw.FakeQuantWithMinMaxArgsGradient(gradients=g, inputs=x, min=-0.5, max=0.5),
        "n B:f",
        "n B:f",
        tolerance=1e-5,
    )
]
CASES["AddN"] = [
    case("AddN", lambda x, y: tf.add_n([x, y, x]), "B n:n", "B n:n"),
    case("AddN", lambda x, y: tf.add_n([x, y]), "n B:n", "n B:n"),
    case(
        "AddN",
        lambda x, y: tf.add_n([tf.reduce_sum(x, 0), tf.reduce_sum(y, 0)]),
        "B n",
        "B n",
        traceless=True,
    ),
]
CASES["ZerosLike"] = [
    case("ZerosLike", lambda x: tf.raw_ops.ZerosLike(x=x), "B n:n"),
    case("ZerosLike", lambda x: tf.raw_ops.ZerosLike(x=x), "n B"),
]
CASES["OnesLike"] = [
    case("OnesLike", lambda x: tf.raw_ops.OnesLike(x=x), "B n:n"),
    case("OnesLike", lambda x: tf.raw_ops.OnesLike(x=x), "n B"),
]
