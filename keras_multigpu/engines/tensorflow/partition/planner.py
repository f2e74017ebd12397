"""Decides how every operation of a traced step is computed, and writes the program for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.addends import addends
from keras_multigpu.engines.tensorflow.partition.constants import evaluate
from keras_multigpu.engines.tensorflow.partition.forms import (
    ALL_DEVICES,
    EACH_DEVICE,
    ONE_DEVICE,
    Forms,
    NeedsOthers,
)
from keras_multigpu.engines.tensorflow.partition.layouts import (
    COPIED,
    WHOLE,
    Copied,
    Layout,
    Partial,
    Split,
    Value,
    Whole,
)
from keras_multigpu.engines.tensorflow.partition.operations import (
    Shaped,
    elements_of,
    operation,
    own_shapes,
    work_of,
)
from keras_multigpu.engines.tensorflow.partition.order import needed
from keras_multigpu.engines.tensorflow.partition.program import EACH, Item
from keras_multigpu.engines.tensorflow.partition.signatures import (
    Choice,
    Signature,
    output_dims,
    static_dims,
)
from keras_multigpu.engines.tensorflow.partition.sizes import BATCH, symbols_of

_GRADIENTS = "gradient_tape/"  # the scope of what TensorFlow's tapes compute
_CHEAP = frozenset(
    {"Cast", "Fill", "Range", "RealDiv", "Mul", "AddV2", "Sub", "Maximum", "Minimum"}
)


@dataclasses.dataclass(frozen=True)
class Record:
    """How an operation of the traced step is computed, for reports.

    Attributes:
        type: its type.
        name: its name, which begins with its layers'.
        how: `"spread"`, `"whole"` (nothing of it has rows), `"gathered"` (on gathered rows), or
            `"lost"` (on as many rows as are known in the step only: what is chosen of the batch's).
        work: a rough number of floating-point operations, at a batch of 32.
    """

    type: str
    name: str
    how: str
    work: float


class Planner(Forms):
    """Plans a graph, and the functions that it calls.

    Args:
        rules: {type of operation: rule}.
        count, batch, way, names: as for `Forms`.
        records: where to note how operations are computed.
    """

    def __init__(
        self,
        rules: Mapping[str, Callable[..., Any]],
        count: int,
        batch: Any,
        records: list[Record],
        *,
        way: str = ALL_DEVICES,
        names: Iterator[int] | None = None,
    ):
        super().__init__(count, batch, way=way, names=names)
        self.rules, self.records = rules, records
        self.trained: set[int] = set()  # the `id`s of the values of trained variables' resources
        self.cache: dict[Any, Any] = {}
        self.versions: dict[int, int] = {}  # how often a resource was changed, by its value's id
        self._choose = Choice(self.unit_of, elements_of) if way != ONE_DEVICE else _no_choice
        self._levels: dict[Any, int] = {}  # of traced operations, for those that must come after
        self._first_level = 0  # of a function's operations that are planned as part of the step

    # Operations

    def whole(
        self, op: tf.Operation, values: Sequence[Value], signature: Signature | None = None
    ) -> list[Item]:
        """Computes an operation on one device, on whole values."""
        if self.way == EACH_DEVICE and op.op_def.is_stateful:
            raise NeedsOthers
        shapes = self._shapes(values, signature, None)
        inputs = [None if i in shapes else self.get(v, WHOLE) for i, v in enumerate(values)]
        return self._operation(op, inputs, shapes, signature, self._place(values), values)

    def each(
        self, op: tf.Operation, values: Sequence[Value], signature: Signature, label: Any
    ) -> list[Item]:
        """Computes an operation on every device: split along a label, or (`None`) all of it."""
        shapes = self._shapes(values, signature, label)
        inputs: list[Item | None] = []
        for number, (value, labels) in enumerate(zip(values, signature.inputs)):
            is_split = label is not None and label in labels
            layout = Split(list(labels).index(label)) if is_split else COPIED
            inputs.append(None if number in shapes else self.get(value, layout))
        own = own_shapes(op, signature, label)
        return self._operation(op, inputs, shapes, signature, EACH, values, own)

    def _shapes(
        self, values: Sequence[Value], signature: Signature | None, label: Any
    ) -> dict[int, Shaped]:
        """The inputs that are not taken from the trace: shapes, and constants."""
        if signature is None:
            return {}
        found: dict[int, Shaped] = {}
        for number, output in signature.shapes.items():
            assert signature.dims is not None
            labels = list(signature.outputs[output])
            axis = labels.index(label) if label is not None and label in labels else None
            found[number] = Shaped(signature.dims[output], values[number].dtype, axis)
        for number, numbers in signature.constants.items():
            found[number] = Shaped(numbers, values[number].dtype, None)
        return found

    def _operation(
        self,
        op: tf.Operation,
        inputs: Sequence[Item | None],
        shapes: Mapping[int, Shaped],
        signature: Signature | None,
        place: int,
        values: Sequence[Value],
        own: Sequence[Shaped] = (),
    ) -> list[Item]:
        emit = operation(op, shapes, signature, own)
        symbols = set().union(*(one.symbols for one in (*shapes.values(), *own)))
        return self.add(
            emit,
            [one for one in inputs if one is not None],
            place,
            [output.dtype for output in op.outputs],
            name=op.name,
            symbols=symbols,
            after=0 if place == EACH else self.after(op),
            is_cheap=all(value.is_free for value in values) and op.type in _CHEAP,
        )

    def after(self, op: tf.Operation) -> int:
        """The level that an operation must not be before: what it waits for has effects."""
        levels = [self._levels.get(id(one), 0) for one in op.control_inputs]
        return max([self._first_level, *levels])

    def _place(self, values: Sequence[Value]) -> int:
        """The device of what is computed whole: where its state is, or its inputs are."""
        items = [item for value in values for item in value.forms.values() if not item.is_each]
        resources = [item for item in items if item.dtype == tf.resource]
        return next((item.place for item in [*resources, *items] if item.place > 0), 0)

    def apply(
        self, op: tf.Operation, values: Sequence[Value], signature: Signature
    ) -> tuple[list[Value], str]:
        """Computes an operation as its signature allows; returns its values, and how."""
        dims = output_dims(op, values, signature)
        if all(v.is_free for v in values) and self._may_defer(op, dims):
            return [self._defer(op, values, signature, dims[0])], "whole"
        label = self._choose(values, signature, dims)
        if label is not None:
            return self._spread(op, values, signature, label, dims), "spread"
        return self.fallback(op, values, dims, signature)

    def _spread(
        self, op: tf.Operation, values: Any, signature: Signature, label: Any, dims: Any
    ) -> list[Value]:
        items = self.each(op, values, signature, label)
        made = []
        for item, labels, shape, tensor in zip(items, signature.outputs, dims, op.outputs):
            layout: Layout = Partial(signature.partial or "sum")
            if label in labels:
                layout = Split(list(labels).index(label))
            made.append(self.value(tensor.dtype, shape, layout, item))
            is_sum = isinstance(layout, Partial) and tensor.dtype.is_floating
            made[-1].is_trained = is_sum and _GRADIENTS in op.name
        return made

    def _may_defer(self, op: tf.Operation, dims: Sequence[Any]) -> bool:
        return (
            len(op.outputs) == 1
            and not op.op_def.is_stateful
            and dims[0] is not None
            and None not in dims[0]
        )

    def _defer(
        self, op: tf.Operation, values: Sequence[Value], signature: Signature, dims: Any
    ) -> Value:
        """A value that is computed where it is used, in the layout that is asked for."""

        def make(layout: Layout) -> Item | None:
            if isinstance(layout, Whole):
                return self.whole(op, values, signature)[0]
            if isinstance(layout, Copied):
                return self.each(op, values, signature, None)[0]
            if isinstance(layout, Partial):
                return None
            label = signature.outputs[0][layout.axis]
            wanted = [dims[layout.axis]] + [
                dim
                for number, (value, labels) in enumerate(zip(values, signature.inputs))
                if number not in signature.shapes
                for one, dim in zip(labels, value.dims or ())
                if one == label
            ]
            if label is None or any(self.unit_of(dim) is None for dim in wanted):
                return None
            if not signature.regroups and any(dim != wanted[0] for dim in wanted):
                return None
            return self.each(op, values, signature, label)[0]

        return Value(op.outputs[0].dtype, dims, WHOLE, {}, make)

    def fallback(
        self,
        op: tf.Operation,
        values: Sequence[Value],
        dims: Sequence[Any] | None = None,
        signature: Signature | None = None,
    ) -> tuple[list[Value], str]:
        """Computes an operation whole; what has a row for each of the batch's is split again."""
        shaped = signature.shapes if signature is not None else ()
        is_gathered = any(v.axis is not None for i, v in enumerate(values) if i not in shaped)
        items = self.whole(op, values, signature)
        made = []
        for number, (tensor, item) in enumerate(zip(op.outputs, items)):
            known = static_dims(tensor) if dims is None else dims[number]
            value = self.value(tensor.dtype, known, WHOLE, item)
            if is_gathered and value.dims and self.unit_of(value.dims[0]) is not None:
                value.layout = Split(0)  # what follows is spread again
            made.append(value)
        return made, "gathered" if is_gathered else "whole"

    # The graph

    def run_call(self, op: tf.Operation, graph: Any, values: Sequence[Value]) -> list[Value]:
        """Plans a function that an operation calls as if its operations stood there."""
        before, self._first_level = self._first_level, self.after(op)
        try:
            return self.run_graph(graph, dict(zip(map(id, graph.inputs), values)), graph.outputs)
        finally:
            self._first_level = before

    def run_graph(
        self,
        graph: Any,
        known: dict[int, Any],
        outputs: Sequence[tf.Tensor],
        part: slice = slice(None),
    ) -> list[Value]:
        """Plans what the outputs need, and what has effects among a part of the operations.

        `known` has the values of the graph's inputs, by the `id` of their tensors.
        """
        for op in needed(graph, outputs, part):
            if id(op) in known or (op.outputs and all(id(one) in known for one in op.outputs)):
                continue
            values = [known[id(tensor)] for tensor in op.inputs]
            before = len(self.program.nodes)
            made, how = self._one(op, values)
            assert len(made) == len(op.outputs), op.type
            if any(v.is_state for v in values) and all(map(_may_be_of_state, values)):
                for value in made:
                    value.is_state = not value.is_spread
            known.update((id(tensor), value) for tensor, value in zip(op.outputs, made))
            known[id(op)] = made  # done, if it has no outputs
            added = self.program.nodes[before:]
            waits = [one.level + (one.place == EACH) for one in added]
            self._levels[id(op)] = max([*waits, self.after(op)])
            if how == "whole" and any(_has_unknown_size(value) for value in values):
                how = "lost"
            if how:
                work = work_of(op, values, made)
                self.records.append(Record(op.type, op.name, how, work))
        return [known[id(tensor)] for tensor in outputs]

    def _one(self, op: tf.Operation, values: Sequence[Value]) -> tuple[list[Value], str]:
        constants = evaluate(op, values)
        if constants is not None:
            return [
                Value(output.dtype, one.shape, const=one)
                for output, one in zip(op.outputs, constants)
            ], ""
        sums = addends(self, op, values)
        if sums is not None:
            return sums, "spread"
        rule = self.rules.get(op.type)
        made = rule(self, op, values) if rule is not None else None
        if isinstance(made, Signature):
            return self.apply(op, values, made)
        if isinstance(made, tuple):
            return made
        return (made, "") if made is not None else self.fallback(op, values)


def _may_be_of_state(value: Value) -> bool:
    """Whether what is made of it and of variables is of variables alone."""
    return value.is_state or not value.dims or value.const is not None


def _has_unknown_size(value: Value) -> bool:
    """Whether as many rows as are known in the step only are there, and on one device."""
    is_data = value.dtype not in (tf.resource, tf.variant) and not value.is_free
    return is_data and not value.is_spread and bool(symbols_of(value.dims or ()) - {BATCH})


def _no_choice(values: Any, signature: Any, dims: Any) -> None:
    """One device splits nothing."""
