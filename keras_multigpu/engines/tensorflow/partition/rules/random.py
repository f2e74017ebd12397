"""Random numbers: those that one device draws, each device for its rows."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import (
    COPIED,
    WHOLE,
    Copied,
    Joined,
    Layout,
    Split,
    Value,
    Whole,
)
from keras_multigpu.engines.tensorflow.partition.operations import (
    attributes_of,
    create,
    create_compiled,
)
from keras_multigpu.engines.tensorflow.partition.program import EACH, Item
from keras_multigpu.engines.tensorflow.partition.rules.table import rule
from keras_multigpu.engines.tensorflow.partition.sizes import product, symbols_of

# How many numbers one step of the counter gives (`tf.random.Algorithm.PHILOX`: 128 bits).
_PER_COUNT = {tf.float32: 4, tf.float64: 2}
_BY_COUNTER = ("StatelessRandomUniformV2", "StatelessRandomNormalV2")


@rule(
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
    unit = planner.unit_of(dims[0]) if dims else None
    of_shape = tf.compat.v1.AttrValue(type=tf.int32.as_datatype_enum)
    attributes = {**attributes_of(op), "Tshape": of_shape}

    def whole(local: Any, *rest: Any) -> list[Any]:
        write = create_compiled if local.is_compiled else create
        return write(op.type, [local.shape(dims, tf.int32), *rest], attributes, op.name)

    def entries(local: Any, first: Any, size: Any, key: Any, counter: Any, *rest: Any) -> Any:
        others = dims[1:]
        if local.is_compiled:
            (drawn,) = whole(local, key, counter, *rest)
            begins, sizes = [first, *[0] * len(others)], [size, *[-1] * len(others)]
            return tf.slice(drawn, tf.stack(begins), tf.stack(sizes))
        row, shape = local.dim(product(others)), tf.stack([size, *map(local.dim, others)])
        begin, count = first * row, size * row
        skipped, total = begin, local.dim(product(dims))
        if op.type in _BY_COUNTER and dtype in _PER_COUNT:
            per = _PER_COUNT[dtype]
            counter = counter + tf.cast(tf.stack([begin // per, 0]), tf.uint64)
            skipped, total = begin % per, begin % per + count
        given = [tf.reshape(total, [1]), key, counter, *rest]
        (flat,) = create(op.type, given, attributes, op.name)
        return tf.reshape(tf.slice(flat, [skipped], [count]), shape)

    def own(layout: Layout, local: Any, *given: Any) -> list[Any]:
        extents = [(local.first_entry(unit), local.entries(unit))]
        extents = local.extents(layout) if isinstance(layout, Joined) else extents
        made = [entries(local, *one, *given) for one in extents]
        return [tf.concat(made, 0) if len(made) > 1 else made[0]]

    def make(layout: Layout) -> Item | None:
        emit: Any
        if isinstance(layout, (Whole, Copied)):
            emit, place = whole, 0 if isinstance(layout, Whole) else EACH
        elif isinstance(layout, (Split, Joined)) and layout.axis == 0 and unit is not None:
            emit, place = functools.partial(own, layout), EACH
        else:
            return None
        inputs = [planner.get(value, COPIED if place == EACH else WHOLE) for value in values[1:]]
        more = {"name": op.name, "symbols": symbols_of(dims)}
        return planner.add(emit, inputs, place, [dtype], **more)[0]

    return [Value(dtype, dims, make=make, is_drawn=unit is not None)]


_DRAWN_WHOLE = (
    "RandomGamma RandomPoissonV2 RandomStandardNormal RandomUniform RandomUniformInt "
    "StatelessParameterizedTruncatedNormal StatelessRandomBinomial StatelessRandomGammaV2 "
    "StatelessRandomGammaV3 StatelessRandomPoisson TruncatedNormal"
).split()


@rule(*_DRAWN_WHOLE)
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


@rule("Multinomial", "StatelessMultinomial")
def choose(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """By one device, as they are drawn one after the other: some for each row."""
    dims, count = values[0].dims or (None,), values[1].const
    return planner.fallback(op, values, [(dims[0], None if count is None else count[()])])
