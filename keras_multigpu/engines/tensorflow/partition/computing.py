"""Computes traced operations: on one device, or on each, in its slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.at_home import is_plain
from keras_multigpu.engines.tensorflow.partition.chosen import Chosen, known_rows
from keras_multigpu.engines.tensorflow.partition.crossings import of_process_0
from keras_multigpu.engines.tensorflow.partition.forms import (
    ALL_DEVICES,
    EACH_DEVICE,
    Forms,
    NeedsOthers,
)
from keras_multigpu.engines.tensorflow.partition.layouts import (
    COPIED,
    WHOLE,
    Joined,
    Layout,
    Owned,
    Sharded,
    Split,
    Value,
)
from keras_multigpu.engines.tensorflow.partition.operations import (
    Guard,
    Shaped,
    guard_of,
    operation,
)
from keras_multigpu.engines.tensorflow.partition.order import has_effect, is_from_outside
from keras_multigpu.engines.tensorflow.partition.program import EACH, Item
from keras_multigpu.engines.tensorflow.partition.signatures import Signature, static_dims
from keras_multigpu.engines.tensorflow.partition.sizes import Dim, Unit, is_known

Kind: TypeAlias = type[Split] | type[Sharded] | type[Owned] | Joined
"""A kind of slices; a `Joined` stands for those of its rows, along any axis."""

_CHEAP = frozenset(
    {"Cast", "Fill", "Range", "RealDiv", "Mul", "AddV2", "Sub", "Maximum", "Minimum"}
)


def layout_of(kind: Kind, axis: int, dim: Any) -> Layout:
    """A kind of slices of an axis of so many entries."""
    if not isinstance(kind, Joined):
        return kind(axis)
    found = kind.along(axis, dim)
    assert found is not None
    return found


class Operations(Forms):
    """Adds traced operations to a program, on one device or on each.

    Attributes:
        chosen: names what a step chooses of the rows; `None` where that is not spread.
    """

    first_level = 0  # of a function's operations that are planned as part of the step

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.chosen: Chosen | None = Chosen(self.names)
        # Of traced operations, for those that must come after: within a region, and beside one.
        self.levels: dict[Any, tuple[int, int]] = {}

    def whole(
        self, op: tf.Operation, values: Sequence[Value], signature: Signature | None = None
    ) -> list[Item]:
        """Computes an operation on one device, on whole values."""
        if self.way == EACH_DEVICE and op.op_def.is_stateful:
            raise NeedsOthers
        shapes = self._shapes(values, signature, None)
        inputs = [None if i in shapes else self.get(v, WHOLE) for i, v in enumerate(values)]
        made = self._operation(op, inputs, shapes, signature, 0, values)
        if not (self.is_joined and is_from_outside(op)):
            return made
        if self.way != ALL_DEVICES:
            raise NeedsOthers
        return of_process_0(self.program, made, op.outputs)

    def each(
        self,
        op: tf.Operation,
        values: Sequence[Value],
        signature: Signature,
        label: Any,
        kind: Kind = Split,
    ) -> list[Item]:
        """Computes an operation on every device: of a kind of slices along a label, or of all."""
        shapes = self._shapes(values, signature, label, kind)
        inputs: list[Item | None] = []
        unit: Unit | None = None
        for number, (value, labels) in enumerate(zip(values, signature.inputs)):
            layout: Layout = COPIED
            if label is not None and label in labels:
                axis = list(labels).index(label)
                dim = (value.dims or ())[axis]
                layout, unit = layout_of(kind, axis, dim), self.unit_of(dim)
            inputs.append(None if number in shapes else self.get(value, layout))
        guard = guard_of(signature, label, unit) if kind not in (Sharded, Owned) else None
        return self._operation(op, inputs, shapes, signature, EACH, values, guard)

    def _shapes(
        self, values: Sequence[Value], signature: Signature | None, label: Any, kind: Any = Split
    ) -> dict[int, Shaped]:
        """The inputs that are not taken from the trace: shapes, and constants."""
        if signature is None:
            return {}
        found: dict[int, Shaped] = {}
        for number, output in signature.shapes.items():
            assert signature.dims is not None
            labels = list(signature.outputs[output])
            is_split = label is not None and label in labels
            dims, axis = signature.dims[output], labels.index(label) if is_split else 0
            layout = layout_of(kind, axis, dims[axis]) if is_split else None
            found[number] = Shaped(dims, values[number].dtype, layout)
        for number, numbers in signature.constants.items():
            found[number] = Shaped(numbers, values[number].dtype)
        return found

    def _operation(
        self,
        op: tf.Operation,
        inputs: Sequence[Item | None],
        shapes: Mapping[int, Shaped],
        signature: Signature | None,
        place: int,
        values: Sequence[Value],
        guard: Guard | None = None,
    ) -> list[Item]:
        emit = operation(op, shapes, signature, guard)
        symbols = set().union(*(one.symbols for one in shapes.values()))
        symbols |= guard.symbols if guard is not None else set()
        return self.add(
            emit,
            [one for one in inputs if one is not None],
            place,
            [output.dtype for output in op.outputs],
            name=op.name,
            symbols=symbols,
            after=0 if place == EACH else self.after(op, place),
            is_cheap=all(value.is_free for value in values) and op.type in _CHEAP,
            is_plain=is_plain(op),
            has_effect=has_effect(op),
        )

    def after(self, op: tf.Operation, place: int) -> int:
        """The level that an operation must not be before: what it waits for has effects.

        Within a region operations keep their order; others wait until the region is done.
        """
        levels = [self.levels.get(id(one), (0, 0))[place != EACH] for one in op.control_inputs]
        return max([self.first_level, *levels])

    def fallback(
        self,
        op: tf.Operation,
        values: Sequence[Value],
        dims: Sequence[Any] | None = None,
        signature: Signature | None = None,
    ) -> tuple[list[Value], str]:
        """Computes an operation whole; what has a row for each of the batch's is split again."""
        shaped = signature.shapes if signature is not None else ()
        given = [value for number, value in enumerate(values) if number not in shaped]
        is_gathered = any(value.rows_axis is not None for value in given)
        items = self.whole(op, values, signature)
        made = []
        for number, (tensor, item) in enumerate(zip(op.outputs, items)):
            known = static_dims(tensor) if dims is None else dims[number]
            known, axis = self._with_rows(op, values, number, item, known)
            value = self.value(tensor.dtype, known, WHOLE, item)
            # Of a known number of rows there may be as many channels: those of a weight, say.
            have_rows = [
                (isinstance(dim, Dim) or (is_gathered and place == axis))
                and self.unit_of(dim) is not None
                for place, dim in enumerate(value.dims or ())
            ]
            if any(have_rows):
                value.layout = Split(have_rows.index(True))  # what follows is spread again
            made.append(value)
        return made, "gathered" if is_gathered else "whole"

    def _with_rows(
        self, op: tf.Operation, values: Sequence[Value], output: int, item: Item, dims: Any
    ) -> tuple[Any, int]:
        """Dimensions, with symbols for how many of the rows are chosen; the axis of known rows."""
        if self.chosen is None or dims is None:
            return dims, 0
        found = list(dims)
        are_rows = any(self.has_rows(v.dims) and not is_known(v.dims or ()) for v in values)
        for axis, dim in enumerate(dims):
            name = self.chosen.symbol(op, values, output, axis) if dim is None else None
            if name is not None and (are_rows or any(v.axis is not None for v in values)):
                self.program.symbols.setdefault(name, (item, axis))
                found[axis] = Dim.symbol(name)
        is_all = None not in found and is_known(found)
        known = known_rows(op, values, found) if is_all else None
        if known is not None:
            self.rows.add(found[known])
        return tuple(found), known or 0
