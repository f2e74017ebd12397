"""Searches a tower's traced graph for custom gradients that lose a replica's weights.

An operation's name begins with its layer's, so messages can name the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.values import Tensor


def find_lost(forward: Any, weights: Iterable[Tensor]) -> str | None:
    """Why a replica's gradients by some weights would be lost, or `None`."""
    return next(_lost(forward, weights), None)


def depends_on(results: Iterable[Tensor], argument: Tensor) -> bool:
    """Whether tensors depend on an argument of their graph; a function's results on all of its."""
    return argument.op in ancestors(results)


def _lost(forward: Any, weights: Iterable[Tensor]) -> Iterator[str]:
    """Custom gradients that use weights which are not among their arguments."""
    reason = (
        "{} has a custom gradient (of `tf.custom_gradient`, say, or of a `keras.remat` outside of "
        "`call`) with weights that are not among its arguments"
    )
    makers = {one.op for one in weights if one.dtype.is_floating}
    graph = forward.graph.as_graph_def()
    returned = [one.name for one in forward.outputs]
    for name in _losing(graph.node, {maker.name for maker in makers}, returned):
        yield reason.format(layer_of(name))
    bodies = {body.signature.name: body for body in graph.library.function}
    for name, caller in _called_with(forward.graph, makers, bodies):
        body = bodies[name]
        floats = {one.name for one in body.signature.input_arg if tf.as_dtype(one.type).is_floating}
        if any(_losing(body.node_def, floats, body.ret.values())):
            yield reason.format(layer_of(caller))


def _losing(nodes: Any, arguments: set[str], returned: Iterable[str]) -> Iterator[str]:
    """The names of custom gradients in a graph, or a function's body, that lose arguments of it."""
    by_name = {node.name: node for node in nodes}
    used = {_end(one) for node in nodes for one in node.input} | set(map(_end, returned))
    for node in nodes:
        if node.op != "IdentityN" or "_gradient_op_type" not in node.attr:
            continue
        # The results come first; other operations use only these.
        ends = [_end(one) for one in node.input]
        waiting = [end for k, end in enumerate(ends) if (node.name, k) in used]
        reached = {end for k, end in enumerate(ends) if (node.name, k) not in used}
        while waiting:
            end = waiting.pop()
            if end in reached:
                continue
            reached.add(end)
            if end[0] in arguments:
                yield node.name
                break
            maker = by_name.get(end[0])
            if maker is not None and maker.op not in ("StopGradient", "PreventGradient"):
                waiting += map(_end, maker.input)


def _end(text: str) -> tuple[str, int]:
    """An operation and the number of its output, as graphs and functions write them."""
    maker, *rest = text.removeprefix("^").split(":")
    return maker, int(rest[-1]) if rest else 0


def _called_with(graph: Any, makers: set[Any], bodies: Any) -> Iterator[tuple[str, str]]:
    """The functions that are called with weights, and the names of the calling operations."""
    seen: set[str] = set()
    for operation in graph.get_operations():
        waiting = list(_functions_of(operation.node_def.attr))
        if not waiting or makers.isdisjoint(_behind_casts(one.op) for one in operation.inputs):
            continue
        while waiting:
            name = waiting.pop()
            if name in seen or name not in bodies:
                continue
            seen.add(name)
            yield name, operation.name
            waiting += [n for node in bodies[name].node_def for n in _functions_of(node.attr)]


def _functions_of(attributes: Any) -> list[str]:
    values = attributes.values()
    every = [one for value in values for one in (value.func, *value.list.func)]
    return [one.name for one in every if one.name]


def ancestors(tensors: Iterable[Tensor]) -> set[Any]:
    """The operations that tensors depend on."""
    reached, waiting = set(), [tensor.op for tensor in tensors]
    while waiting:
        operation = waiting.pop()
        if operation not in reached:
            reached.add(operation)
            waiting.extend(one.op for one in operation.inputs)
    return reached


def layer_of(name: str) -> str:
    """The layer of an operation, from the operation's name."""
    scope = name.rpartition("/")[0]
    return f"layer {scope!r}" if scope else "the model's `call`"


def _behind_casts(operation: Any) -> Any:
    while operation.type in ("Identity", "Cast"):
        operation = operation.inputs[0].op
    return operation
