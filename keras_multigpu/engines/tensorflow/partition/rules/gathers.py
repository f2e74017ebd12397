"""What is taken from places, and put there: gathers, scatters, one-hot rows, searches."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import SUM, WHOLE, Split, Value
from keras_multigpu.engines.tensorflow.partition.operations import create, operation
from keras_multigpu.engines.tensorflow.partition.program import EACH
from keras_multigpu.engines.tensorflow.partition.rules.table import axes_of, no_axis, rule
from keras_multigpu.engines.tensorflow.partition.rules.tables import rows_of
from keras_multigpu.engines.tensorflow.partition.signatures import Signature
from keras_multigpu.engines.tensorflow.partition.sizes import Dim, elements_of

_FEW = 16  # times as large as the updates of 32 rows: then the updates are less to send


@rule("GatherV2")
def gather(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Split along indices, or along what isn't indexed; rows of a large table where they are."""
    is_first = _is_first_axis(values)
    if is_first and values[1].known == ("numbers", (values[0].dims or (None,))[0]):
        return [values[0]]
    found = rows_of(planner, op, values) if is_first else None
    if found is not None:
        return found, "spread"
    table, indices = values[0].dims or (), values[1].dims or ()
    count = op.get_attr("batch_dims")
    count += len(indices) if count < 0 else 0
    axes = axes_of(values[2], len(table))
    if axes is None or table[:count] != indices[:count]:
        return None
    axis = axes[0]
    of_table = [
        ("batch", a) if a < count else None if a == axis else ("table", a)
        for a in range(len(table))
    ]
    of_indices = [("batch" if a < count else "index", a) for a in range(len(indices))]
    output = [*of_table[:axis], *of_indices[count:], *of_table[axis + 1 :]]
    dims = (*table[:axis], *indices[count:], *table[axis + 1 :])
    return Signature([of_table, of_indices, ()], [output], dims=[dims])


def _is_first_axis(values: list[Value]) -> bool:
    return axes_of(values[2], values[0].rank) == [0]


@rule("GatherNd")
def gather_nd(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Split along indices, or along the axes behind those that are indexed."""
    table, indices = values[0].dims or (), values[1].dims or ()
    if not indices or not isinstance(indices[-1], int):
        return None
    labels = tuple(range(len(indices) - 1))
    depth = indices[-1]
    rest = tuple(("rest", axis) for axis in range(depth, len(table)))
    return Signature(
        [(None,) * depth + rest, (*labels, None)],
        [(*labels, *rest)],
        dims=[(*indices[:-1], *table[depth:])],
        zero_if_empty=rest,
    )


@rule("ScatterNd")
def scatter_nd(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Updates add up, or few go to one device; the axes behind those that are indexed are kept."""
    indices, updates, dtype = values[0].dims or (), values[1].dims or (), values[1].dtype
    is_number = dtype.is_floating or dtype.is_integer or dtype.is_complex
    if values[2].const is None or not indices or not isinstance(indices[-1], int) or not is_number:
        return None
    dims = tuple(values[2].const)
    labels = tuple(range(len(indices) - 1))
    rest = tuple(("rest", axis) for axis in range(indices[-1], len(dims)))
    if len(updates) != len(labels) + len(rest):
        return None
    # What is split behind the indexed axes stays where it is, and what has the batch's rows.
    axis = values[1].axis if values[1].axis is not None else values[0].axis
    has_rows = any(isinstance(dim, Dim) or dim == planner.batch for dim in dims)
    is_of_rows = axis is not None and axis < len(labels) and not has_rows
    if is_of_rows and _are_few(planner, updates, dims):
        return planner.fallback(op, values, [dims])
    output = (None,) * indices[-1] + rest
    return Signature(
        [(*labels, None), (*labels, *rest), (None,)],
        [output],
        "sum",
        dims=[dims],
        shapes={2: 0},
        zero_if_empty=rest,
    )


@rule("OneHot")
def one_hot(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """A new axis for the classes."""
    labels, dims = list(range(values[0].rank)), list(values[0].dims or ())
    axis = op.get_attr("axis") % (len(labels) + 1)
    depth = None if values[1].const is None else values[1].const[()]
    return Signature(
        [labels, (), (), ()],
        [[*labels[:axis], None, *labels[axis:]]],
        dims=[(*dims[:axis], depth, *dims[axis:])],
    )


@rule("LowerBound", "UpperBound")
def search_sorted(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Each row has its own sorted values."""
    if (values[0].dims or ())[:1] != (values[1].dims or ())[:1]:
        return None
    return Signature([("row", None), ("row", None)], [("row", None)], dims=[values[1].dims])


@rule("Unique", "UniqueWithCounts")
def unique(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """One device finds them; every entry has its place among them."""
    dims = [(None,), values[0].dims, (None,)]
    return planner.fallback(op, values, dims[: len(op.outputs)])


@rule(*[f"TensorScatter{one}" for one in ("Update", "Add", "Sub", "Max", "Min")])
def tensor_scatter(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Axes behind the indexed ones; what rows add anywhere are addends."""
    if op.type in ("TensorScatterAdd", "TensorScatterSub") and _is_of_rows(values):
        return _added(planner, op, values)
    depth = (values[1].dims or (None,))[-1]
    if not isinstance(depth, int):
        return None
    dims, k = values[0].dims or (), values[1].rank - 1
    rest = tuple(range(depth, len(dims)))
    rows = [axis for axis in rest if planner.unit_of(dims[axis]) is not None]

    def one_more(kind: str, inputs: Any, attributes: Any, name: str) -> list[Any]:
        """With one more entry along the rows."""
        tensor, indices, updates = inputs
        more = [[0, int(axis in rows)] for axis in range(len(dims))]
        given = [tf.pad(tensor, more), indices, tf.pad(updates, [[0, 0]] * k + more[depth:])]
        (made,) = create(kind, given, attributes, name)
        return [tf.slice(made, [0] * len(dims), tf.shape(tensor))]

    return Signature(
        [(None,) * depth + rest, no_axis(values[1]), (None,) * k + rest],
        [(None,) * depth + rest],
        dims=[values[0].dims],
        zero_if_empty=rest,
        write_compiled=one_more if rows else None,
    )


def _are_few(planner: Any, updates: Any, tensor: Any) -> bool:
    """Whether it is less to send updates than what they are added to."""
    return elements_of(tensor) > _FEW * elements_of(updates) and not planner.is_alone


def _is_of_rows(values: list[Value]) -> bool:
    """Whether the devices have their rows' updates, and of the tensor all or addends."""
    tensor, indices, updates = values
    return 0 in (indices.axis, updates.axis) and tensor.layout in (WHOLE, SUM)


def _added(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Each device adds its updates to its addend; few updates go to where a large tensor is."""
    tensor, indices, updates = values
    if _are_few(planner, updates.dims, tensor.dims):
        return planner.fallback(op, values, [tensor.dims])[0], "whole"
    sizes = (indices.dims or ())[:1], (updates.dims or ())[:1]
    if sizes[0] != sizes[1] or planner.unit_of(sizes[0][0]) is None or tensor.dtype == tf.bool:
        return None
    items = [planner.get(one, form) for one, form in zip(values, (SUM, Split(0), Split(0)))]
    (item,) = planner.add(operation(op), items, EACH, [tensor.dtype], name=op.name)
    return [planner.value(tensor.dtype, tensor.dims, SUM, item)], "spread"
