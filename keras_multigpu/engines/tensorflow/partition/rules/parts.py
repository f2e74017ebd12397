"""Parts of tensors, cut and joined: slices, pads, concatenations, stacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.constants import numbers_of
from keras_multigpu.engines.tensorflow.partition.layouts import Value
from keras_multigpu.engines.tensorflow.partition.operations import create
from keras_multigpu.engines.tensorflow.partition.rules.joined import among_zeros, joined, piece
from keras_multigpu.engines.tensorflow.partition.rules.table import axes_of, no_axis, rule
from keras_multigpu.engines.tensorflow.partition.signatures import Signature, static_dims
from keras_multigpu.engines.tensorflow.partition.sizes import Unknown, divide, quotient


@rule("ConcatV2")
def concat(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Other axes than the one that is joined; along that, slices of rows where they are."""
    rank = values[0].rank
    axes = axes_of(values[-1], rank)
    if axes is None or any(value.rank != rank for value in values[:-1]):
        return None
    labels = tuple(None if a in axes else a for a in range(rank))
    shapes = [value.dims or () for value in values[:-1]]
    dims = [
        sum(one[1:], one[0]) if axis in axes else one[0] for axis, one in enumerate(zip(*shapes))
    ]
    made = joined(planner, op, values[:-1], axes[0], dims)
    if made is not None:
        return made, "spread"
    return Signature([labels] * len(shapes) + [()], [labels], dims=[dims])


@rule("Pack")
def pack(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """A new axis, in which the inputs follow each other."""
    rank = values[0].rank
    if any(value.rank != rank for value in values):
        return None
    axis = op.get_attr("axis") % (rank + 1)
    labels, dims = list(range(rank)), list(values[0].dims or ())
    after = [*labels[:axis], None, *labels[axis:]]
    return Signature(
        [labels] * len(values), [after], dims=[(*dims[:axis], len(values), *dims[axis:])]
    )


@rule("Unpack")
def unpack(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Other axes than the one that is taken apart."""
    rank = values[0].rank
    axis = op.get_attr("axis") % rank
    labels = [None if a == axis else a for a in range(rank)]
    after = [a for a in range(rank) if a != axis]
    dims = tuple((values[0].dims or ())[a] for a in after)
    return Signature([labels], [after] * len(op.outputs), dims=[dims] * len(op.outputs))


@rule("Split", "SplitV")
def split(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Other axes than the one that is cut."""
    x = values[1] if op.type == "Split" else values[0]
    rank = x.rank
    axes = axes_of(values[0] if op.type == "Split" else values[2], rank)
    if axes is None:
        return None
    labels = [None if a in axes else a for a in range(rank)]
    inputs = [(), labels] if op.type == "Split" else [labels, (None,), ()]
    sizes = _sizes_of_cut(op, (x.dims or ())[axes[0]], values[1].const)
    begins = [None if None in sizes else sum(sizes[:n], 0) for n in range(len(sizes))]
    pieces = [piece(planner, x, axes[0], *one) for one in zip(begins, sizes)]
    if None not in pieces:
        return pieces, "spread"
    dims = [
        tuple(size if a == axes[0] else dim for a, dim in enumerate(x.dims or ())) for size in sizes
    ]
    return Signature(inputs, [labels] * len(op.outputs), dims=dims)


def _sizes_of_cut(op: tf.Operation, whole: Any, given: Any) -> list[Any]:
    """The lengths of the pieces of an axis; `None` where they aren't known."""
    count = len(op.outputs)
    if op.type == "Split":
        try:
            return [divide(whole, count)] * count
        except Unknown:
            return [None] * count
    if given is None:
        return [None] * count
    sizes = list(given)
    if -1 in sizes:
        sizes[sizes.index(-1)] = whole - sum(sizes) - 1
    return sizes


@rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def pad(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Other axes than those that are padded."""
    before = values[1].const
    if before is None:
        return None
    sign = -1 if op.type == "MirrorPadGrad" else 1
    shape = values[0].dims or ()
    is_padded = [any(one != 0 for one in pair) for pair in before]
    labels = tuple(None if one else axis for axis, one in enumerate(is_padded))
    dims = tuple(dim + sign * (pair[0] + pair[1]) for dim, pair in zip(shape, before))
    inputs = [labels, (None, None), *map(no_axis, values[2:])]
    write = _mirrored if op.type.startswith("Mirror") else None
    return Signature(inputs, [labels], dims=[dims], write=write)


def _mirrored(kind: str, inputs: Sequence[Any], attributes: Any, name: str) -> list[Any]:
    """With a row where there is none: the kernels, and XLA, take no empty tensors."""
    tensor, paddings = inputs
    missing = tf.maximum(1 - tf.shape(tensor), 0)
    filled = tf.pad(tensor, tf.stack([tf.zeros_like(missing), missing], 1))
    filled.set_shape([size or None for size in tensor.shape])
    (made,) = create(kind, [filled, paddings], attributes, name)
    result = tf.slice(made, tf.zeros_like(missing), tf.shape(made) - missing)
    result.set_shape([size if own else None for own, size in zip(tensor.shape, made.shape)])
    return [result]


@rule("Slice")
def slice_(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Other axes than those that are cut."""
    shape, begins, sizes = values[0].dims or (), values[1].const, values[2].const
    if begins is None or sizes is None:
        static = static_dims(op.outputs[0]) or (None,) * len(shape)
        return Signature(
            [no_axis(values[0]), (None,), (None,)], [(None,) * len(shape)], dims=[static]
        )
    is_full = [b == 0 and (s == -1 or s == d) for b, s, d in zip(begins, sizes, shape)]
    labels = tuple(axis if full else None for axis, full in enumerate(is_full))
    cut_axes = [axis for axis, full in enumerate(is_full) if not full]
    if len(cut_axes) == 1:
        (axis,) = cut_axes
        size = shape[axis] - begins[axis] if sizes[axis] == -1 else sizes[axis]
        found = piece(planner, values[0], axis, begins[axis], size)
        if found is not None:
            return [found], "spread"
    dims = tuple(
        d if full else d - b if s == -1 else s
        for full, d, b, s in zip(is_full, shape, begins, sizes)
    )
    return Signature(
        [labels, (None,), (None,)],
        [labels],
        dims=[dims],
        constants={1: list(begins), 2: [-1 if full else s for full, s in zip(is_full, sizes)]},
    )


def cut(op: tf.Operation, dims: Sequence[Any], bounds: Sequence[Value]) -> Any:
    """Labels before and after `x[begin:end:stride]`, and the dimensions after; or `None`."""
    begin, end, stride = (value.const for value in bounds)
    steps = numbers_of(stride)
    if steps is None:
        return None
    has = {
        name: [op.get_attr(f"{name}_mask") >> i & 1 for i in range(len(steps))]
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    before: list[Any] = []
    after: list[Any] = []
    sizes: list[Any] = []

    def keep(axes: Sequence[int]) -> None:
        before.extend(axes)
        after.extend(axes)
        sizes.extend(dims[axis] for axis in axes)

    for i, step in enumerate(steps):
        axis = len(before)
        if has["ellipsis"][i]:
            taken = sum(not new for new in has["new_axis"][i + 1 :])
            keep(range(axis, len(dims) - taken))
        elif has["new_axis"][i]:
            after.append(None)
            sizes.append(1)
        elif has["shrink_axis"][i]:
            before.append(None)
        else:
            dim, is_first, is_last = dims[axis], has["begin"][i], has["end"][i]
            first = 0 if is_first else None if begin is None else begin[i]
            last = dim if is_last else None if end is None else end[i]
            is_to_end = is_last or _is_at_least(last, dim)
            is_kept = step == 1 and _is_zero(first) and is_to_end  # `x[:]`, whatever the size
            before.append(axis if is_kept else None)
            after.append(before[-1])
            is_open = step < 0 and (is_first or is_last)
            length = None if is_open else _length(dim, first, last, step)
            is_all = is_kept or (step == -1 and is_first and is_last)
            sizes.append(dim if is_all else length)
    keep(range(len(before), len(dims)))
    return before, after, sizes


def _length(dim: Any, first: Any, last: Any, step: int) -> Any:
    """How many entries of an axis lie between bounds; `None` if that isn't known."""
    if all(isinstance(one, int) for one in (dim, first, last)):
        return len(range(dim)[first:last:step])
    if step < 1 or first is None or last is None:
        return None
    try:
        # Negative ones are counted from the end.
        first, last = (
            one + dim if isinstance(one, int) and one < 0 else one for one in (first, last)
        )
        between = last - first if 0 <= first <= last <= dim else None
    except Unknown:
        return None
    lengths = (quotient(between + rest, step) for rest in range(step) if between is not None)
    return next((one for one in lengths if one is not None), None)


def _is_at_least(value: Any, dim: Any) -> bool:
    """Whether an end is the end of the axis, or beyond."""
    try:
        return value is not None and bool(value >= dim)
    except Unknown:
        return False


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and value == 0


@rule("StridedSlice")
def strided_slice(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Other axes than those that are cut."""
    found = cut(op, values[0].dims or (), values[1:])
    if found is None:
        return None
    before, after, sizes = found
    own = _begin(op, found, values[0].dims or (), values[1:])
    made = None if own is None else piece(planner, values[0], *own)
    if made is not None:
        return [made], "spread"
    static = static_dims(op.outputs[0]) or (None,) * len(sizes)
    dims = tuple(s if s is not None else d for s, d in zip(static, sizes))
    return Signature([before, (None,), (None,), (None,)], [after], dims=[dims])


@rule("StridedSliceGrad")
def strided_slice_grad(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """The reverse: zeros where nothing was taken."""
    if values[0].const is None:
        return None
    dims = tuple(values[0].const)
    found = cut(op, dims, values[1:4])
    if found is None:
        return None
    before, after, _ = found
    own = _begin(op, found, dims, values[1:4])
    made = None if own is None else among_zeros(planner, op, values[4], dims, *own)
    if made is not None:
        return [made], "spread"
    return Signature([(None,)] * 4 + [after], [before], shapes={0: 0}, dims=[dims])


def _begin(op: tf.Operation, found: Any, dims: Sequence[Any], bounds: Sequence[Value]) -> Any:
    """The one axis that a slice cuts, where it begins and how long it is; or `None`."""
    before, after, sizes = found
    if before != after or before.count(None) != 1:
        return None
    axis = before.index(None)
    begin, _, steps = (value.const for value in bounds)
    ellipsis = op.get_attr("ellipsis_mask")
    is_behind = 0 < ellipsis < 1 << axis + 1  # numbers of bounds are not those of axes
    if is_behind or steps is None or len(steps) <= axis or steps[axis] != 1:
        return None
    if op.get_attr("begin_mask") >> axis & 1:
        return axis, 0, sizes[axis]
    first = None if begin is None else begin[axis]
    return axis, first + dims[axis] if isinstance(first, int) and first < 0 else first, sizes[axis]
