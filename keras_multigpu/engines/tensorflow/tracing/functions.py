"""Helpers for traced functions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.tensors import floats, has_gradient
from keras_multigpu.engines.values import Tensor


def make_function(function: Any, compiled: bool, apart: bool = False) -> Any:
    """A TensorFlow function; with `compiled` XLA compiles it, with `apart` it is never inlined."""
    return tf.function(
        function,
        autograph=False,
        jit_compile=compiled or None,
        experimental_attributes={"_noinline": True} if apart else None,
    )


def has_flow(function: Any, *kinds: str) -> bool:
    """Whether a traced function has operations of these kinds (loops, branches)."""
    graph = function.graph.as_graph_def()
    bodies = [body.node_def for body in graph.library.function]
    types = {node.op for node in itertools.chain(graph.node, *bodies)}
    return any(op in (kind, f"Stateless{kind}") for op in types for kind in kinds)


def types_without_gradient(function: Any, weights: Sequence[Tensor]) -> set[str]:
    """The types of a traced function's operations that have no gradient, and need none.

    They come before all weights: augmentations, for example. If one comes after a weight, its type
    is left out, and TensorFlow's own error says that it has no gradient.
    """
    constants = [
        one
        for one in function.graph.get_operations()
        if not has_gradient(one.type) and floats(one.inputs) and floats(one.outputs)
    ]
    after: set[int] = set()
    waiting = list(weights) if constants else []
    while waiting:
        for operation in waiting.pop().consumers():
            if id(operation) not in after:
                after.add(id(operation))
                waiting += operation.outputs
    behind = {one.type for one in constants if id(one) in after}
    return {one.type for one in constants} - behind


def reached_inputs(function: Any, results: Sequence[Tensor]) -> list[bool]:
    """Whether each input of a traced function has a gradient from results of its graph."""
    with function.graph.as_default():
        return [one is not None for one in tf.gradients(results, function.inputs)]
