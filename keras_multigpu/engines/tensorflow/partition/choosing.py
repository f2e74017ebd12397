"""How single operations are computed: along which axis the devices split them, or by one."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.computing import Kind, Operations, layout_of
from keras_multigpu.engines.tensorflow.partition.forms import ALL_DEVICES
from keras_multigpu.engines.tensorflow.partition.layouts import (
    SUM,
    WHOLE,
    Copied,
    Joined,
    Layout,
    Owned,
    Partial,
    Sharded,
    Split,
    Value,
    Whole,
)
from keras_multigpu.engines.tensorflow.partition.program import Item
from keras_multigpu.engines.tensorflow.partition.sharding import (
    homes_of,
    meet_as_much,
    sharded_label,
)
from keras_multigpu.engines.tensorflow.partition.signatures import (
    Signature,
    are_of_same_rows,
    output_dims,
    split_label,
)
from keras_multigpu.engines.tensorflow.partition.sizes import BATCH, Dim, elements_of, symbols_of

_GRADIENTS = "gradient_tape/"  # the scope of what TensorFlow's tapes compute


class Choosing(Operations):
    """Computes each traced operation in the layout that suits it.

    Attributes:
        shards: the axis along which variables of a shape are sharded.
        splits_all: whether all that meets weights is split, as the batch's rows are.
    """

    splits_all = False

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.shards: dict[Any, int] = {}

    def apply(
        self, op: tf.Operation, values: Sequence[Value], signature: Signature
    ) -> tuple[list[Value], str]:
        """Computes an operation as its signature allows; returns its values, and how."""
        dims = output_dims(op, values, signature)
        is_one = len(op.outputs) == 1 and not op.op_def.is_stateful
        if (
            is_one
            and all(v.is_free for v in values)
            and dims[0] is not None
            and None not in dims[0]
        ):
            return [self._defer(op, values, signature, dims[0])], "whole"
        if self.is_joined and any(one.dtype == tf.string for one in (*values, *op.outputs)):
            return self.fallback(op, values, dims, signature)  # it can't cross
        joined = self._of_joined(values, signature, dims) if self.splits else None
        if joined is not None:
            return self._spread(op, values, signature, joined[0], dims, joined[1]), "spread"
        label = split_label(values, signature, dims, self.unit_of) if self.splits else None
        if label is None and self.splits:
            label = self._of_sums(values, signature, dims)
        if label is None and self.splits_all:
            label = self._of_data(values, signature, dims)
        if label is not None:
            return self._spread(op, values, signature, label, dims), "spread"
        if self.shards and self.way == ALL_DEVICES:
            # A gradient of weights is made of activations. What meets weights may have their shape.
            meets_weights = any(value.is_state and value.dims for value in values)
            homes = set() if meets_weights else homes_of(op, signature, dims, self.shards)
            found = sharded_label(values, signature, dims, self.shard_of, self.shares, homes)
            is_forward = not homes and _GRADIENTS not in op.name
            if is_forward and found and meet_as_much(values, signature, found[0]):
                return self.fallback(op, values, dims, signature)
            if found is not None:
                made = self._spread(op, values, signature, found[0], dims, found[1])
                for value in made:
                    value.is_update = bool(homes)
                return made, "spread"
        return self.fallback(op, values, dims, signature)

    def _of_joined(
        self, values: Sequence[Value], signature: Signature, dims: Any
    ) -> tuple[Any, Joined] | None:
        """The label along which the devices' slices of joined tensors are taken as they are."""
        parts = [
            dataclasses.replace(value, layout=Split(value.layout.axis))
            if isinstance(value.layout, Joined)
            else value
            for value in values
        ]
        joined = [(v, v.layout, n) for n, v in enumerate(values) if isinstance(v.layout, Joined)]
        label = split_label(parts, signature, dims, self.unit_of) if joined else None
        shapes = [*((value.dims or ()) for value in values), *dims]
        for _, layout, number in sorted(joined, key=lambda one: -elements_of(one[0].dims)):
            along = [
                dim
                for labels, shape in zip((*signature.inputs, *signature.outputs), shapes)
                for one, dim in zip(labels, shape)
                if one == label
            ]
            is_own = label is not None and signature.inputs[number][layout.axis] == label
            if is_own and all(layout.along(0, dim) is not None for dim in along):
                return label, layout
        return None

    def _of_sums(self, values: Sequence[Value], signature: Signature, dims: Any) -> Any:
        """The label along which addends with rows are split, each device's summed in its slice."""
        sums = [
            value
            for value in values
            if value.layout == SUM and value.dims and isinstance(value.dims[0], Dim)
            if self.unit_of(value.dims[0]) is not None
        ]
        parts = {id(value): dataclasses.replace(value, layout=Split(0)) for value in sums}
        split = [parts.get(id(one), one) for one in values]
        label = split_label(split, signature, dims, self.unit_of)
        if label is not None:
            for value in sums:
                self.get(value, Split(0))
                value.layout = Split(0)
        return label

    def _of_data(self, values: Sequence[Value], signature: Signature, dims: Any) -> Any:
        """The label of the first axis of what meets weights: rows, of whatever number.

        A generator's noise, say, has as many as a constant of the user's says.
        """
        own = zip(values, signature.inputs)
        of_weights = [labels for value, labels in own if value.is_state and value.rank > 1]
        for value, labels in zip(values, signature.inputs) if of_weights else ():
            label = labels[0] if labels else None
            is_other = value.is_state or value.is_update or value.is_spread or value.is_sharded
            if is_other or not value.dtype.is_floating or any(label in one for one in of_weights):
                continue
            if label is None or not value.dims or not self._are_rows(value.dims[0]):
                continue
            before = set(self.rows)
            self.rows.add(value.dims[0])
            parts = [dataclasses.replace(v, layout=Split(0)) if v is value else v for v in values]
            if split_label(parts, signature, dims, self.unit_of) == label:
                if not value.is_free:
                    self.get(value, Split(0))
                    value.layout = Split(0)
                return label
            self.rows.intersection_update(before)
        return None

    def split_data(self, values: Sequence[Value]) -> list[Value]:
        """The values of a loop with weights, split along the first axis of most of its numbers."""
        sizes: dict[Any, float] = collections.defaultdict(float)
        may_be_split = []
        for value in values:
            dims = value.dims if value.elements is None else value.elements.tensor_dims
            is_float = value.dtype.is_floating or value.dtype == tf.variant
            is_other = value.is_state or value.is_update or not is_float or len(dims or ()) < 2
            may_be_split.append(None if is_other or dims is None else dims[0])
            if not is_other:
                sizes[may_be_split[-1]] += elements_of(dims)
        rows = max(sizes, key=lambda one: sizes[one], default=None)
        has_weights = any(v.dtype == tf.resource or (v.is_state and v.rank > 1) for v in values)
        if rows is None or not has_weights or not self._are_rows(rows):
            return [*values]
        self.rows.add(rows)
        for value, length in zip(values, may_be_split):
            if length == rows:
                self.get(value, Split(0))
        return [
            dataclasses.replace(value, layout=Split(0)) if length == rows else value
            for value, length in zip(values, may_be_split)
        ]

    def _are_rows(self, dim: Any) -> bool:
        """Whether so many are worth to be split; XLA compiles anew for each of other numbers."""
        symbols = symbols_of([dim])
        is_fixed = self.chosen is not None and self.chosen.are_fixed
        return symbols <= {BATCH} or not is_fixed if symbols else dim >= self.count

    def shard_of(self, value: Value) -> Sharded | Owned | None:
        """The parts that devices have of a value, or should: of gradients of weights."""
        if isinstance(value.layout, (Sharded, Owned)):
            return value.layout
        is_gradient = value.layout == SUM and value.is_trained and value.dims in self.shards
        return Sharded(self.shards[value.dims]) if is_gradient else None

    def _spread(
        self,
        op: tf.Operation,
        values: Any,
        signature: Signature,
        label: Any,
        dims: Any,
        kind: Kind = Split,
    ) -> list[Value]:
        items = self.each(op, values, signature, label, kind)
        made = []
        for item, labels, shape, tensor in zip(items, signature.outputs, dims, op.outputs):
            layout: Layout = Partial(signature.partial or "sum")
            if label in labels:
                axis = list(labels).index(label)
                layout = layout_of(kind, axis, shape[axis])
            made.append(self.value(tensor.dtype, shape, layout, item))
            is_sum = isinstance(layout, Partial) and tensor.dtype.is_floating
            made[-1].is_trained = is_sum and _GRADIENTS in op.name
        return made

    def _defer(
        self, op: tf.Operation, values: Sequence[Value], signature: Signature, dims: Any
    ) -> Value:
        """A value that is computed where it is used, in the layout that is asked for."""

        def make(layout: Layout) -> Item | None:
            if isinstance(layout, Whole):
                return self.whole(op, values, signature)[0]
            if isinstance(layout, Copied):
                return self.each(op, values, signature, None)[0]
            if not isinstance(layout, (Split, Joined)):
                return None
            label = signature.outputs[0][layout.axis]
            wanted = [dims[layout.axis]] + [
                dim
                for number, (value, labels) in enumerate(zip(values, signature.inputs))
                if number not in signature.shapes
                for one, dim in zip(labels, value.dims or ())
                if one == label
            ]
            if label is None or not are_of_same_rows(wanted, self.unit_of):
                return None
            if not signature.regroups and any(dim != wanted[0] for dim in wanted):
                return None
            if isinstance(layout, Split):
                return self.each(op, values, signature, label)[0]
            are_possible = all(layout.along(0, dim) is not None for dim in wanted)
            return self.each(op, values, signature, label, layout)[0] if are_possible else None

        return Value(op.outputs[0].dtype, dims, WHOLE, {}, make)
