"""Loops: one for each device, where nothing in it crosses."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.forms import ALL_DEVICES, ONE_DEVICE, NeedsOthers
from keras_multigpu.engines.tensorflow.partition.inner import Inner
from keras_multigpu.engines.tensorflow.partition.layouts import WHOLE, Value
from keras_multigpu.engines.tensorflow.partition.planner import Planner
from keras_multigpu.engines.tensorflow.partition.rules.control import (
    carried,
    changed,
    first_possible,
    graph_of,
    origin,
    sums,
    ways,
    while_loop,
)
from keras_multigpu.engines.tensorflow.partition.rules.definitions import graph_by_definition
from keras_multigpu.engines.tensorflow.partition.rules.row_loops import over_rows
from keras_multigpu.engines.tensorflow.partition.rules.table import rule
from keras_multigpu.engines.tensorflow.partition.sizes import elements_of
from keras_multigpu.engines.tensorflow.partition.states import State, joined, state_of


@rule("While", "StatelessWhile", needs_ranks=False)
def loop(planner: Planner, op: tf.Operation, values: list[Value]) -> Any:
    """What the body passes through unchanged is taken from outside; the rest has states."""
    body, test = (graph_of(op, one) or graph_by_definition(op, one) for one in ("body", "cond"))
    if body is None or test is None:
        return None
    values = sums(planner, values)

    def plan(way: str) -> list[Value]:
        states: Any = None
        after = [
            None if origin(made) is given else state_of(planner, value)
            for value, given, made in zip(values, body.inputs, body.outputs)
        ]
        while states != after:
            states = after
            inner, results = _once(planner, way, body, values, states)
            after = [s and joined(s, state_of(inner, r), planner) for s, r in zip(states, results)]
        if is_tried and way != ONE_DEVICE and all(one.how != "spread" for one in inner.records):
            raise NeedsOthers  # one device does as well
        inner.give(carried(results, states), [s.layout for s in carried(states, states)])
        check, (decision,) = _once(planner, way, test, values, states)
        check.give([decision], [WHOLE])
        rounds = _rounds(test, values)
        how = {"how": "gathered"} if way == ONE_DEVICE and _have_rows(planner, values) else {}
        inner.records = [
            dataclasses.replace(one, work=one.work * rounds, **how) for one in inner.records
        ]
        return _loop_node(op, values, states, inner, check)

    is_tried = planner.splits_all and not any(v.is_spread or v.is_sharded for v in values)
    with planner.waiting(op):  # what it reads is read before it
        made = None
        if planner.way == ALL_DEVICES and planner.has_row_loops:
            made = over_rows(planner, op, values, body, test)
        if made is None:
            values = planner.split_data(values) if is_tried else values  # `plan` takes these
            made = first_possible(planner, ways(planner, values), plan)
    changed(planner, values)
    return made


def _have_rows(planner: Planner, values: Sequence[Value]) -> bool:
    """Whether there are lists of all rows."""
    known = [value.elements for value in values if value.dtype == tf.variant]
    return any(one is not None and planner.unit_of(one.count) is not None for one in known)


def _rounds(test: Any, values: Sequence[Value]) -> int:
    """How often a loop runs, roughly, by the bounds in its test; 1 if they aren't known."""
    given = dict(zip(map(id, test.inputs), values))
    bounds = []
    for op in test.get_operations():
        if op.type == "Less" and op.inputs[1].dtype.is_integer:
            source = origin(op.inputs[1])
            value = given.get(id(source))
            bound = tf.get_static_value(source) if value is None else value.const
            if bound is not None and np.size(bound) == 1:
                bounds.append(int(elements_of(np.ravel(bound))))
    return max(1, min(bounds, default=1))


def _once(
    planner: Planner, way: str, graph: Any, values: list[Value], states: Sequence[State | None]
) -> tuple[Inner, list[Value]]:
    """Plans a loop's function for one iteration."""
    inner = Inner(planner, way)
    inside = [
        inner.take(value) if state is None else inner.carried(state, tensor)
        for value, state, tensor in zip(values, states, graph.inputs)
    ]
    # Read before the loop, and sent once: not in each iteration.
    inner.only_read.update(
        id(value) for value, tensor in zip(inside, graph.inputs) if _is_only_read(tensor)
    )
    return inner, inner.run(graph, inside)


def _is_only_read(tensor: tf.Tensor) -> bool:
    """Whether a loop's function reads a variable, and nothing else."""
    return all(one.type in ("ReadVariableOp", "VariableShape") for one in tensor.consumers())


def _loop_node(
    op: tf.Operation, values: list[Value], states: Sequence[Any], inner: Inner, check: Inner
) -> list[Value]:
    kept, tensors = carried(states, states), carried(op.outputs, states)
    layouts = [state.layout for state in kept]
    first = list(map(inner.outer_item, carried(values, states), layouts))
    taken, count = Inner.common([inner, check]), len(first)
    is_joined = inner.is_joined and inner.way == ALL_DEVICES

    def emit(scope: Any, *given: Any) -> list[Any]:
        if inner.way != ALL_DEVICES:
            # They cross before the loop: TensorFlow would send them in each iteration.
            given = tuple(one if one.dtype == tf.resource else tf.identity(one) for one in given)
        specs = inner.shapes(kept, tensors)

        def run(function: Inner, flat: Sequence[Any]) -> list[Any]:
            return function.write(scope, [*inner.unflat(flat, layouts), *given[count:]])

        # A collective operation meets those of loops of the same name. Layers' automatic names, in
        # the scope's, are a process's own.
        root = tf.compat.v1.get_default_graph().name_scope(None)
        with root if is_joined else contextlib.nullcontext():
            made = while_loop(
                op,
                lambda *flat: run(check, flat)[0],
                lambda *flat: tf.nest.flatten(run(inner, flat)),
                tf.nest.flatten(given[:count]),
                specs,
                "loop" if is_joined else op.name,
            )
        flat = [
            tf.ensure_shape(one, shape, name=f"{op.name}/result")
            if shape.is_fully_defined()
            else one
            for one, shape in zip(tf.nest.flatten(made), specs)
        ]
        return inner.unflat(flat, layouts)

    made = iter(inner.added(emit, first, layouts, kept, op, taken, tensors))
    return [value if state is None else next(made) for value, state in zip(values, states)]
