"""Random numbers: those that one device draws, each device for its rows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import (
    COPIED,
    WHOLE,
    Copied,
    Layout,
    Split,
    Value,
    Whole,
)
from keras_multigpu.engines.tensorflow.partition.operations import attributes_of, create
from keras_multigpu.engines.tensorflow.partition.program import EACH, Item
from keras_multigpu.engines.tensorflow.partition.rules.table import Table
from keras_multigpu.engines.tensorflow.partition.sizes import BATCH, product, symbols_of

RULES = Table()

# How many numbers one step of the counter gives (`tf.random.Algorithm.PHILOX`: 128 bits).
_PER_COUNT = {tf.float32: 4, tf.float64: 2}
_BY_COUNTER = ("StatelessRandomUniformV2", "StatelessRandomNormalV2")


@RULES.rule(
    *_BY_COUNTER,
    "StatelessTruncatedNormalV2",
    "StatelessRandomUniformIntV2",
    "StatelessRandomUniformFullIntV2",
)
def draw(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Where the counter allows it, a device begins to draw at its first row; else it draws all."""
    if values[0].const is None:
        return None
    dims, dtype = tuple(values[0].const), op.outputs[0].dtype
    attributes = {
        **attributes_of(op),
        "Tshape": tf.compat.v1.AttrValue(type=tf.int32.as_datatype_enum),
    }
    symbols = symbols_of(dims) - {BATCH}
    can_skip = op.type in _BY_COUNTER and dtype in _PER_COUNT

    def all_numbers(local: Any, *rest: Any) -> list[Any]:
        return create(op.type, [local.shape(dims, tf.int32), *rest], attributes, op.name)

    def whole(local: Any, *rest: Any) -> list[Any]:
        if not local.is_compiled:
            return all_numbers(local, *rest)
        # XLA draws other numbers than TensorFlow, and compiles not all that is around.
        drawn = tf.function(
            lambda *rest: all_numbers(local.inner(), *rest), autograph=False, jit_compile=True
        )
        return list(drawn(*rest))

    def own(local: Any, key: Any, counter: Any, *rest: Any) -> list[Any]:
        if local.is_compiled:
            unit = planner.unit_of(dims[0])
            begins = [local.first_entry(unit), *[0] * (len(dims) - 1)]
            sizes = [local.entries(unit), *[-1] * (len(dims) - 1)]
            (drawn,) = whole(local, key, counter, *rest)
            return [tf.slice(drawn, tf.stack(begins), tf.stack(sizes))]
        row = local.dim(product((planner.unit_of(dims[0]), *dims[1:])))
        begin, count = local.begin * row, local.rows * row
        shape = local.shape(dims, tf.int32, Split(0))
        skipped = 0
        if can_skip:
            per = _PER_COUNT[dtype]
            counter = counter + tf.cast(tf.stack([begin // per, 0]), tf.uint64)
            skipped, total = begin % per, begin % per + count
        else:
            skipped, total = begin, local.dim(product(dims))
        inputs = [tf.reshape(total, [1]), key, counter, *rest]
        flat = create(op.type, inputs, attributes, op.name)[0]
        return [tf.reshape(tf.slice(flat, [skipped], [count]), shape)]

    def make(layout: Layout) -> Item | None:
        if isinstance(layout, (Whole, Copied)):
            is_one = isinstance(layout, Whole)
            inputs = [planner.get(value, WHOLE if is_one else COPIED) for value in values[1:]]
            place = 0 if is_one else EACH
            return planner.add(whole, inputs, place, [dtype], name=op.name, symbols=symbols)[0]
        if layout != Split(0) or planner.unit_of(dims[0]) is None:
            return None
        inputs = [planner.get(value, COPIED) for value in values[1:]]
        return planner.add(own, inputs, EACH, [dtype], name=op.name, symbols=symbols)[0]

    return [Value(dtype, dims, make=make)]


@RULES.rule("StatelessRandomGetAlg")
def algorithm(planner: Any, op: tf.Operation, values: list[Value]) -> list[Value]:
    """Which algorithm draws: asked where it is used."""
    attributes = attributes_of(op)

    def emit(local: Any) -> list[Any]:
        return create(op.type, [], attributes, op.name)

    def make(layout: Layout) -> Item | None:
        if not isinstance(layout, (Whole, Copied)):
            return None
        place = 0 if isinstance(layout, Whole) else EACH
        return planner.add(emit, [], place, [tf.int32], name=op.name, is_cheap=True)[0]

    return [Value(tf.int32, (), make=make)]


@RULES.rule(
    "RandomGamma",
    "RandomPoissonV2",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "StatelessParameterizedTruncatedNormal",
    "StatelessRandomBinomial",
    "StatelessRandomGammaV2",
    "StatelessRandomGammaV3",
    "StatelessRandomPoisson",
    "TruncatedNormal",
)
def draw_whole(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Drawn by one device, as rows are drawn one after the other."""
    if values[0].const is None:
        return None
    has_rows = any(value.is_spread for value in values)
    shape = tuple(values[0].const)
    rest = [] if op.type not in ("RandomGamma", "RandomPoissonV2") else list(values[1].dims or ())
    (value,), _ = planner.fallback(op, values, [(*shape, *rest)])
    if value.dims and planner.unit_of(value.dims[0]) is not None:
        value.layout = Split(0)
    return [value], "gathered" if has_rows else "whole"
