"""Counts the transfers between devices in the graph of a step."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from keras_multigpu.engines.tensorflow.counting.step_graph import (
    PASS_ON,
    StepGraph,
    graph_of_step,
    is_gradient,
    node_name,
)
from keras_multigpu.engines.tensorflow.names import short_name
from keras_multigpu.engines.values import Transfer


def count_transfers(run: Callable[[], object]) -> list[Transfer]:
    """The transfers of a step: every tensor sent, except those that only order operations.

    What a GPU and its host send each other under the GPU's name, small integers, does not count.
    """
    graph = graph_of_step(run)
    made = [
        _transfer(graph, node, node.input[0])
        for node in graph.sends
        if not graph.is_control(node.input[0])
    ]
    return [one for one in made if one.source != one.target]


def _transfer(graph: StepGraph, node: tf.compat.v1.NodeDef, tensor: str) -> Transfer:
    dtype = tf.as_dtype(node.attr["T"].type)
    elements = graph.sizes.get(tensor if ":" in tensor else f"{tensor}:0")
    return Transfer(
        source=short_name(node.attr["send_device"].s.decode()),
        target=short_name(node.attr["recv_device"].s.decode()),
        kind=_kind(graph, tensor, elements),
        tensor=tensor,
        bytes=None if elements is None else elements * dtype.size,
    )


def _kind(graph: StepGraph, tensor: str, elements: int | None) -> str:
    origin = graph.origin(tensor, PASS_ON)
    if is_gradient(origin.name):
        return "gradients"
    if graph.comes_from_weights(tensor):
        return "weights" if elements is None or elements > 1 else "other"
    if is_input(graph, origin):
        return "inputs"
    if not _is_used(graph, tensor):
        return "other"
    # Both passes share constants.
    before = (one for one in graph.walk(origin.name, back=True) if one.op != "Const")
    return "gradients" if any(is_gradient(one.name) for one in before) else "activations"


def is_input(graph: StepGraph, node: tf.compat.v1.NodeDef) -> bool:
    """Whether a node belongs to the batch: it depends on the function's data alone."""
    leaves = [one for one in graph.walk(node.name, back=True) if not one.input]
    kinds = {one.op for one in leaves if one.op not in ("Const", "NoOp")}
    is_data = any(
        one.op in ("_Arg", "IteratorGetNext") and one.attr["T"].type != tf.resource
        for one in leaves
    )
    reads = any(one.op == "_Arg" and one.attr["T"].type == tf.resource for one in leaves)
    return is_data and kinds <= {"_Arg", "IteratorGetNext"} and not reads


def _is_used(graph: StepGraph, tensor: str) -> bool:
    """Whether a gradient or a result depends on a tensor, not only the model's state."""
    return any(
        node.op == "_Retval" or is_gradient(node.name)
        for node in graph.walk(node_name(tensor), back=False)
    )
