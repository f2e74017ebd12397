"""Recurrent layers as cuDNN computes them, on GPUs; `ReverseSequence`, which surrounds them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import COPIED, WHOLE, Layout, Owned, Value
from keras_multigpu.engines.tensorflow.partition.rules.table import join, no_axis, rule
from keras_multigpu.engines.tensorflow.partition.signatures import Labels, Signature

_NOTES = (3, 4)  # the outputs that only the gradient's kernel can read
_GIVEN_NOTES = (11, 12)  # its inputs


@rule("CudnnRNNV3")
def forward(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Each sequence by itself; each device keeps its own notes for the gradient."""
    inputs, dims = _inputs(op, values), _dims(planner, op, values)
    if dims is None:
        return None
    outputs = [*inputs[:3], (None,), (None,)]
    shapes = [*dims, (0,), (0,)]
    signature = Signature(inputs, outputs, "sum", dims=shapes, zero_if_empty=["row"])
    made, how = planner.apply(op, values, signature)
    for number in _NOTES:
        made[number].dims = None
    if how == "spread":
        _stay(planner, op, values, made)
    return made, how


def _stay(planner: Any, op: tf.Operation, values: list[Value], made: list[Value]) -> None:
    """The notes stay where they are; whoever needs those of the whole batch computes it whole."""
    whole = functools.cache(lambda: planner.whole(op, values))
    for number in _NOTES:
        _lies(made[number], Owned())
        made[number].make = lambda layout, n=number: whole()[n] if layout == WHOLE else None
    if not _is_lstm(op):  # a placeholder on each device
        _lies(made[2], COPIED)


def _lies(value: Value, layout: Layout) -> None:
    """Says how what the devices have made lies there."""
    value.layout, value.forms = layout, {layout: next(iter(value.forms.values()))}


@rule("CudnnRNNBackpropV3", needs_ranks=False)
def backward(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Each sequence by itself, and addends of the parameters' gradient.

    Where one device has computed the batch, it has its notes: it computes the gradient, too.
    """
    rest = [value for number, value in enumerate(values) if number not in _GIVEN_NOTES]
    if any(value.dims is None for value in rest):
        return None
    notes = [values[number] for number in _GIVEN_NOTES]
    if not all(isinstance(one.layout, Owned) for one in notes):
        return None
    given = _inputs(op, values)
    labels = [*given, *given[:3], *given[:3], (), ()]
    dims = [value.dims for value in values[:4]]
    signature = Signature(labels, given[:4], "sum", dims=dims, zero_if_empty=["row"])
    own = [Value(one.dtype, (), COPIED, {COPIED: one.forms[Owned()]}, one.make) for one in notes]
    return planner.apply(op, [*values[:11], *own], signature)


def _inputs(op: tf.Operation, values: Sequence[Value]) -> list[Labels]:
    """The axes of what both kernels take: sequences, first states, parameters, lengths."""
    sequences = (None, "row", None) if op.get_attr("time_major") else ("row", None, None)
    cells = sequences if _is_lstm(op) else no_axis(values[2])
    return [sequences, sequences, cells, (None,), ("row",)]


def _dims(planner: Any, op: tf.Operation, values: Sequence[Value]) -> list[Any] | None:
    """The dimensions of the outputs that have rows; `None` for shapes that no layer makes."""
    x, first = values[:2]
    if x.rank != 3 or len(first.dims or ()) != 3:
        return None
    if op.get_attr("num_proj"):
        return None
    axis = 1 if op.get_attr("time_major") else 0
    join(planner, (x, axis), (first, axis), (values[4], 0))
    assert x.dims is not None
    assert first.dims is not None
    ways = 2 if op.get_attr("direction") == b"bidirectional" else 1
    return [(*x.dims[:2], ways * first.dims[2]), first.dims, values[2].dims]


def _is_lstm(op: tf.Operation) -> bool:
    return op.get_attr("rnn_mode") == b"lstm"


@rule("ReverseSequence")
def reverse(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Any axis but that which is reversed; lengths have the axis of the batch."""
    x = values[0]
    labels: list[Any] = [f"axis{number}" for number in range(x.rank)]
    labels[op.get_attr("seq_dim")] = None
    batch = op.get_attr("batch_dim")
    join(planner, (x, batch), (values[1], 0))
    return Signature([labels, [labels[batch]]], [labels], dims=[x.dims])
