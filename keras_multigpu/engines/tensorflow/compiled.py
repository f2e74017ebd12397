"""What of a step is in functions that XLA has to compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from keras_multigpu.engines.tensorflow.partition.operations import is_compiled_call
from keras_multigpu.engines.tensorflow.partition.rules.control import graph_named

_CALLERS = ("Call", "If", "Case", "While")  # what the types of such operations end in


def names_compiled(graph: Any, *, is_compiled: bool = False) -> set[str]:
    """The names of the operations in a graph's `tf.function(jit_compile=True)`s."""
    operations = graph.get_operations()
    found = {op.name for op in operations} if is_compiled else set()
    for op in operations:
        for inner in _functions_of(op) if op.type.endswith(_CALLERS) else ():
            found |= names_compiled(inner, is_compiled=is_compiled or is_compiled_call(op))
    return found


def _functions_of(op: Any) -> Iterator[Any]:
    """The graphs of the functions that an operation calls."""
    for attribute in op.node_def.attr.values():
        for function in (attribute.func, *attribute.list.func):
            graph = graph_named(op, function.name) if function.name else None
            if graph is not None:
                yield graph
