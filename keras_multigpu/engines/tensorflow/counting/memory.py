"""What each device holds in a step: variables where they are, other tensors from the step's graph.

TensorFlow allocates every tensor when an operation makes it and frees it after its last reader.
The graph shows both, so we run its operations in our mind, in the order in which they become ready,
and look for the moment when a device holds most.
"""

from __future__ import annotations

import collections
import graphlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.liveness import Operation, find_peaks
from keras_multigpu.engines.tensorflow.counting.step_graph import (
    CUT,
    JOIN,
    PASS_ON,
    RECEIVES,
    SENDS,
    StepGraph,
    graph_of_step,
    is_gradient,
    node_name,
)
from keras_multigpu.engines.tensorflow.counting.transfers import is_input
from keras_multigpu.engines.tensorflow.names import short_name
from keras_multigpu.engines.tensorflow.weights.divided import parts_of
from keras_multigpu.engines.values import Holding

# fmt: off
_VIEWS = {
    "Enter", "Exit", "ExpandDims", "Identity", "IdentityN", "LoopCond", "Merge", "NextIteration",
    "PreventGradient", "ReadVariableOp", "Reshape", "Squeeze", "StopGradient", "Switch",
}
# Kernels that write over an input which nothing else reads (`forward_input_or_allocate_output`).
_IN_PLACE = {
    "Abs", "Add", "AddN", "AddV2", "BiasAdd", "Ceil", "Cos", "Div", "DivNoNan", "Elu", "EluGrad",
    "Erf", "Exp", "Expm1", "Floor", "LeakyRelu", "Log", "Log1p", "LogSoftmax", "Maximum",
    "Minimum", "Mul", "MulNoNan", "Neg", "Pow", "RealDiv", "Reciprocal", "Relu", "Relu6",
    "ReluGrad", "Round", "Rsqrt", "RsqrtGrad", "Selu", "Sigmoid", "SigmoidGrad", "Sign", "Sin",
    "Softmax", "Softplus", "Softsign", "Sqrt", "SqrtGrad", "Square", "SquaredDifference", "Sub",
    "Tanh", "TanhGrad", "_FusedBatchNormEx", "FusedBatchNormV3",
}
# fmt: on
# How the gradients of replicas become one.
_SUMS = ("AddN", *CUT, *JOIN, *RECEIVES)
_KEPT = ("_Arg", "Const")  # by the caller, and by TensorFlow
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def find_memory(model: Any, run: Callable[[], object], training: bool) -> list[Holding]:
    """What each device holds in the step that `run` makes a built model run."""
    graph = graph_of_step(run)
    found = _variables(model, training)
    peaks = find_peaks(list(_operations(graph)))
    unknown = _count_unknown(graph)
    for device in sorted({*peaks, *unknown}):
        sizes = peaks.get(device, {})
        missing = unknown.get(device, 0)
        for kind in dict.fromkeys([*sizes, *(["temporaries"] if missing else [])]):
            left_out = missing if kind == "temporaries" else 0
            found.append(Holding(device, kind, sizes.get(kind, 0), False, left_out))
    return found


def _variables(model: Any, training: bool) -> list[Holding]:
    """The variables' bytes, where they are."""
    groups = {"weights": model.variables}
    if training:
        groups |= {"slots": model.optimizer.variables, "other": model.metrics_variables}
    sizes: dict[tuple[str, str], int] = collections.defaultdict(int)
    for kind, variables in groups.items():
        for variable in {id(one): one for one in variables}.values():
            for device, size in _parts(variable):
                sizes[device, kind] += size
    return [Holding(*key, size, is_counted=True) for key, size in sizes.items()]


def _parts(variable: keras.Variable) -> Iterator[tuple[str, int]]:
    """The device and the bytes of a variable's value."""
    for part in parts_of(variable):
        yield short_name(part.device), part.shape.num_elements() * part.dtype.size


def _operations(graph: StepGraph) -> Iterator[Operation]:
    """The operations of a step, in the order in which they become ready."""
    outputs: dict[str, list[str]] = collections.defaultdict(list)
    for tensor in graph.sizes:
        outputs[node_name(tensor)].append(tensor)
    for node in _ready(graph):
        if node.op in SENDS:
            continue
        inputs = _tensors(graph, node)
        is_backward = _is_backward(node, inputs)
        yield Operation(
            [_full(one) for one in inputs],
            [(one, _bytes(graph, one) or 0) for one in outputs[node.name]],
            device=short_name(node.device),
            is_backward=is_backward,
            is_view=node.op in _VIEWS,
            is_sum=is_backward and node.op in _SUMS,
            may_overwrite=node.op in _IN_PLACE,
            is_kept=node.op in _KEPT,
            kind=_kind(graph, node, inputs),
        )


def _is_backward(node: tf.compat.v1.NodeDef, inputs: list[str]) -> bool:
    # Tapes add up gradients outside of their scope; a received tensor's name is its sender's.
    by_inputs = node.op in ("AddN", *RECEIVES) and any(map(is_gradient, inputs))
    return is_gradient(node.name) or by_inputs


def _kind(graph: StepGraph, node: tf.compat.v1.NodeDef, inputs: list[str]) -> str | None:
    if node.op == "_Arg":
        return "batch"
    if node.op in (*RECEIVES, *CUT, *JOIN, "Cast") and _is_weight(graph, inputs):
        return "copies"
    if node.op in RECEIVES and inputs and is_input(graph, graph.nodes[node_name(inputs[0])]):
        return "batch"
    return None


def _is_weight(graph: StepGraph, inputs: list[str]) -> bool:
    """Whether a node's inputs are weights or parts of them, beside constants."""
    origins = [graph.origin(one, (*PASS_ON, *CUT)) for one in inputs]
    kinds = {
        "ReadVariableOp" if one.op in JOIN and _is_weight(graph, _tensors(graph, one)) else one.op
        for one in origins
    }
    return "ReadVariableOp" in kinds and kinds <= {"ReadVariableOp", "Const"}


def _tensors(graph: StepGraph, node: tf.compat.v1.NodeDef) -> list[str]:
    return [one for one in graph.inputs(node) if not one.startswith("^")]


def _full(tensor: str) -> str:
    return tensor if ":" in tensor else f"{tensor}:0"


def _ready(graph: StepGraph) -> Iterator[tf.compat.v1.NodeDef]:
    """The nodes in the order in which they become ready; loops are run once.

    Nodes that become ready together follow by name: TensorFlow's own order varies.
    """
    sorter = graphlib.TopologicalSorter(dict.fromkeys(sorted(graph.nodes), ()))
    for name, node in sorted(graph.nodes.items()):
        makers = {node_name(one) for one in graph.inputs(node)}
        sorter.add(name, *(one for one in makers if graph.nodes[one].op != "NextIteration"))
    return (graph.nodes[name] for name in sorter.static_order())


def _bytes(graph: StepGraph, tensor: str) -> int | None:
    """A tensor's bytes; `None` if they are known only when the step runs."""
    elements, dtype = graph.sizes[tensor], graph.dtypes[tensor]
    if dtype == tf.resource:
        return 0
    is_hidden = elements is None or dtype in (tf.variant, tf.string)
    return None if is_hidden else elements * dtype.size


def _count_unknown(graph: StepGraph) -> dict[str, int]:
    """The number of tensors of unknown size, and of calls whose inside is not seen, by device."""
    hidden: Iterable[str] = [
        *(node_name(one) for one in graph.sizes if _bytes(graph, one) is None),
        *(node.name for node in graph.nodes.values() if node.op in _CALLS),
    ]
    nodes = (graph.nodes[name] for name in hidden if name in graph.nodes)
    return dict(collections.Counter(short_name(node.device) for node in nodes))
