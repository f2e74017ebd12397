"""A call of a model outside a partitioned step: forward now, backward if a tape asks for it.

Both come from one trace, so that the gradient is that of what was computed, with the same random
numbers. What the backward pass needs stays on the devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.arguments import rows_of
from keras_multigpu.engines.tensorflow.partition.emission import Writer
from keras_multigpu.engines.tensorflow.partition.layouts import WHOLE
from keras_multigpu.engines.tensorflow.partition.local import Devices
from keras_multigpu.engines.tensorflow.partition.planner import Planner, Record
from keras_multigpu.engines.tensorflow.partition.program import Item
from keras_multigpu.engines.tensorflow.partition.rules import RULES
from keras_multigpu.engines.tensorflow.partition.traced import Traced, one_device

_BEYOND = (
    "This derivative of a call of a parallel model is known only inside a step that runs on all "
    "devices. Put all its tapes, or accumulators, into one: `step = parallel.function(step)`, or "
    "`train_step`."
)


class ConnectedError(ValueError):
    """Outputs of which one is computed from another: a tape may ask for that gradient."""


def call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    devices: Sequence[str],
    *,
    order: int = 1,
    home: str | None = None,
    wire_dtype: str | None = None,
    splits_rows: bool = True,
    records: list[Record] | None = None,
) -> Any:
    """The tensors of `function(*args)`, a tuple, with gradients, computed by several devices.

    The tuple's first entry is what a tape may be asked for gradients by. Called while a graph is
    built. `order`: the highest derivative that active tapes may take, at most 2; the graph's caller
    may take the first anyway.

    Raises:
        ConnectedError: if a gradient of one output by another can't be given.
    """
    leaves = tf.nest.flatten(args)
    rows = rows_of(leaves) if splits_rows else "unknown"
    have_rows = None if splits_rows else [False] * len(leaves)
    if rows in (None, 0, 1):
        with one_device():
            return function(*args)
    passes = _Passes(order)
    traced = Traced(lambda *inside: passes.record(function, inside), args, rows, have_rows)
    kept = [one for one, _ in traced.graph.captures if one.dtype.is_floating]
    if kept:  # they may have gradients, too
        passes = _Passes(order, kept)
        traced = Traced(lambda *inside: passes.record(function, inside), args, rows, have_rows)
    records = [] if records is None else records
    known, plan = set[int](), _Plan(traced, passes, devices, records)
    while plan.rows != known:  # all is divided by the same numbers
        known = plan.rows
        plan = _Plan(traced, passes, devices, records, known)
    inputs = [one.tensor for one in traced.arguments if one.tensor.dtype.is_floating]
    inputs += kept
    weights = [one.read_value() for one in plan.variables]
    outputs: list[Any] = []
    scope = Devices(devices, traced.count(), home=home, wire_dtype=wire_dtype, chosen=plan.rows)

    @tf.custom_gradient
    def forward(*floats: Any) -> Any:
        given = traced.given(dict(zip(map(id, inputs), floats)))
        writer = Writer(plan.program, scope, [*given, *floats[len(inputs) :]])
        outputs[:] = writer.write(*plan.outputs)

        def gradient(*upstream: Any) -> Any:
            return _gradient(plan, writer, 0, [*floats, *upstream])

        return [one for one in outputs if one.dtype.is_floating], gradient

    made = iter(forward(*inputs, *weights))
    flat = [next(made) if one.dtype.is_floating else one for one in outputs]
    return tf.nest.pack_sequence_as(passes.structure, flat, expand_composites=True)


def _gradient(plan: _Plan, before: Writer, number: int, values: Sequence[Any]) -> list[Any]:
    """A pass backwards, by what the pass before computed, with a gradient of its own.

    `values` are what that pass depended on, and the gradients of what it gave.
    """
    if number == len(plan.backward):
        raise NotImplementedError(_BEYOND)
    one = plan.backward[number]

    @tf.custom_gradient
    def computed(*values: Any) -> Any:
        writer = before.fork()
        for item, tensor in zip(one.upstream, values[len(values) - len(one.upstream) :]):
            writer.give(item, tensor)
        made[:] = writer.write(one.gradients, one.until)

        def gradient(*upstream: Any) -> Any:
            return _gradient(plan, writer, number + 1, [*values, *upstream])

        return [one for one in made if one.dtype.is_floating], gradient

    made: list[Any] = []
    rest = iter(computed(*values) if one.gradients else ())
    found = iter([next(rest) if tensor.dtype.is_floating else tensor for tensor in made])
    places = tf.nest.flatten(one.structure, expand_composites=True)
    flat = [None if place is None else next(found) for place in places]
    return tf.nest.pack_sequence_as(one.structure, flat, expand_composites=True)


@dataclasses.dataclass
class _Backward:
    """The program of a pass backwards.

    Attributes:
        upstream: the items of the gradients that it takes.
        gradients: the items of those that it gives.
        structure: for each value that the pass before depended on its gradient, as it was traced:
            a tensor, rows of a table, or `None`.
        until: the number of the program's nodes up to its last.
    """

    upstream: list[Item]
    gradients: list[Item]
    structure: list[Any]
    until: int


class _Plan:
    """The program of a call and of its gradients.

    Attributes:
        rows: how many rows of the batch are chosen, where that is known.
        variables: those that may get gradients.
        outputs: the items of the call's outputs, and the number of nodes that compute them.
        backward: the passes that follow.
    """

    def __init__(
        self,
        traced: Traced,
        passes: _Passes,
        devices: Sequence[str],
        records: list[Record],
        rows: Collection[int] = (),
    ):
        records.clear()
        planner = Planner(RULES, len(devices), traced.batch, records)
        planner.rows.update(rows)
        self.program, self.rows = planner.program, planner.rows
        self.variables = [one for one in passes.sources if isinstance(one, tf.Variable)]
        known = traced.inputs(planner, devices)
        for variable in self.variables:
            # Read outside, where the tape sees it; the trace reads it where nothing has changed it.
            handle, dtype = known[id(traced.inside(variable.handle))], variable.dtype
            item = planner.new_input(dtype)
            if handle.is_sharded:
                continue  # the tape sees its link
            value = planner.value(dtype, tuple(variable.shape.as_list()), WHOLE, item)
            value.is_trained = True
            planner.cache["read", id(handle), 0, dtype] = value
        stops = [begin for *_, begin in passes.backward] + [None]
        results = planner.run_graph(traced.graph, known, passes.outputs, slice(stops[0]))
        made = [planner.get(value, WHOLE) for value in results]
        self.outputs = made, len(planner.program.nodes)
        self.backward = []
        for (tensors, slopes, begin), stop in zip(passes.backward, stops[1:]):
            floats = [value for value in results if value.dtype.is_floating]
            upstream = [planner.new_input(value.dtype) for value in floats]
            for tensor, item, like in zip(tensors, upstream, floats):
                known[id(tensor)] = planner.value(like.dtype, like.dims, WHOLE, item)
                known[id(tensor)].layout = like.layout if like.axis is not None else WHOLE
            wanted = _tensors(slopes)
            results = planner.run_graph(traced.graph, known, wanted, slice(begin, stop))
            gradients = [planner.get(value, WHOLE) for value in results]
            until = len(planner.program.nodes)
            self.backward.append(_Backward(upstream, gradients, slopes, until))
            made = [*made, *gradients]
        planner.program.outputs = made


class _Passes:
    """Traces a call and, after it, its gradients.

    Args:
        order: the highest derivative.
        kept: tensors from outside that the call uses, beside its arguments.

    Attributes:
        structure: the call's result.
        outputs: its tensors.
        sources: the arguments and variables that may get gradients.
        backward: of each pass backwards the gradients that it takes and gives (`None` where nothing
            depends on a value), and the number of its first operation.
    """

    def __init__(self, order: int, kept: Sequence[Any] = ()):
        self._order, self._kept = order, kept

    def record(self, function: Callable[..., Any], args: Any) -> list[Any]:
        """Calls the function, and traces its gradients by inputs and variables."""
        inputs = [
            one
            for one in tf.nest.flatten(args, expand_composites=True)
            if tf.is_tensor(one) and one.dtype.is_floating
        ]
        inputs += [tf.compat.v1.get_default_graph().capture(one) for one in self._kept]
        self.backward: list[tuple[list[Any], list[Any], int]] = []
        tapes = [tf.GradientTape(persistent=not n) for n in range(max(1, self._order))]
        with contextlib.ExitStack() as outer:
            for tape in tapes[1:]:
                outer.enter_context(tape)
                tape.watch(inputs)
            with tapes[0] as tape:
                tape.watch(inputs)
                self.structure = function(*args)
                self.outputs = [
                    tf.identity(one)
                    for one in tf.nest.flatten(self.structure, expand_composites=True)
                ]
            if self._order:
                _check_connected(tape, self.structure[0])
            self.sources = [*inputs, *tape.watched_variables()]
            made, sources = self._back(tape, self.outputs, self.sources, tapes[1:])
        for tape in tapes[1:]:
            made, sources = self._back(tape, made, sources, ())
        return self.outputs

    def _back(self, tape: Any, results: Any, sources: Any, watching: Any) -> tuple[Any, Any]:
        """Traces one pass; returns its gradients, and what they depend on."""
        begin = len(tf.compat.v1.get_default_graph().get_operations())
        results = [one for one in _tensors(results) if one.dtype.is_floating]
        upstream = [tf.compat.v1.placeholder(one.dtype, one.shape) for one in results]
        for one in watching:
            one.watch(upstream)
        gradients = tape.gradient(results, sources, upstream)
        self.backward.append((upstream, gradients, begin))
        return gradients, [*sources, *upstream]


def _tensors(structure: Any) -> list[Any]:
    """Its tensors, without `None`; of rows of a table, their places too."""
    flat = tf.nest.flatten(structure, expand_composites=True)
    return [one for one in flat if one is not None]


def _check_connected(tape: Any, structure: Any) -> None:
    """Refuses outputs of which one has a gradient by another."""
    outputs = tf.nest.flatten(structure, expand_composites=True)
    found = {id(one): one for one in outputs if one.dtype.is_floating}
    for key, one in found.items():
        others = [other for number, other in found.items() if number != key]
        if others and any(slope is not None for slope in tape.gradient(one, others)):
            raise ConnectedError(
                "an output is computed from another one, and a tape may ask for the gradient of "
                "one by the other. Put the step into a function: `parallel.function(step)`"
            )
