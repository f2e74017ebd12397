"""Operations that compute element by element, with broadcasting."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import WHOLE, Value
from keras_multigpu.engines.tensorflow.partition.operations import operation
from keras_multigpu.engines.tensorflow.partition.order import CHECKS
from keras_multigpu.engines.tensorflow.partition.program import EACH
from keras_multigpu.engines.tensorflow.partition.rules.table import (
    broadcast_labels,
    join,
    no_axis,
    rule,
)
from keras_multigpu.engines.tensorflow.partition.signatures import Signature
from keras_multigpu.engines.tensorflow.partition.sizes import Unknown, broadcast

ALIASES = ["Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot"]
ELEMENTWISE = """
    Abs Acos Acosh Add AddV2 Angle ApproximateEqual Asin Asinh Atan Atan2 Atanh BesselI0
    BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e
    BesselY0 BesselY1 BitwiseAnd BitwiseOr BitwiseXor Cast Ceil
    ClipByValue Complex ComplexAbs Conj Cos Cosh Dawsn Digamma Div DivNoNan Elu EluGrad Equal
    Erf Erfc Erfinv Exp Expint Expm1 Floor FloorDiv FloorMod FresnelCos FresnelSin
    GreaterEqual Igamma IgammaGradA Igammac Imag Inv InvGrad Invert IsFinite IsInf IsNan
    LeakyRelu LeakyReluGrad LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot
    LogicalOr Maximum Minimum Mod Mul MulNoNan Ndtri Neg NextAfter NotEqual OnesLike Polygamma
    PopulationCount Pow Real RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad
    RightShift Rint Round Rsqrt RsqrtGrad Selu SeluGrad Sigmoid SigmoidGrad Sign Sin
    Sinh Softplus SoftplusGrad Softsign SoftsignGrad Spence Sqrt SqrtGrad Square
    SquaredDifference Sub Tan Tanh TanhGrad TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta
    Betainc RandomGammaGrad AsString RegexFullMatch StaticRegexFullMatch StaticRegexReplace
    StringLength StringLower StringStrip StringToHashBucket StringToHashBucketFast
    StringToHashBucketStrong StringToNumber StringUpper DecodeBase64 EncodeBase64
""".split()

# Those that don't broadcast
SAME_SIZES = (*[one for one in ELEMENTWISE if one.endswith("Grad")], "AddN")


@rule(*ALIASES, needs_ranks=False)
def alias(planner: Any, op: tf.Operation, values: list[Value]) -> list[Value]:
    """The inputs themselves."""
    return list(values)


@rule("EnsureShape", needs_ranks=False)
def ensure_shape(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """What the trace does not know is checked: on each device, or of all the rows."""
    (value,), wanted = values, tf.TensorShape(op.get_attr("shape"))
    if wanted.rank is None or value.dims is None:
        return values if wanted.rank is None else None
    sizes = [None if size == dim else size for size, dim in zip(wanted, value.dims)]
    if sizes == [None] * len(sizes):
        return values
    labels = tuple(axis if size is None else None for axis, size in enumerate(sizes))
    dims = tuple(dim if size is None else size for size, dim in zip(sizes, value.dims))
    shape = tf.compat.v1.AttrValue(shape=tf.TensorShape(sizes).as_proto())
    return Signature([labels], [labels], dims=[dims], attributes={"shape": shape})


_OTHERS = "Bitcast Bucketize FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars".split()


@rule(*ELEMENTWISE, *_OTHERS)
def elementwise(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """An axis is split if every input has it in full, or has one entry there for all."""
    if any(value.dtype == tf.variant for value in values):
        return None
    if op.type in SAME_SIZES and len({value.rank for value in values}) == 1:
        for axis in range(values[0].rank):
            join(planner, *[(value, axis) for value in values])
        if len({value.dims for value in values}) > 1:
            return None  # a single row is not as many as others
    try:
        dims = broadcast(*[value.dims or () for value in values])
    except Unknown:
        return None
    if op.type == "Bitcast" and values[0].dtype.size != op.outputs[0].dtype.size:
        return None
    labels, inputs = broadcast_labels(dims, [value.dims or () for value in values])
    is_known = all(one is not None or dim == 1 for one, dim in zip(labels, dims))
    if op.type in ("Equal", "NotEqual") and not is_known:
        return None  # with `incompatible_shape_error=False` it may be a scalar
    return Signature(inputs, [labels], dims=[dims])


@rule("Greater")
def greater(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Also of sizes."""
    signature = elementwise(planner, op, values)
    a, b = values
    if signature is None or a.const is None or b.const is None or a.dims or b.dims:
        return signature
    made, how = planner.apply(op, values, signature)
    made[0].known = ("more", a.const[()], b.const[()])
    return made, how


@rule("SelectV2")
def choose(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Numbers of rows are what they are if they are replaced by 0 where there is one (`pfor`)."""
    condition, first, second = values
    is_zero = second.const is not None and not second.dims and second.const[()] == 0
    kind, *rest = first.known or ("",)
    if kind == "numbers" and is_zero and condition.known == ("more", *rest, 1):
        return [first]
    return elementwise(planner, op, values)


@rule(*CHECKS, needs_ranks=False)
def check(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Each device checks what it has; as an assertion, which runs whether its result is used."""
    (value,) = values
    message, write = op.get_attr("message").decode(), operation(op)
    layout = value.layout if value.is_sharded or value.axis is not None else WHOLE

    def emit(local: Any, tensor: Any) -> list[Any]:
        (checked,) = write(local, tensor)  # its error comes first
        tf.debugging.Assert(tf.reduce_all(tf.math.is_finite(checked)), [message])
        return []

    item = planner.get(value, layout)
    planner.add(emit, [item], EACH if item.is_each else item.place, [], name=op.name)
    return values, "spread"


@rule("Select")
def select(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """A condition for each element, for each row, or for all."""
    condition, rank = values[0].dims or (), values[1].rank
    if values[1].dims != values[2].dims:
        return None
    labels = tuple(range(rank))
    if len(condition) not in (0, 1, rank) or condition != (values[1].dims or ())[: len(condition)]:
        return None
    return Signature([labels[: len(condition)], labels, labels], [labels], dims=[values[1].dims])


@rule("FakeQuantWithMinMaxVarsGradient", "FakeQuantWithMinMaxArgsGradient")
def quantized_gradient(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """The gradients of the range are sums over all elements."""
    labels = tuple(range(values[0].rank))
    if values[0].dims != values[1].dims:
        return None
    inputs = [labels, labels, *map(no_axis, values[2:])]
    outputs = [labels, *[()] * (len(op.outputs) - 1)]
    return Signature(inputs, outputs, "sum" if len(outputs) > 1 else None)


@rule("BiasAdd")
def bias_add(planner: Any, op: tf.Operation, values: list[Value]) -> Signature:
    """The bias goes along the channels."""
    labels = tuple(range(values[0].rank))
    channel = 1 if op.get_attr("data_format") == b"NCHW" else labels[-1]
    return Signature([labels, (channel,)], [labels], dims=[values[0].dims])


@rule("QuantizeAndDequantizeV4")
def quantized(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Element by element, with a range for all."""
    if not op.get_attr("range_given") or any(value.dims for value in values[1:]):
        return None
    return elementwise(planner, op, values)
