"""What one device computes between crossings: under XLA, compiled functions.

Otherwise the update of the weights would be a kernel for each of its thousands of operations, where
a step of one device that XLA compiles has a few.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.local import Local
from keras_multigpu.engines.tensorflow.partition.program import Item, Node, Program

_FEW = 16  # nodes that run as fast one by one

# Arithmetic on tensors of known shapes: what updates and statistics are made of. Variables stay
# outside, since XLA takes those of its own device only.
_PLAIN = frozenset(
    {"Abs", "Add", "AddN", "AddV2", "Cast", "Const", "DivNoNan", "Equal", "Exp", "Expm1", "Greater"}
    | {"GreaterEqual", "IsFinite", "Less", "LessEqual", "Log", "Log1p", "LogicalAnd", "LogicalNot"}
    | {"LogicalOr", "MatMul", "Max", "Maximum", "Mean", "Min", "Minimum", "Mul", "Neg", "NotEqual"}
    | {"OnesLike", "Pow", "RealDiv", "Reciprocal", "Rsqrt", "SelectV2", "Sigmoid", "Sign", "Sqrt"}
    | {"Square", "SquaredDifference", "Sub", "Sum", "Tanh", "Transpose", "Xdivy", "ZerosLike"}
)


def is_plain(op: tf.Operation) -> bool:
    """Whether XLA may compile an operation with others around it."""
    tensors = (*op.inputs, *op.outputs)
    are_known = all(one.shape.is_fully_defined() for one in tensors)
    others = {tf.string, tf.resource, tf.variant}
    return op.type in _PLAIN and are_known and not others & {one.dtype for one in tensors}


def blocks(nodes: Sequence[Node]) -> list[tuple[bool, list[Node]]]:
    """Nodes that one device computes, and crossings of a level, in an order to write them.

    `True` with those that XLA is to compile together, on one device, `False` with others. What uses
    the same variable keeps its order.
    """
    found: dict[tuple[int, int, bool], list[Node]] = collections.defaultdict(list)
    keys: dict[int, tuple[int, int, bool]] = {}  # by the `id` of a node, or of a variable's item
    for node in nodes:
        if _is_constant(node):
            found[-1, 0, False].append(node)
            continue
        variables = [id(_variable(one)) for one in node.inputs if one.dtype == tf.resource]
        known = [keys.get(one) for one in (*(id(one.node) for one in node.needs), *variables)]
        kind = node.column if node.is_plain else 0, node.is_plain
        numbers = [one[0] + (one[1:] != kind) for one in known if one is not None]
        key = (max(numbers, default=0), *kind)
        found[key].append(node)
        keys.update(dict.fromkeys((id(node), *variables), key))
    return [(key[-1] and len(found[key]) > _FEW, found[key]) for key in sorted(found)]


def _is_constant(node: Node) -> bool:
    return node.is_plain and not node.inputs


def _variable(item: Item) -> Item:
    """The variable that a handle is of."""
    while item.node is not None and item.node.inputs and item.node.inputs[0].dtype == tf.resource:
        item = item.node.inputs[0]
    return item


def write_compiled(
    nodes: Sequence[Node], local: Local, known: dict[int, Any], program: Program
) -> None:
    """Writes plain nodes of a program as one compiled function."""
    inside = set(map(id, nodes))
    wanted = set(map(id, program.outputs))
    for node in program.nodes:
        if id(node) not in inside:
            wanted.update(map(id, node.needs))
    outputs = [one for node in nodes for one in node.outputs if id(one) in wanted]
    taken = [one.node for node in nodes for one in node.inputs if one.node is not None]
    constants = {id(one): one for one in taken if _is_constant(one)}  # XLA wants to know them

    def block() -> list[Any]:
        values, own = dict(known), local.inner(compiled=True)
        with tf.device(None):
            for node in (*constants.values(), *nodes):
                made = node.emit(own, *[values[id(one)] for one in node.inputs])
                values.update(zip(map(id, node.outputs), made))
        return [values[id(one)] for one in outputs]

    with tf.device(local.home):
        made = tf.function(block, autograph=False, jit_compile=True)()
    known.update(zip(map(id, outputs), made))
