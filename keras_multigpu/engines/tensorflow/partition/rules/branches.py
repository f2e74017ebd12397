"""Calls and branches: what they compute is planned as the rest of the step is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.constants import numbers_of
from keras_multigpu.engines.tensorflow.partition.forms import (
    ALL_DEVICES,
    EACH_DEVICE,
    ONE_DEVICE,
    NeedsOthers,
)
from keras_multigpu.engines.tensorflow.partition.inner import Inner
from keras_multigpu.engines.tensorflow.partition.layouts import Layout, Partial, Value, Whole
from keras_multigpu.engines.tensorflow.partition.operations import is_compiled_call
from keras_multigpu.engines.tensorflow.partition.planner import Planner, total_work
from keras_multigpu.engines.tensorflow.partition.program import EACH, Item
from keras_multigpu.engines.tensorflow.partition.rules.control import (
    changed,
    first_possible,
    graph_named,
    graph_of,
    sums,
    ways,
)
from keras_multigpu.engines.tensorflow.partition.rules.table import rule
from keras_multigpu.engines.tensorflow.partition.rules.tables import FUNCTIONS
from keras_multigpu.engines.tensorflow.partition.sizes import BATCH, symbols_of
from keras_multigpu.engines.tensorflow.partition.states import State, joined, state_of


@rule("PartitionedCall", "StatefulPartitionedCall", needs_ranks=False)
def call(planner: Planner, op: tf.Operation, values: list[Value]) -> Any:
    """As if its operations stood here; what XLA compiles stays a compiled function."""
    graph = graph_of(op, "f")
    if graph is None:
        return None
    found = FUNCTIONS.get((graph.name, len(op.outputs)), lambda *_: None)(planner, op, values)
    if found is not None:
        return found, "spread"
    if not is_compiled_call(op) or planner.way == EACH_DEVICE:
        return planner.run_call(op, graph, values)
    values = sums(planner, values)

    def plan(way: str) -> list[Value]:
        if way == ALL_DEVICES:
            raise NeedsOthers
        inner = Inner(planner, way)
        results = inner.run(graph, [inner.take(value) for value in values])
        layouts = [inner.kept(value) for value in results]
        inner.give(results, layouts)

        def emit(scope: Any, *tensors: Any) -> list[Any]:
            def function(*given: Any) -> list[Any]:
                return inner.write(scope.inner(compiled=True), given)

            return list(tf.function(function, autograph=False, jit_compile=True)(*tensors))

        return inner.added(emit, [], layouts, results, op)

    with planner.waiting(op):
        made = first_possible(planner, ways(planner, values), plan)
    changed(planner, values)
    return made


@rule("If", "StatelessIf", "Case", "StatelessCase", needs_ranks=False)
def branch(planner: Planner, op: tf.Operation, values: list[Value]) -> Any:
    """One of several functions; the one that is taken, if that is known."""
    if op.type.endswith("If"):
        graphs = [graph_of(op, "else_branch"), graph_of(op, "then_branch")]
    else:
        graphs = [graph_named(op, one.name) for one in op.get_attr("branches")]
    if None in graphs:
        return None
    chosen = numbers_of(values[0].const)
    keeps = any(one.op.type == "FakeParam" for graph in graphs for one in graph.outputs)
    if chosen and not keeps and not any(v.dtype == tf.variant for v in (*op.inputs, *op.outputs)):
        at = chosen[0] if 0 <= chosen[0] < len(graphs) else -1
        return planner.run_call(op, graphs[at], values[1:])
    values = [*sums(planner, values)]
    usual = ways(planner, values[1:])
    # What a branch draws may meet weights.
    others = [ALL_DEVICES] if planner.splits_all and usual == (ONE_DEVICE,) else []

    def plan(way: str) -> list[Value]:
        return _plan(planner, op, graphs, values, way, is_usual=way in usual)

    with planner.waiting(op):  # what the branches read is read before them
        made = first_possible(planner, (*others, *usual), plan)
    changed(planner, values)
    return made


def _plan(
    planner: Planner,
    op: tf.Operation,
    graphs: Any,
    values: list[Value],
    way: str,
    *,
    is_usual: bool,
) -> list[Value]:
    """Plans all branches, which agree on the layouts of their results."""
    inners = [Inner(planner, way, branch=number) for number, _ in enumerate(graphs)]
    results = []
    for inner, graph in zip(inners, graphs):
        results.append(inner.run(graph, [inner.take(value) for value in values[1:]]))
    if not is_usual and all(one.how != "spread" for inner in inners for one in inner.records):
        raise NeedsOthers  # one device does as well
    inners[0].records = max((one.records for one in inners), key=total_work)
    _make_unused(inners, graphs, results)
    known = [
        [_of_branch(state_of(inner, value), inner, graph, at) for at, value in enumerate(found)]
        for inner, graph, found in zip(inners, graphs, results)
    ]
    states = known[0]
    for others in known[1:]:
        states = [joined(a, b, planner, gathers=True) for a, b in zip(states, others)]
    for inner, found in zip(inners, results):
        inner.give(found, [state.layout for state in states])
    return _branch_node(op, inners, states, values[0])


def _branch_node(
    op: tf.Operation, inners: Sequence[Inner], states: Sequence[State], which: Value
) -> list[Value]:
    taken, first = Inner.common(inners), inners[0]
    layouts = [state.layout for state in states]

    def emit(scope: Any, chosen: Any, *tensors: Any) -> list[Any]:
        def run(inner: Inner) -> Callable[[], list[Any]]:
            return lambda: [*inner.write(scope, tensors), tf.constant(0)]

        if op.type.endswith("If"):
            chosen = tf.cast(chosen, tf.int32)
        made = tf.switch_case(chosen, [run(inner) for inner in inners])
        return first.unflat(tf.nest.flatten(made)[:-1], layouts)

    return first.added(emit, [first.outer_item(which)], layouts, states, op, taken)


def _of_branch(state: State, inner: Inner, graph: Any, at: int) -> State:
    """A result's state; what is kept for the gradient, only that of this branch takes."""
    given = len(tf.nest.flatten(graph.structured_outputs, expand_composites=True))
    if state.elements is None or not state.elements.kept or at < given:
        return state
    kept = tuple((inner.branch, one) for _, one in state.elements.kept)
    return dataclasses.replace(state, elements=dataclasses.replace(state.elements, kept=kept))


def _make_unused(
    inners: Sequence[Inner], graphs: Sequence[Any], results: Sequence[list[Value]]
) -> None:
    """Zeros for what a branch doesn't make, of the dimensions of what another makes.

    The gradient of another takes it. For XLA, TensorFlow gives a tensor without rows.
    """
    for number, tensors in enumerate(zip(*(graph.outputs for graph in graphs))):
        are_made = [tensor.op.type != "FakeParam" for tensor in tensors]
        made = results[are_made.index(True)][number] if any(are_made) else None
        dims = None if made is None else made.dims
        if dims is None or None in dims or symbols_of(dims) - {BATCH}:
            continue
        for inner, found, is_made, tensor in zip(inners, results, are_made, tensors):
            if not is_made:
                found[number] = _zeros(inner, tensor.dtype, dims)


def _zeros(planner: Planner, dtype: tf.DType, dims: Sequence[Any]) -> Value:
    """Zeros, made where they are used."""

    def write(layout: Layout, local: Any) -> list[Any]:
        return [tf.zeros(local.shape(dims, tf.int32, layout), dtype)]

    def make(layout: Layout) -> Item | None:
        if isinstance(layout, Partial):
            return None
        place = 0 if isinstance(layout, Whole) else EACH
        return planner.add(functools.partial(write, layout), [], place, [dtype], name="zeros")[0]

    return Value(dtype, tuple(dims), make=make)
