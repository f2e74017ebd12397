"""The operations of a graph that a step needs, in an order in which inputs come first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def needed(graph: Any, outputs: Sequence[tf.Tensor], part: slice) -> list[tf.Operation]:
    """The operations that outputs need, and effects of a part of all; inputs first."""
    operations = graph.get_operations()
    inputs = {id(tensor) for tensor in graph.inputs}
    roots = [tensor.op for tensor in outputs if id(tensor) not in inputs]
    roots += [op for op in operations[part] if has_effect(op)]
    order: list[tf.Operation] = []
    place = {id(op): number for number, op in enumerate(operations)}
    done: set[int] = set()
    for root in sorted(roots, key=lambda op: place[id(op)]):
        stack = [(root, False)]
        while stack:
            op, is_ready = stack.pop()
            if is_ready:
                order.append(op)
            elif id(op) not in done:
                done.add(id(op))
                stack.append((op, True))
                # TensorFlow gives what it waits for in any order, in each process another.
                waits = sorted(op.control_inputs, key=lambda one: place[id(one)])
                before = [*(tensor.op for tensor in op.inputs), *waits]
                stack += [(one, False) for one in reversed(before) if id(one) not in done]
    return [op for op in order if op.type != "Placeholder"]


CHECKS = ("CheckNumerics", "CheckNumericsV2")
"""They fail, or pass on what they get, which often nobody takes."""
_FROM_OUTSIDE = frozenset(
    "EagerPyFunc IteratorGetNext IteratorGetNextSync PyFunc PyFuncStateless Timestamp".split()
)
_SEEDS = frozenset({"seed", "seed2"})
_WITHOUT_EFFECT = frozenset({"Placeholder", "ReadVariableOp", "VarIsInitializedOp"})


def has_effect(op: tf.Operation) -> bool:
    """Whether an operation is computed even if nobody takes its outputs."""
    if op.type in CHECKS:
        return True
    return op.op_def.is_stateful and op.type not in _WITHOUT_EFFECT


def is_from_outside(op: tf.Operation) -> bool:
    """Whether an operation's results don't follow from what the step has: also without a seed."""
    if {*op.node_def.attr} >= _SEEDS:
        return not any(op.get_attr(name) for name in _SEEDS)
    return op.type in _FROM_OUTSIDE
