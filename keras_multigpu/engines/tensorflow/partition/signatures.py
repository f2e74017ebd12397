"""What a rule says of an operation: which axes of its inputs and outputs belong together."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import COPIED, SUM, Owned, Sharded, Value
from keras_multigpu.engines.tensorflow.partition.sizes import Dims, elements_of, is_known

Labels = Sequence[Any]


@dataclasses.dataclass
class Signature:
    """The axes of an operation's inputs and outputs, with labels.

    Split along a label, each device computes the operation on its slices of the inputs that have
    the label, and on whole copies of the others. It gets its slices of the outputs that have it,
    and an addend of the others.

    Attributes:
        inputs: for each input a label for each axis; `None`: it can't be split along that axis.
        outputs: likewise.
        partial: the kind of addends that outputs without the label are; `None`: there must be none.
        dims: the outputs' dimensions, where the rule knows more than the trace and the labels.
        shapes: {input: output}: inputs that hold the shape of an output.
        constants: {input: numbers}: what an input is replaced by.
        kind: the operation to use instead.
        attributes: attributes to use instead.
        zero_if_empty: labels along which a kernel fails, or gives garbage, if there is nothing: a
            device without rows gives zeros of `dims`.
        regroups: whether a label's axis may have another multiple of the rows in the outputs.
        write: adds it to a graph, as `operations.create` does, if it is more than one operation.
    """

    inputs: Sequence[Labels]
    outputs: Sequence[Labels]
    partial: str | None = None
    dims: Sequence[Any] | None = None
    shapes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    constants: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    kind: str | None = None
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    zero_if_empty: Sequence[Any] = ()
    regroups: bool = False
    write: Callable[..., list[Any]] | None = None


def output_dims(op: tf.Operation, values: Sequence[Value], signature: Signature) -> list[Any]:
    """The dimensions of the outputs; `None` for those that aren't known."""
    known: dict[Any, Any] = {}
    for value, labels in zip(values, signature.inputs):
        for one, dim in zip(labels, value.dims or ()):
            known[one] = dim if known.get(one, dim) == dim else None  # one is broadcast
    known[None] = None
    found = []
    for number, (tensor, labels) in enumerate(zip(op.outputs, signature.outputs)):
        if signature.dims is not None and signature.dims[number] is not None:
            found.append(tuple(signature.dims[number]))
            continue
        static = static_dims(tensor)
        static = (None,) * len(labels) if static is None else static
        assert len(static) == len(labels), (op.type, static, labels)
        found.append(
            tuple(dim if dim is not None else known.get(one) for dim, one in zip(static, labels))
        )
    return found


def static_dims(tensor: tf.Tensor) -> tuple[Any, ...] | None:
    """A tensor's static dimensions, `None` for unknown ones; `None` if their number is unknown."""
    return None if tensor.shape.rank is None else tuple(tensor.shape.as_list())


def sharded_label(
    values: Sequence[Value],
    signature: Signature,
    dims: Sequence[Dims | None],
    shard_of: Callable[[Value], Sharded | Owned | None],
    count: int,
    homes: Set[Any],
) -> tuple[Any, type[Sharded] | type[Owned]] | None:
    """The label along which devices have their parts, and how; `None` if it can't be split so.

    The best are the `homes`: see `homes_of`.
    """
    sizes: dict[Any, set[Any]] = collections.defaultdict(set)
    weights: dict[Any, float] = collections.defaultdict(float)
    owned: dict[Any, set[bool]] = collections.defaultdict(set)
    whole: set[Any] = set()  # the labels of inputs that are no parts along them
    given = {*range(len(values))} - {*signature.shapes, *signature.constants}
    if any(values[number].axis is not None for number in given):
        return None  # rows are split
    if not any(shard_of(values[n]) or values[n].layout == SUM for n in given):
        # Of whole inputs only what is larger than they are, such as a table's gradient.
        copies = {n: 1 if homes & {*signature.inputs[n]} else count for n in given}
        taken = sum(elements_of(values[n].dims) * copies[n] for n in given)
        homes = homes if taken < sum(map(elements_of, dims)) else set()
    for number in given:
        value, labels = values[number], signature.inputs[number]
        shard = shard_of(value)
        for axis, (label, dim) in enumerate(zip(labels, value.dims or ())):
            sizes[label].add(dim)
            is_part = shard is not None and axis == shard.axis
            owned[label].add(is_part and isinstance(shard, Owned))
            if is_part:
                weights[label] += elements_of(value.dims)
                continue
            whole.add(label)
            if shard is None and label in homes:
                weights[label] += 0  # each device gets its part, or sums it
    for labels, shape in zip(signature.outputs, dims):
        for label, dim in zip(labels, shape or ()):
            sizes[label].add(dim)
    # Nobody knows how many entries a device owns: there may be none.
    for label in signature.zero_if_empty:
        owned[label].add(False)
    for number in signature.shapes.values():
        for label in signature.outputs[number]:
            owned[label].add(False)
    is_kept = {one: all(one in labels for labels in signature.outputs) for one in weights}
    possible = [
        one
        for one in weights
        if one is not None
        and (len(sizes[one]) == 1 or (signature.regroups and _are_even(sizes[one], count)))
        and (is_known(sizes[one]) or owned[one] == {True})
        and (is_kept[one] or signature.partial)
    ]
    if not possible:
        return None
    best = max(possible, key=lambda one: (is_kept[one], one in homes, weights[one]))
    if owned[best] == {True}:
        return best, Owned
    if not is_kept[best] and best in whole and sum(map(elements_of, dims)) >= weights[best]:
        return None  # less crosses if the parts are gathered than if addends are summed
    return best, Sharded


def meet_as_much(values: Sequence[Value], signature: Signature, label: Any) -> bool:
    """Whether activations that devices have parts of meet as much that is whole.

    Less crosses if they are gathered, once, than if all that they meet is split.
    """
    parts, whole = 0.0, 0.0
    for number, (value, labels) in enumerate(zip(values, signature.inputs)):
        if number in signature.shapes or label not in labels:
            continue
        layout = Sharded(list(labels).index(label))
        if value.layout == layout and (value.is_state or value.is_update):
            return False  # weights, which are not gathered
        if value.layout == layout:
            parts += elements_of(value.dims)
        elif not (value.is_free or value.forms.keys() & {COPIED, layout}):
            whole += elements_of(value.dims)
    return 0 < parts <= whole


def homes_of(
    op: tf.Operation, signature: Signature, dims: Sequence[Any], shards: Mapping[Any, int]
) -> Set[Any]:
    """The labels along which sums are sharded as variables of their shape: gradients of weights.

    `shards` has the axis of each shape. A gradient may get its shape from the next operations.
    """
    found: set[Any] = set()
    for tensor, labels, shape in zip(op.outputs, signature.outputs, dims):
        if signature.partial and shape and is_known(shape):
            for left, sizes, other in _followed(tensor, labels, shape, shape):
                if other in shards:
                    before = math.prod(other[: shards[other]])
                    ends = [math.prod(sizes[:axis]) for axis in range(len(sizes))]
                    found.update(one for one, size in zip(left, ends) if size == before)
    return found


def _followed(
    tensor: tf.Tensor, labels: Labels, sizes: Any, shape: Any
) -> Iterator[tuple[Labels, Any, Any]]:
    """The shapes that a tensor gets next, also when its first axes are summed.

    With each the labels and the sizes of the axes that are left.
    """
    yield labels, sizes, shape
    for op in tensor.consumers():
        after = static_dims(op.outputs[0]) if op.type in ("Reshape", "Sum") else None
        if after and op.type == "Reshape":
            yield from _followed(op.outputs[0], labels, sizes, after)
        elif after and shape == sizes and tuple(shape[-len(after) :]) == after:
            yield from _followed(op.outputs[0], labels[-len(after) :], after, after)


def _are_even(sizes: set[Any], count: int) -> bool:
    """Whether the devices' parts of a group of axes are those of its first axis."""
    return is_known(sizes) and all(size % count == 0 for size in sizes)


class Choice:
    """The label along which an operation is split; `None` if it can't be.

    Args:
        unit: gives the multiple of the rows that a dimension is, or `None`.
        weight: gives the size of a tensor.
    """

    def __init__(self, unit: Any, weight: Any):
        self._unit = unit
        self._weight = weight

    def __call__(self, values: Sequence[Value], signature: Signature, dims: Sequence[Dims]) -> Any:
        units: dict[Any, set[Any]] = collections.defaultdict(set)
        weights: dict[Any, float] = collections.defaultdict(float)
        is_split: set[Any] = set()  # a number that happens to be that of the rows is no reason
        for number, (value, labels) in enumerate(zip(values, signature.inputs)):
            if number in signature.shapes:
                continue
            for axis, (label, dim) in enumerate(zip(labels, value.dims or ())):
                if label is None:
                    continue
                units[label].add(dim)
                is_free = value.is_free and not value.is_state
                if axis == value.axis or (is_free and self._unit(dim) is not None):
                    weights[label] += 1 + self._weight(value.dims)
                if axis == value.axis:
                    is_split.add(label)
        for labels, shape in zip(signature.outputs, dims):
            for label, dim in zip(labels, shape):
                if label in units and not signature.regroups:
                    units[label].add(dim)
                elif label in units and self._unit(dim) is None:
                    units[label].add(None)
        possible = [
            label
            for label in weights
            if len(units[label]) == 1
            and self._unit(next(iter(units[label]))) is not None
            and (signature.partial or all(label in labels for labels in signature.outputs))
        ]
        is_kept = {one: all(one in labels for labels in signature.outputs) for one in possible}
        if not possible and signature.shapes and not any(value.is_spread for value in values):
            return self._new_rows(signature, dims, units)
        ranks = {one: (one in is_split, is_kept[one], weights[one]) for one in possible}
        return max(possible, key=lambda one: ranks[one], default=None)

    def _new_rows(self, signature: Signature, dims: Sequence[Dims], known: Any) -> Any:
        """The label of a new axis of rows, along which each device repeats what all have."""
        for label, dim in zip(signature.outputs[0], dims[0]):
            if label is not None and label not in known and self._unit(dim) is not None:
                return label
        return None
