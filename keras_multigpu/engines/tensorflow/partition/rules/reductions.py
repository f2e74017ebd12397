"""Reductions of axes, and what runs along an axis."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import WHOLE, Value
from keras_multigpu.engines.tensorflow.partition.program import EACH
from keras_multigpu.engines.tensorflow.partition.rules.table import (
    axes_of,
    join,
    listed,
    no_axis,
    rule,
)
from keras_multigpu.engines.tensorflow.partition.rules.tables import sums_by_rows
from keras_multigpu.engines.tensorflow.partition.signatures import Signature
from keras_multigpu.engines.tensorflow.partition.sizes import product, symbols_of

REDUCTIONS = {
    "Sum": "sum",
    "Mean": "sum",
    "Max": "max",
    "Min": "min",
    "Prod": "prod",
    "Any": "any",
    "All": "all",
}


@rule(*REDUCTIONS)
def reduction(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Split along an axis that is kept, or reduced to addends."""
    dims = values[0].dims or ()
    axes = axes_of(values[1], len(dims))
    if axes is None:
        return None
    if not axes:
        return [values[0]]
    is_kept = op.get_attr("keep_dims")
    labels = tuple(range(len(dims)))
    kept = [axis for axis in labels if is_kept or axis not in axes]
    signature = Signature(
        [labels, no_axis(values[1])],
        [tuple(None if axis in axes else axis for axis in kept)],
        REDUCTIONS[op.type],
        dims=[tuple(1 if axis in axes else dims[axis] for axis in kept)],
        constants={1: axes},
    )
    is_mean = op.type == "Mean"
    if not is_mean or values[0].axis not in axes or values[0].dtype.is_integer:
        signature.partial = None if is_mean else signature.partial  # no mean of means
        return signature
    return _mean(planner, op, values, signature, [dims[axis] for axis in axes])


def _mean(
    planner: Any, op: tf.Operation, values: list[Value], signature: Signature, reduced: list[Any]
) -> Any:
    """The mean over a split axis: all sums by the count of all.

    Sums of half precision would overflow where means don't.
    """
    count, dtype = product(reduced), op.outputs[0].dtype
    signature.kind = "Sum"
    wide = tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype
    if wide != dtype:
        values = [_cast(planner, values[0], wide), values[1]]
        signature.attributes = {"T": tf.compat.v1.AttrValue(type=wide.as_datatype_enum)}
    (total,), how = planner.apply(op, values, signature)

    def emit(local: Any, whole: tf.Tensor) -> list[tf.Tensor]:
        return [tf.cast(tf.cast(whole, wide) / tf.cast(local.dim(count), wide), dtype)]

    item = planner.add(
        emit, [planner.get(total, WHOLE)], 0, [dtype], name=op.name, symbols=symbols_of([count])
    )[0]
    return [planner.value(dtype, total.dims, WHOLE, item)], how


def _cast(planner: Any, value: Value, dtype: tf.DType) -> Value:
    def emit(local: Any, tensor: tf.Tensor) -> list[tf.Tensor]:
        return [tf.cast(tensor, dtype)]

    item = planner.add(emit, [planner.get(value, value.layout)], EACH, [dtype])[0]
    return planner.value(dtype, value.dims, value.layout, item)


# {type: the input with the axes along which it runs}
ALONG = listed({1: "ArgMax ArgMin Cumsum Cumprod CumulativeLogsumexp ReverseV2", 2: "Roll"})


@rule(*ALONG)
def along(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Other axes than those along which it runs; where it finds a place, these are gone."""
    dims = values[0].dims or ()
    axes = axes_of(values[ALONG[op.type]], len(dims))
    if axes is None:
        return None
    labels = tuple(None if a in axes else a for a in range(len(dims)))
    inputs = [labels, *map(no_axis, values[1:])]
    if op.type.startswith("Arg"):
        return Signature(inputs, [[one for one in labels if one is not None]])
    return Signature(inputs, [labels], dims=[dims])


@rule("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd")
def unsorted_segment(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Entries that go to segments add up; the axes behind are kept."""
    is_all = values[2].const is not None and values[1].known == ("numbers", values[2].const[()])
    if is_all and op.type == "UnsortedSegmentSum":
        return [values[0]]
    found = sums_by_rows(planner, op, values) if op.type == "UnsortedSegmentSum" else None
    if found is not None:
        return found, "spread"
    rank = values[1].rank
    if values[2].const is None:
        return None
    for axis in range(rank):
        join(planner, (values[0], axis), (values[1], axis))
    ids, rest = tuple(range(rank)), tuple(range(rank, values[0].rank))
    dims = (values[2].const[()], *(values[0].dims or ())[rank:])
    kind = op.type.removeprefix("UnsortedSegment").lower()
    return Signature([(*ids, *rest), ids, ()], [(None, *rest)], kind, dims=[dims])


@rule("DenseBincount")
def bincount(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Counts for each row, or for all."""
    rank = values[0].rank
    is_weighted = values[2].dims != (0,)
    if rank == 2:
        weights = ("row", None) if is_weighted else (None,)
        return Signature([("row", None), (), weights], [("row", None)])
    if op.get_attr("binary_output"):
        return None
    return Signature([("row",), (), ("row",) if is_weighted else (None,)], [(None,)], "sum")
