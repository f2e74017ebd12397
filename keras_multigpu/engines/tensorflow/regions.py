"""A step whose parts XLA compiles, each for its device.

The step is traced as a whole, with its gradients, and written again: what a part computes between
two crossings is one compiled function.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.local import Local
from keras_multigpu.engines.tensorflow.partition.operations import operation
from keras_multigpu.engines.tensorflow.partition.order import needed
from keras_multigpu.engines.tensorflow.partition.rules.control import graph_of
from keras_multigpu.engines.tensorflow.partition.step import packed
from keras_multigpu.engines.tensorflow.partition.traced import Traced
from keras_multigpu.engines.tensorflow.places import LOOPS, Places
from keras_multigpu.engines.values import Tensor

_FEW = 3  # operations that are not worth a function
_NO_PART = -1


def compiled(
    step: Callable[..., Any], args: tuple[Any, ...], places: Places, autograph: bool = False
) -> Any:
    """The result of `step(*args)`, with its parts compiled. Called while a graph is built.

    `autograph`: whether to convert Python's control flow, as `tf.function` does.
    """
    with places.chosen():
        traced = Traced(step, args, None, autograph=autograph, compiled=True)
    graph = traced.graph
    known = dict(zip(map(id, graph.inputs), traced.given()))
    users: dict[int, set[int]] = collections.defaultdict(set)  # of a tensor: the regions' numbers
    regions = _regions(graph, places)
    for number, (_, operations) in enumerate(regions):
        for op in operations:
            for tensor in _taken(op):
                users[id(tensor)].add(number)
    for tensor in graph.outputs:
        users[id(tensor)].add(len(regions))
    for number, (part, operations) in enumerate(regions):
        if part != _NO_PART and len(operations) > _FEW:
            made = {id(one): one for op in operations for one in op.outputs}
            outputs = [one for key, one in made.items() if users[key] - {number}]
            with tf.device(places.devices[part]):
                known.update(_call(operations, outputs, known))
        else:
            _write(operations, known)
    return packed(traced.structure, [known[id(one)] for one in graph.outputs], None)


def _regions(graph: Any, places: Places) -> list[tuple[int, list[tf.Operation]]]:
    """The operations of a part, or of none, between two crossings; in an order to write them."""
    found: dict[tuple[int, int], list[tf.Operation]] = collections.defaultdict(list)
    keys: dict[int, tuple[int, int]] = {}
    for op in needed(graph, graph.outputs, slice(None)):
        number = places.part_alone(op) if _may_compile(op) else None
        part = _NO_PART if number is None else number
        before = [*(tensor.op for tensor in op.inputs), *op.control_inputs]
        known = [keys[id(one)] for one in before if id(one) in keys]
        level = max([level + (other != part) for level, other in known], default=0)
        keys[id(op)] = level, part
        found[level, part].append(op)
    return [(part, found[level, part]) for level, part in sorted(found)]


def _may_compile(op: tf.Operation) -> bool:
    """Whether XLA can take it: not lists that a loop keeps for its gradient, and not texts."""
    return not {one.dtype for one in (*op.inputs, *op.outputs)} & {tf.variant, tf.string}


def _taken(op: tf.Operation) -> list[Tensor]:
    """What an operation takes; of a variable that a loop has passed on, the variable itself.

    XLA takes no variable twice.
    """
    return [_before_loops(one) for one in op.inputs]


def _before_loops(tensor: Tensor) -> Tensor:
    while tensor.dtype == tf.resource and tensor.op.type in LOOPS:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _call(
    operations: Sequence[tf.Operation], outputs: Sequence[Tensor], known: dict[int, Any]
) -> dict[int, Any]:
    """Calls operations as one compiled function, which captures what it takes."""

    def region() -> list[Any]:
        inside = dict(known)
        with tf.device(None):
            _write(operations, inside, are_placed=False)
        return [inside[id(one)] for one in outputs]

    made = tf.function(region, autograph=False, jit_compile=True)()
    return dict(zip(map(id, outputs), made))


def _branch(op: tf.Operation, given: Sequence[Tensor]) -> list[Any]:
    """A branch, what is in it written anew: traced for XLA, it would be of one device."""

    def written(attribute: str) -> Callable[[], list[Any]]:
        def body() -> list[Any]:
            graph = graph_of(op, attribute)
            known = dict(zip(map(id, graph.inputs), given[1:]))
            _write(needed(graph, graph.outputs, slice(None)), known)
            return [known[id(one)] for one in graph.outputs]

        return body

    return list(tf.cond(given[0], written("then_branch"), written("else_branch")))


def _write(
    operations: Sequence[tf.Operation], known: dict[int, Any], *, are_placed: bool = True
) -> None:
    """Writes operations into the graph that is being built."""
    local = Local(0, 0, 0, 0, is_compiled=are_placed)
    for op in operations:
        given = [known[id(one)] for one in _taken(op)]
        with tf.device((op.device or None) if are_placed else None):
            if are_placed and op.type in ("If", "StatelessIf"):
                made = _branch(op, given)
            else:
                made = operation(op)(local, *given)
        known.update(zip(map(id, op.outputs), made))
