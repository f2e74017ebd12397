"""Operations that change shapes, and fills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.constants import numbers_of
from keras_multigpu.engines.tensorflow.partition.layouts import Copied, Layout, Split, Value, Whole
from keras_multigpu.engines.tensorflow.partition.operations import attributes_of, operation
from keras_multigpu.engines.tensorflow.partition.program import EACH, Item
from keras_multigpu.engines.tensorflow.partition.rules.table import axes_of, no_axis, rule
from keras_multigpu.engines.tensorflow.partition.signatures import Signature
from keras_multigpu.engines.tensorflow.partition.sizes import (
    is_known,
    product,
    quotient,
    symbols_of,
)

SMALL = 100_000  # elements of a constant that every device may make for itself


@rule("Reshape")
def reshape(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """An axis stays one if as many elements lie before it: it leads its group."""
    old = tuple(values[0].dims or ())
    new = None if values[1].const is None else _resolved(values[1].const, product(old))
    if new is None:
        return None
    if new == old:
        return [values[0]]
    before: list[Any] = [None] * len(old)
    after: list[Any] = [None] * len(new)
    for axis, dim in enumerate(old):
        for other, size in enumerate(new):
            units = planner.unit_of(dim), planner.unit_of(size)
            have_rows = None not in units and units[0].rows == units[1].rows
            is_one = have_rows or (is_known([dim, size]) and min(dim, size) > 1)
            if is_one and product(old[:axis]) == product(new[:other]):
                before[axis] = after[other] = axis
                break
    return Signature([before, (None,)], [after], shapes={1: 0}, dims=[new], regroups=True)


def _resolved(shape: Any, total: Any) -> tuple[Any, ...] | None:
    """A new shape with its -1 replaced; `None` if that isn't known."""
    dims = list(shape)
    free = [axis for axis, dim in enumerate(dims) if isinstance(dim, int) and dim == -1]
    if free:
        dims[free[0]] = quotient(total, product(dims[: free[0]] + dims[free[0] + 1 :]))
    return None if None in dims else tuple(dims)


@rule("Transpose")
def transpose(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """The axes in another order."""
    order = numbers_of(values[1].const)
    if order is None:
        return None
    dims = tuple((values[0].dims or ())[axis] for axis in order)
    return Signature([tuple(range(len(order))), (None,)], [tuple(order)], dims=[dims])


@rule("ExpandDims")
def expand_dims(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """A new axis."""
    rank = values[0].rank
    axes = axes_of(values[1], rank + 1)
    if axes is None:
        return None
    labels = list(range(rank))
    after = [*labels[: axes[0]], None, *labels[axes[0] :]]
    return Signature([labels, no_axis(values[1])], [after])


@rule("Squeeze")
def squeeze(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Without axes of size 1."""
    dims = values[0].dims or ()
    named = [axis % len(dims) for axis in op.get_attr("squeeze_dims")]
    if not named and any(not isinstance(dim, int) for dim in dims):
        return None  # it depends on sizes which axes go
    gone = named or [axis for axis, dim in enumerate(dims) if dim == 1]
    labels = tuple(None if axis in gone else axis for axis in range(len(dims)))
    kept = tuple(one for one in labels if one is not None)
    axes = tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(i=gone))
    return Signature(
        [labels],
        [kept],
        dims=[tuple(dims[axis] for axis in kept)],
        attributes={"squeeze_dims": axes},  # a slice of one row keeps its axis of rows
    )


@rule("BroadcastTo")
def broadcast_to(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Split along axes that are in full already, or that are new."""
    if values[1].const is None:
        return None
    found = _broadcast(values[0].dims or (), tuple(values[1].const))
    return found and Signature([found[0], (None,)], [found[1]], shapes={1: 0}, dims=[found[2]])


def _broadcast(old: Sequence[Any], new: Sequence[Any]) -> Any:
    """Labels before, labels after, and dimensions; `None` if it isn't known what is repeated."""
    skip = len(new) - len(old)
    if any(dim != new[skip + axis] and dim != 1 for axis, dim in enumerate(old)):
        return None
    before = tuple(
        skip + axis if dim == new[skip + axis] and dim != 1 else None
        for axis, dim in enumerate(old)
    )
    return before, tuple(range(len(new))), tuple(new)


SAME = {
    "RandomShuffle": 0,
    "StatelessShuffle": 0,
    "LookupTableFindV2": 1,
}  # {type: the input whose sizes it keeps}


@rule(*SAME, needs_ranks=False)
def same_sizes(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Computed whole, in the sizes of an input: what follows has rows again."""
    dims = values[SAME[op.type]].dims
    if dims is None or (op.type == "LookupTableFindV2" and values[2].dims != ()):
        return None
    return planner.fallback(op, values, [dims])


@rule("Fill", "Empty")
def fill(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """One number everywhere; or what is written before it is read."""
    if values[0].const is None:
        return None
    dims, inputs = tuple(values[0].const), [(None,), ()][: len(values)]
    return Signature(inputs, [tuple(range(len(dims)))], shapes={0: 0}, dims=[dims])


@rule("Tile")
def tile(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Repetitions: split along what isn't repeated, or (as a broadcast) had one entry."""
    old, times = values[0].dims or (), values[1].const
    if times is None:
        return None
    new = tuple(dim * count for dim, count in zip(old, times))
    if all(dim == size or dim == 1 for dim, size in zip(old, new)):
        before, after, _ = _broadcast(old, new)
        attributes = {"T": attributes_of(op)["T"], "Tmultiples": None, "Tidx": _type(values[1])}
        return Signature(
            [before, (None,)],
            [after],
            shapes={1: 0},
            dims=[new],
            kind="BroadcastTo",
            attributes=attributes,
        )
    labels = tuple(axis if dim == size else None for axis, (dim, size) in enumerate(zip(old, new)))
    return Signature([labels, (None,)], [labels], dims=[new])


def _type(value: Value) -> Any:
    return tf.compat.v1.AttrValue(type=value.dtype.as_datatype_enum)


@rule("Range")
def numbers(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """From 0 in equal steps: a device begins at its first row."""
    start, limit, step = (value.const for value in values)
    if start is None or limit is None or step is None or start[()] != 0:
        return None
    by, dtype = step[()], op.outputs[0].dtype
    dims = (quotient(limit[()], by),)
    unit = planner.unit_of(dims[0])
    if unit is None:
        return None

    def make(layout: Layout) -> Item | None:
        if isinstance(layout, Whole):
            return planner.whole(op, values)[0]
        if not isinstance(layout, (Split, Copied)):
            return None

        def emit(local: Any) -> list[Any]:
            begin, count = 0, local.dim(dims[0])
            if isinstance(layout, Split):
                begin, count = local.first_entry(unit), local.entries(unit)
            return [tf.cast(tf.range(begin, begin + count), dtype) * tf.cast(local.dim(by), dtype)]

        symbols = symbols_of([*dims, by])
        return planner.add(emit, [], EACH, [dtype], name=op.name, symbols=symbols)[0]

    known = ("numbers", dims[0]) if isinstance(by, int) and by == 1 else None
    return [Value(dtype, dims, make=make, known=known)]


@rule("Const", "StatelessRandomGetAlg")
def constant(planner: Any, op: tf.Operation, values: list[Value]) -> list[Value]:
    """Made where it is used, if it is small."""
    dims, dtype = tuple(op.outputs[0].shape.as_list()), op.outputs[0].dtype
    emit, is_small = operation(op), product(dims) < SMALL

    def make(layout: Layout) -> Item | None:
        if isinstance(layout, Whole):
            return planner.add(emit, [], 0, [dtype], name=op.name, is_cheap=True)[0]
        if isinstance(layout, Copied) and is_small:
            return planner.add(emit, [], EACH, [dtype], name=op.name, is_cheap=True)[0]
        return None

    return [Value(dtype, dims, make=make)]
