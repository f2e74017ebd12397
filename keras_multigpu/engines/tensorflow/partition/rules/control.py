"""Calls, branches and loops: what they compute is planned as the rest of the step is.

What nothing of which crosses, each device runs for its rows: one loop for each device. What
crosses, all devices run together. What has no rows, one device runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.forms import (
    ALL_DEVICES,
    EACH_DEVICE,
    ONE_DEVICE,
    NeedsOthers,
)
from keras_multigpu.engines.tensorflow.partition.inner import Inner
from keras_multigpu.engines.tensorflow.partition.layouts import WHOLE, Layout, Partial, Value, Whole
from keras_multigpu.engines.tensorflow.partition.planner import Planner
from keras_multigpu.engines.tensorflow.partition.program import EACH, Item
from keras_multigpu.engines.tensorflow.partition.rules.table import Table
from keras_multigpu.engines.tensorflow.partition.rules.tables import FUNCTIONS
from keras_multigpu.engines.tensorflow.partition.sizes import BATCH, is_known, symbols_of
from keras_multigpu.engines.tensorflow.partition.states import State, joined, state_of

RULES = Table()


def graph_named(op: tf.Operation, name: str) -> Any:
    """The graph of a function that an operation's graph knows by name.

    `None` for those of `tf.compat.v1`'s kind, as in `tf.nn.ctc_loss`: they are called whole.
    """
    return getattr(op.graph._get_function(name), "graph", None)


def graph_of(op: tf.Operation, attribute: str) -> Any:
    """The graph of the function that an attribute names."""
    return graph_named(op, op.get_attr(attribute).name)


def ways(planner: Planner, values: Sequence[Value]) -> tuple[str, ...]:
    """How it may run, the best first."""
    if planner.way != ALL_DEVICES:
        return (planner.way,)

    def may_have_rows(value: Value) -> bool:
        return value.is_free and not value.is_state and planner.has_rows(value.dims)

    if any(value.is_spread or may_have_rows(value) for value in values):
        return EACH_DEVICE, ALL_DEVICES, ONE_DEVICE
    if any(value.is_sharded for value in values):
        return ALL_DEVICES, ONE_DEVICE
    # What one device gets from outside, joined processes agree on.
    return (ONE_DEVICE, ALL_DEVICES) if planner.is_joined else (ONE_DEVICE,)


def first_possible(
    planner: Planner, values: Sequence[Value], plan: Callable[[str], list[Value]]
) -> list[Value]:
    """The plan of the first way that is possible."""
    *others, last = ways(planner, values)
    for way in others:
        try:
            return plan(way)
        except NeedsOthers:
            continue
    return plan(last)


def _sums(planner: Planner, values: Sequence[Value]) -> list[Value]:
    """The values, without addends."""
    found = []
    for value in values:
        if isinstance(value.layout, Partial):
            layout = planner.shard_of(value) or WHOLE
            value = planner.value(value.dtype, value.dims, layout, planner.get(value, layout))
        found.append(value)
    return found


def _changed(planner: Planner, values: Sequence[Value]) -> None:
    """Resources may be changed: whoever reads them afterwards reads again."""
    for value in values:
        if value.dtype == tf.resource:
            planner.versions[id(value)] = planner.versions.get(id(value), 0) + 1


@RULES.rule("PartitionedCall", "StatefulPartitionedCall", needs_ranks=False)
def call(planner: Planner, op: tf.Operation, values: list[Value]) -> Any:
    """As if its operations stood here; what XLA compiles stays a compiled function."""
    graph = graph_of(op, "f")
    if graph is None:
        return None
    found = FUNCTIONS.get(graph.name, lambda *_: None)(planner, op, values)
    if found is not None and len(found) == len(op.outputs):  # not of a tape's variant of it
        return found, "spread"
    marks = op.node_def.attr
    is_compiled = "_XlaMustCompile" in marks and marks["_XlaMustCompile"].b
    if not is_compiled or planner.way == EACH_DEVICE:
        return planner.run_call(op, graph, values)
    values = _sums(planner, values)

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

    made = first_possible(planner, values, plan)
    _changed(planner, values)
    return made


@RULES.rule("If", "StatelessIf", "Case", "StatelessCase", needs_ranks=False)
def branch(planner: Planner, op: tf.Operation, values: list[Value]) -> Any:
    """The branches agree on the layouts of their results."""
    if op.type.endswith("If"):
        graphs = [graph_of(op, "else_branch"), graph_of(op, "then_branch")]
    else:
        graphs = [graph_named(op, one.name) for one in op.get_attr("branches")]
    if None in graphs:
        return None
    values = [*_sums(planner, values)]

    def plan(way: str) -> list[Value]:
        inners = [Inner(planner, way, is_branch=True) for _ in graphs]
        results = []
        for inner, graph in zip(inners, graphs):
            results.append(inner.run(graph, [inner.take(value) for value in values[1:]]))
        _make_unused(inners, graphs, results)
        states = [state_of(inners[0], value) for value in results[0]]
        for inner, found in zip(inners[1:], results[1:]):
            states = [joined(a, state_of(inner, b), planner) for a, b in zip(states, found)]
        for inner, found in zip(inners, results):
            inner.give(found, [state.layout for state in states])
        taken = Inner.common(inners)

        def emit(scope: Any, chosen: Any, *tensors: Any) -> list[Any]:
            def run(inner: Inner) -> Callable[[], list[Any]]:
                return lambda: [*inner.write(scope, tensors), tf.constant(0)]

            if op.type.endswith("If"):
                chosen = tf.cast(chosen, tf.int32)
            made = tf.switch_case(chosen, [run(inner) for inner in inners])
            return inners[0].unflat(tf.nest.flatten(made)[:-1], [s.layout for s in states])

        first = inners[0]
        chosen = first.outer_item(values[0])
        return first.added(emit, [chosen], [s.layout for s in states], states, op, taken)

    made = first_possible(planner, values[1:], plan)
    _changed(planner, values)
    return made


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


@RULES.rule("While", "StatelessWhile", needs_ranks=False)
def loop(planner: Planner, op: tf.Operation, values: list[Value]) -> Any:
    """What the body passes through unchanged is taken from outside; the rest has states."""
    body, test = graph_of(op, "body"), graph_of(op, "cond")
    if body is None or test is None:
        return None
    is_carried = [_origin(a) is not b for a, b in zip(body.outputs, body.inputs)]
    values = _sums(planner, values)

    def plan(way: str) -> list[Value]:
        states = [
            state_of(planner, value) if carried else None
            for value, carried in zip(values, is_carried)
        ]
        while True:
            inner, results = _once(planner, way, body, values, states)
            after = [
                None if state is None else joined(state, state_of(inner, result), planner)
                for state, result in zip(states, results)
            ]
            if after == states:
                break
            states = after
        inner.give(
            [r for r, s in zip(results, states) if s is not None],
            [s.layout for s in states if s is not None],
        )
        check, (decision,) = _once(planner, way, test, values, states)
        check.give([decision], [WHOLE])
        rounds = _rounds(test, values)
        inner.records = [dataclasses.replace(one, work=one.work * rounds) for one in inner.records]
        return _loop_node(planner, op, way, values, states, inner, check)

    made = first_possible(planner, values, plan)
    _changed(planner, values)
    return made


def _rounds(test: Any, values: Sequence[Value]) -> int:
    """How often a loop runs, by the bounds in its test; 1 if they aren't known."""
    given = dict(zip(map(id, test.inputs), values))
    bounds = []
    for op in test.get_operations():
        if op.type == "Less" and op.inputs[1].dtype.is_integer:
            source = _origin(op.inputs[1])
            value = given.get(id(source))
            bound = tf.get_static_value(source) if value is None else value.const
            if bound is not None and np.size(bound) == 1 and is_known([np.ravel(bound)[0]]):
                bounds.append(int(np.ravel(bound)[0]))
    return max(1, min(bounds, default=1))


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that identities pass on."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _once(
    planner: Planner, way: str, graph: Any, values: list[Value], states: Sequence[State | None]
) -> tuple[Inner, list[Value]]:
    """Plans a loop's function for one iteration."""
    inner = Inner(planner, way)
    inside = [
        inner.take(value) if state is None else inner.carried(state, tensor)
        for value, state, tensor in zip(values, states, graph.inputs)
    ]
    return inner, inner.run(graph, inside)


def _named_by_order() -> contextlib.AbstractContextManager[Any]:
    """Scope in which names tell nothing of layers, whose automatic names are a process's own.

    A collective operation meets those of loops of the same name.
    """
    root: contextlib.AbstractContextManager[Any] = tf.compat.v1.get_default_graph().name_scope(None)
    return root


def _loop_node(
    planner: Planner,
    op: tf.Operation,
    way: str,
    values: list[Value],
    states: Sequence[State | None],
    inner: Inner,
    check: Inner,
) -> list[Value]:
    carried = [state for state in states if state is not None]
    layouts = [state.layout for state in carried]
    first = [inner.outer_item(v, s.layout) for v, s in zip(values, states) if s is not None]
    tensors = [tensor for tensor, s in zip(op.outputs, states) if s is not None]
    taken = Inner.common([inner, check])
    count = len(first)

    def emit(scope: Any, *given: Any) -> list[Any]:
        if way != ALL_DEVICES:
            # They cross before the loop: TensorFlow would send them in each iteration.
            given = tuple(one if one.dtype == tf.resource else tf.identity(one) for one in given)
        variables = inner.flat(given[:count], layouts)
        specs = inner.shapes(carried, tensors, scope)

        def parts(flat: Sequence[Any]) -> list[Any]:
            return [*inner.unflat(flat, layouts), *given[count:]]

        def body(*flat: Any) -> list[Any]:
            made = inner.flat(inner.write(scope, parts(flat)), layouts)
            for tensor, shape in zip(made, specs):
                tensor.set_shape(shape)
            return made

        is_joined = planner.is_joined and way == ALL_DEVICES
        with _named_by_order() if is_joined else contextlib.nullcontext():
            made = tf.while_loop(
                lambda *flat: check.write(scope, parts(flat))[0],
                body,
                variables,
                shape_invariants=specs,
                parallel_iterations=op.get_attr("parallel_iterations"),
                name="loop" if is_joined else op.name,
            )
        flat = [
            tf.ensure_shape(one, shape, name=f"{op.name}/result")
            if shape.is_fully_defined()
            else one
            for one, shape in zip(tf.nest.flatten(made), specs)
        ]
        return inner.unflat(flat, layouts)

    results = inner.added(emit, first, layouts, carried, op, taken, tensors)
    rest = iter(results)
    return [value if state is None else next(rest) for value, state in zip(values, states)]
