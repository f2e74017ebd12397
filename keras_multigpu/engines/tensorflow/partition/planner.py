"""Plans a traced step: decides how every operation is computed, and writes the program for it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.shared import unchanged
from keras_multigpu.engines.tensorflow.partition.addends import addends
from keras_multigpu.engines.tensorflow.partition.choosing import Choosing
from keras_multigpu.engines.tensorflow.partition.constants import evaluate
from keras_multigpu.engines.tensorflow.partition.layouts import SUM, Value
from keras_multigpu.engines.tensorflow.partition.operations import work_of
from keras_multigpu.engines.tensorflow.partition.order import needed
from keras_multigpu.engines.tensorflow.partition.program import EACH
from keras_multigpu.engines.tensorflow.partition.signatures import Signature


@dataclasses.dataclass(frozen=True)
class Record:
    """How an operation of the traced step is computed, for reports.

    Attributes:
        type: its type.
        name: its name, which begins with its layers'; if `how` is `"apart"`, the variable's.
        how: `"spread"`, `"whole"` (nothing of it has rows), `"gathered"` (on gathered rows),
            `"lost"` (on as many rows as are known in the step only: what is chosen of the batch's),
            or `"apart"` (it changes a whole variable of the shape of one in parts).
        work: a rough number of floating-point operations, at a batch of 32.
        stack: where it was made.
    """

    type: str
    name: str
    how: str
    work: float
    stack: Any = dataclasses.field(default=None, repr=False, compare=False)


def total_work(records: Sequence[Record]) -> float:
    """The work of operations, together."""
    return sum(record.work for record in records)


class Planner(Choosing):
    """Plans a graph, and the functions that it calls.

    Args:
        rules: {type of operation: rule}.
        count, batch, options: as for `Forms`.
        records: where to note how operations are computed.

    Attributes:
        latest: the operation that is planned, or was last.
        has_row_loops: whether a loop over the rows is one for each device, over its own.
    """

    has_row_loops = True
    latest: tf.Operation | None = None

    def __init__(
        self,
        rules: Mapping[str, Callable[..., Any]],
        count: int,
        batch: Any,
        records: list[Record],
        **options: Any,
    ):
        super().__init__(count, batch, **options)
        self.rules, self.records = rules, records
        self.trained: set[int] = set()  # the `id`s of the values of trained variables' resources
        self.cache: dict[Any, Any] = {}
        self.versions: dict[int, int] = {}  # how often a resource was changed, by its value's id
        self.columns: Mapping[str, int] = {}  # of a mesh, by a device's name

    def run_call(self, op: tf.Operation, graph: Any, values: Sequence[Value]) -> list[Value]:
        """Plans a function that an operation calls as if its operations stood there."""
        # For a tape, functions get more results, behind those that an operation may have before.
        outputs = graph.outputs[: len(op.outputs)]
        with self.waiting(op):
            return self.run_graph(graph, dict(zip(map(id, graph.inputs), values)), outputs)

    def waiting(self, op: tf.Operation) -> contextlib.AbstractContextManager[None]:
        """Scope in which all waits for what an operation waits for: assignments before it."""
        return unchanged(self, "first_level", self.after(op, 0))

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
        column = self.program.column
        for op in needed(graph, outputs, part):
            if id(op) in known or (op.outputs and all(id(one) in known for one in op.outputs)):
                continue
            values = [known[id(tensor)] for tensor in op.inputs]
            self.latest = op
            before = len(self.program.nodes)
            self.program.column = self.columns.get(op.device, column)
            made, how = self._one(op, values)
            assert len(made) == len(op.outputs), op.type
            if any(v.is_state for v in values) and all(map(_may_be_of_state, values)):
                for value in made:
                    value.is_state = not (value.is_spread or value.is_drawn)
            if any(v.is_update or (v.is_trained and v.layout == SUM) for v in values):
                for value in made:
                    value.is_update = True
            if self.chosen is not None:
                self.chosen.note(op, values, made)
            known.update((id(tensor), value) for tensor, value in zip(op.outputs, made))
            known[id(op)] = made  # done, if it has no outputs
            added = self.program.nodes[before:]
            self.levels[id(op)] = (
                max([self.after(op, EACH), *(one.level for one in added)]),
                max([self.after(op, 0), *(one.level + (one.place == EACH) for one in added)]),
            )
            if how == "whole" and any(value.is_data for value in values):
                how = "lost"
            if how:
                work = work_of(op, values, made, self.batch)
                stack = op.traceback and op.traceback.get_user_frames()
                name = op.name if how != "apart" else values[0].variable or op.name
                self.records.append(Record(op.type, name, how, work, stack))
        self.program.column = column
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
