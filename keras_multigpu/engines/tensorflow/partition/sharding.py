"""Along which axis an operation is split of whose inputs devices have parts: weights, say."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import COPIED, SUM, Owned, Sharded, Value
from keras_multigpu.engines.tensorflow.partition.signatures import Labels, Signature, static_dims
from keras_multigpu.engines.tensorflow.partition.sizes import Dims, elements_of, is_known

Shard = Sharded | Owned


def sharded_label(
    values: Sequence[Value],
    signature: Signature,
    dims: Sequence[Dims | None],
    shard_of: Callable[[Value], Shard | None],
    count: int,
    homes: Set[Any],
) -> tuple[Any, type[Shard]] | None:
    """The label along which devices have their parts, and how; `None` if it can't be split so.

    The best are the `homes`: see `homes_of`.
    """
    given = {*range(len(values))} - {*signature.shapes, *signature.constants}
    if any(values[number].rows_axis is not None for number in given):
        return None  # rows are split
    shards = {number: shard_of(values[number]) for number in given}
    made = sum(map(elements_of, dims))
    if not any(shards[n] or values[n].layout == SUM for n in given):
        # Of whole inputs only what is larger than they are, such as a table's gradient.
        copies = {n: 1 if homes & {*signature.inputs[n]} else count for n in given}
        taken = sum(elements_of(values[n].dims) * copies[n] for n in given)
        homes = homes if taken < made else set()
    along = _Along()
    for number in given:
        along.take(values[number], signature.inputs[number], shards[number], homes)
    along.give(signature, dims)
    kept = {one for one in along.parts if all(one in labels for labels in signature.outputs)}
    possible = [
        one
        for one in along.parts
        if one is not None
        and along.is_even(one, count if signature.regroups else None)
        and (one in kept or signature.partial)
    ]
    if not possible:
        return None
    best = max(possible, key=lambda one: (one in kept, one in homes, along.parts[one]))
    if along.owned[best] == {True}:
        return best, Owned
    if best not in kept and best in along.whole and made >= along.parts[best]:
        return None  # less crosses if the parts are gathered than if addends are summed
    return best, Sharded


class _Along:
    """What there is along each label of an operation.

    Attributes:
        sizes: the axes' sizes.
        parts: the elements of inputs that devices have in parts, or should.
        owned: whether each axis is one of which a device owns some entries.
        whole: the labels of inputs that are no parts along them.
    """

    def __init__(self) -> None:
        self.sizes: dict[Any, set[Any]] = collections.defaultdict(set)
        self.parts: dict[Any, float] = collections.defaultdict(float)
        self.owned: dict[Any, set[bool]] = collections.defaultdict(set)
        self.whole: set[Any] = set()

    def take(self, value: Value, labels: Labels, shard: Shard | None, homes: Set[Any]) -> None:
        """Adds an input."""
        for axis, (label, dim) in enumerate(zip(labels, value.dims or ())):
            self.sizes[label].add(dim)
            is_part = shard is not None and axis == shard.axis
            self.owned[label].add(is_part and isinstance(shard, Owned))
            if is_part:
                self.parts[label] += elements_of(value.dims)
                continue
            self.whole.add(label)
            if shard is None and label in homes:
                self.parts[label] += 0  # each device gets its part, or sums it

    def give(self, signature: Signature, dims: Sequence[Dims | None]) -> None:
        """Adds the outputs."""
        for labels, shape in zip(signature.outputs, dims):
            for label, dim in zip(labels, shape or ()):
                self.sizes[label].add(dim)
        # Nobody knows how many entries a device owns: there may be none.
        shapes = [signature.outputs[number] for number in signature.shapes.values()]
        for label in [*signature.zero_if_empty, *(one for labels in shapes for one in labels)]:
            self.owned[label].add(False)

    def is_even(self, label: Any, count: int | None) -> bool:
        """Whether each device has the same part of all axes; of groups of axes, if count is given.

        Its part of a group is then its part of the first axis.
        """
        sizes = self.sizes[label]
        is_group = count and is_known(sizes) and all(size % count == 0 for size in sizes)
        is_alike = len(sizes) == 1 or is_group
        return bool(is_alike) and (is_known(sizes) or self.owned[label] == {True})


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
