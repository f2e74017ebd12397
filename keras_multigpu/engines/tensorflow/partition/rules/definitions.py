"""Graphs of the loops that `tf.compat.v1` makes, as in `tf.nn.ctc_loss`: by their definitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf


class _NotWritten(Exception):  # noqa: N818 - caught where it is asked
    """A definition has what is not written again."""


def graph_by_definition(op: tf.Operation, attribute: str) -> Any:
    """The graph of a loop's function, with its `inputs` and `outputs`; `None` if it has others."""
    function = op.graph._get_function(op.get_attr(attribute).name)
    definition = getattr(function, "definition", None)
    if definition is None:
        return None
    graph: Any = tf.Graph()
    with graph.as_default():
        # TensorFlow takes it that the variables of such a loop keep their shapes.
        graph.inputs = [tf.compat.v1.placeholder(one.dtype, one.shape) for one in op.outputs]
        try:
            graph.outputs = _written(op.graph, definition, graph.inputs)
        except _NotWritten:
            return None
    return graph


def _written(source: Any, definition: Any, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Writes a function, and those that it calls, into the default graph; returns its results."""
    signature = definition.signature
    known = dict(zip((one.name for one in signature.input_arg), inputs))
    for node in definition.node_def:
        if any(one.HasField("func") or one.list.func for one in node.attr.values()):
            raise _NotWritten
        if not set(node.input) <= set(known):  # one waits for another, say
            raise _NotWritten
        made = _called(source, node, [known[name] for name in node.input])
        known.update((f"{node.name}:{name}", tensor) for name, tensor in made)
    return [known[definition.ret[one.name]] for one in signature.output_arg]


def _called(source: Any, node: Any, inputs: Sequence[tf.Tensor]) -> Iterator[tuple[str, tf.Tensor]]:
    """The results of a node of a definition, by what definitions call them."""
    function = source._get_function(node.op)
    if function is not None:
        results = _written(source, function.definition, inputs)
        names = [one.name for one in function.definition.signature.output_arg]
        yield from zip((f"{name}:0" for name in names), results)
        return
    attributes = {name: one for name, one in node.attr.items() if not name.startswith("_")}
    graph = tf.compat.v1.get_default_graph()
    op = graph.create_op(node.op, list(inputs), attrs=attributes, name=node.name)
    rest = iter(op.outputs)
    for one in op.op_def.output_arg:
        count = op.get_attr(one.number_attr) if one.number_attr else 1
        count = len(op.get_attr(one.type_list_attr)) if one.type_list_attr else count
        yield from ((f"{one.name}:{number}", next(rest)) for number in range(count))
