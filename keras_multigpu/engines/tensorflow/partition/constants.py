"""Shape arithmetic: small integer tensors of a traced graph, evaluated on symbolic dimensions.

A constant is a NumPy array of objects: numbers and `Dim`s. An operation that has no entry here, or
whose result the polynomials don't decide, has no constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.sizes import Dim, Unknown, broadcast, product

LARGEST = 64  # elements
_INTEGERS = (tf.int32, tf.int64)
WITH_SHAPES = ("Shape", "ShapeN", "Size", "Rank")

Constant = np.ndarray


def constant_of(values: Any, dims: Any = None) -> Constant:
    """A constant from numbers and `Dim`s; of `dims`, if the values are flat."""
    result = np.empty(np.shape(values), dtype=object)
    result[...] = values
    return result if dims is None else result.reshape([int(dim) for dim in dims])


def numbers_of(constant: Constant | None) -> list[int] | None:
    """The numbers of a constant, flat; `None` if it is not all numbers."""
    if constant is None or any(isinstance(value, Dim) for value in constant.flat):
        return None
    return [int(value) for value in constant.flat]


def evaluate(op: tf.Operation, values: Sequence[Any]) -> list[Constant] | None:
    """The constants that an operation gives; `None` if they aren't known.

    `values` describe its inputs: `dims`, and `const` if known.
    """
    types = (tf.bool,) if op.type in _COMPARE else _INTEGERS
    if not op.outputs or any(output.dtype not in types for output in op.outputs):
        return None
    if op.type == "Const":
        if (op.outputs[0].shape.num_elements() or 0) > LARGEST:
            return None
        value = np.asarray(tf.make_ndarray(op.get_attr("value")))
        return [constant_of(value.astype(object) if value.ndim else int(value))]
    if op.type in WITH_SHAPES:
        return _shape(op, values)
    function = EVALUATE.get(op.type)
    if function is None or not values or any(value.const is None for value in values):
        return None
    try:
        result = function(op, *[value.const for value in values])
    except (Unknown, TypeError, ValueError, IndexError, ZeroDivisionError):
        return None  # not decided for all sizes: the operation is computed when the step runs
    results = result if isinstance(result, list) else [result]
    return [constant_of(np.asarray(one, dtype=object)) for one in results]


def _shape(op: tf.Operation, values: Sequence[Any]) -> list[Constant] | None:
    if any(value.dims is None for value in values):
        return None
    if op.type == "Rank":
        return [constant_of(len(values[0].dims))]
    if op.type == "Size":
        return [constant_of(product(values[0].dims))]
    return [constant_of(value.dims) for value in values]


def _broadcast_gradient_args(op: tf.Operation, a: Constant, b: Constant) -> list[Constant]:
    rank = max(len(a), len(b))
    left, right = ([1] * (rank - len(one)) + list(one) for one in (a, b))
    of_left, of_right = [], []
    for axis, (p, q) in enumerate(zip(left, right)):
        is_one = [isinstance(one, int) and one == 1 for one in (p, q)]
        if p != q and not any(is_one):
            raise Unknown
        of_left += [axis] if is_one[0] else []
        of_right += [axis] if is_one[1] else []
    return [constant_of(of_left), constant_of(of_right)]


def _strided_slice(op: tf.Operation, x: Constant, *bounds: Constant) -> Any:
    if op.get_attr("ellipsis_mask") or op.get_attr("new_axis_mask"):
        raise Unknown
    masks = {name: op.get_attr(f"{name}_mask") for name in ("begin", "end", "shrink_axis")}
    index: list[Any] = []
    for axis, (begin, end, stride) in enumerate(zip(*bounds)):
        if masks["shrink_axis"] >> axis & 1:
            index.append(int(begin))
        else:
            start = None if masks["begin"] >> axis & 1 else int(begin)
            index.append(slice(start, None if masks["end"] >> axis & 1 else int(end), int(stride)))
    return x[tuple(index)]


def _slice(op: tf.Operation, x: Constant, begins: Constant, sizes: Constant) -> Any:
    return x[
        tuple(slice(int(b), None if s == -1 else int(b) + int(s)) for b, s in zip(begins, sizes))
    ]


def _reduce(function: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    def reduce(op: tf.Operation, x: Constant, axes: Constant) -> Any:
        if op.outputs[0].shape.rank != 0:
            raise Unknown
        return function(list(x.flat))

    return reduce


def _largest(values: list[Any]) -> Any:
    if all(one == values[0] for one in values):
        return values[0]
    if any(isinstance(one, Dim) for one in values):
        raise Unknown
    return max(values)


def _fill(op: tf.Operation, shape: Constant, value: Constant) -> Any:
    if product(shape) > LARGEST:
        raise Unknown
    return np.full([int(one) for one in shape], value, dtype=object)


def _range(op: tf.Operation, start: Constant, limit: Constant, delta: Constant) -> Any:
    found = range(int(start), int(limit), int(delta))
    if len(found) > LARGEST:
        raise Unknown
    return constant_of(found)


def _gather(op: tf.Operation, x: Constant, indices: Constant, axis: Constant) -> Any:
    if op.get_attr("batch_dims"):
        raise Unknown
    return np.take(x, indices.astype(np.int64), axis=int(axis))


def _stitch(op: tf.Operation, *parts: Constant) -> Constant:
    indices, values = parts[: len(parts) // 2], parts[len(parts) // 2 :]
    result = np.empty(max(int(i) for index in indices for i in index.flat) + 1, dtype=object)
    for index, value in zip(indices, values):
        for i, one in zip(index.flat, value.flat):
            result[int(i)] = one
    if any(one is None for one in result):
        raise Unknown
    return result


def _split(op: tf.Operation, x: Constant, sizes: Constant, axis: Constant) -> list[Constant]:
    counts = [int(one) for one in sizes]
    rest = x.shape[int(axis)] - sum(one for one in counts if one >= 0)
    counts = [rest if one < 0 else one for one in counts]
    return np.split(x, np.cumsum(counts)[:-1], axis=int(axis))


def _list_diff(op: tf.Operation, x: Constant, y: Constant) -> list[Constant]:
    if any(isinstance(one, Dim) for one in (*x, *y)):
        raise Unknown
    kept = [place for place, one in enumerate(x) if one not in list(y)]
    return [constant_of([x[place] for place in kept]), constant_of(kept)]


def _concat_offset(op: tf.Operation, axis: Constant, *shapes: Constant) -> list[Constant]:
    result: list[Constant] = []
    total: Any = 0
    for shape in shapes:
        offset = np.zeros(len(shape), dtype=object)
        offset[int(axis)] = total
        total = total + shape[int(axis)]
        result.append(offset)
    return result


def _select(op: tf.Operation, condition: Constant, a: Constant, b: Constant) -> Any:
    if condition.ndim:
        raise Unknown
    return a if condition[()] else b


def _numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """A comparison of numbers; which of two sizes is larger is known when the step runs."""

    def compare(op: tf.Operation, a: Constant, b: Constant) -> Any:
        if any(isinstance(one, Dim) for one in (*a.flat, *b.flat)):
            raise Unknown
        return function(a, b)

    return compare


_COMPARE: dict[str, Callable[..., Any]] = {
    "Greater": _numbers(lambda a, b: a > b),
    "GreaterEqual": _numbers(lambda a, b: a >= b),
    "Less": _numbers(lambda a, b: a < b),
    "LessEqual": _numbers(lambda a, b: a <= b),
    "Equal": _numbers(lambda a, b: a == b),
    "NotEqual": _numbers(lambda a, b: a != b),
}
EVALUATE: dict[str, Callable[..., Any]] = {
    **_COMPARE,
    "Select": _select,
    "SelectV2": _select,
    "Add": lambda op, a, b: a + b,
    "AddV2": lambda op, a, b: a + b,
    "Sub": lambda op, a, b: a - b,
    "Mul": lambda op, a, b: a * b,
    "FloorDiv": lambda op, a, b: a // b,
    "FloorMod": lambda op, a, b: a % b,
    "Neg": lambda op, a: -a,
    "Maximum": lambda op, a, b: np.maximum(a, b),
    "Minimum": lambda op, a, b: np.minimum(a, b),
    "Identity": lambda op, a: a,
    "EnsureShape": lambda op, a: a,
    "Cast": lambda op, a: a + 0,  # of truth values, too
    "Pack": lambda op, *a: np.stack(a, axis=op.get_attr("axis")),
    "ConcatV2": lambda op, *a: np.concatenate(a[:-1], axis=int(a[-1])),
    "ExpandDims": lambda op, a, axis: np.expand_dims(a, int(axis.flat[0])),
    "Squeeze": lambda op, a: np.squeeze(a, tuple(op.get_attr("squeeze_dims")) or None),
    "Reshape": lambda op, a, shape: a.reshape([int(one) for one in shape]),
    "Transpose": lambda op, a, order: np.transpose(a, [int(one) for one in order]),
    "Split": lambda op, axis, x: np.split(x, op.get_attr("num_split"), axis=int(axis)),
    "SplitV": _split,
    "StridedSlice": _strided_slice,
    "Slice": _slice,
    "GatherV2": _gather,
    "Max": _reduce(_largest),
    "Prod": _reduce(product),
    "Sum": _reduce(lambda values: sum(values, 0)),
    "Fill": _fill,
    "Range": _range,
    "BroadcastGradientArgs": _broadcast_gradient_args,
    "BroadcastArgs": lambda op, a, b: constant_of(broadcast(a, b)),
    "InvertPermutation": lambda op, a: np.argsort(a.astype(np.int64)).astype(object),
    "Tile": lambda op, a, times: np.tile(a, [int(one) for one in times]),
    "ListDiff": _list_diff,
    "Unpack": lambda op, a: list(np.moveaxis(a, op.get_attr("axis"), 0)),
    "ZerosLike": lambda op, a: np.zeros(a.shape, dtype=object),
    "OnesLike": lambda op, a: np.ones(a.shape, dtype=object),
    "ConcatOffset": _concat_offset,
    "DynamicStitch": _stitch,
    "ParallelDynamicStitch": _stitch,
}
