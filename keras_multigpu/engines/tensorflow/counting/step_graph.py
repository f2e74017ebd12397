"""The graphs of one step, one per device, as TensorFlow runs them.

Before TensorFlow runs a function, it optimizes the graph and cuts it into one graph per device,
with a send and a receive for every tensor that crosses. It exports these graphs without shapes. We
merge them again, and TensorFlow infers the shapes from the function's arguments.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

# `tf.summary.trace_off` leaves the collection on: each function that runs later would be kept.
from tensorflow.python.eager import context  # noqa: TID251

SENDS = ("_Send", "_HostSend")
RECEIVES = ("_Recv", "_HostRecv")
PASS_ON = ("Identity", "Cast", "Snapshot")
# Large weights are sent in parts, and joined where they arrive.
CUT = ("Reshape", "Slice", "SplitV", "StridedSlice")
JOIN = ("Concat", "ConcatV2")
# Prepended to node names, because TensorFlow reserves some names when it imports graphs.
_PREFIX = "merged/"
# A fused gradient of oneDNN. Its shape function does not know the shape of its second result,
# the gradient by the bias.
_WITH_BIAS = "BackpropFilterWithBias"
# Max pooling of oneDNN. Its second result has no shape: the place of each maximum in its window, as
# a byte, or as an integer if the window is too large for that.
_MAX_POOL, _LARGE_WINDOW = "_MklNativeMaxPool", 255


def graph_of_step(run: Callable[[], object]) -> StepGraph:
    """The graph of the step that a function runs."""
    graphs = _function_graphs(run)
    return StepGraph(graphs.partition_graphs, graphs.post_optimization_graph.library)


def _function_graphs(run: Callable[[], object]) -> Any:
    """The graphs of the largest function that runs.

    TensorFlow also exports the functions that it calls, although they were inlined.
    """
    runtime = context.context()
    runtime.enable_graph_collection()
    try:
        runtime.export_run_metadata()  # what was collected before
        run()
        found = runtime.export_run_metadata().function_graphs
    finally:
        runtime.disable_graph_collection()
    return max(found, key=lambda one: sum(len(graph.node) for graph in one.partition_graphs))


class StepGraph:
    """A function's graphs, one per device, merged into one; `library` has the called functions.

    Attributes:
        nodes: the nodes of all devices, by name.
        sends: those that send a tensor to another device.
        takers: the names of the nodes that take a node's results, by the node's name.
        sizes: the number of elements of every tensor; `None` if known only when the step runs.
        dtypes: the type of every tensor.
    """

    def __init__(self, partitions: Iterable[tf.compat.v1.GraphDef], library: Any):
        self._graphs = list(partitions)
        self._library = library
        self.nodes = {node.name: node for graph in self._graphs for node in graph.node}
        self.sends = [node for node in self.nodes.values() if node.op in SENDS]
        self._sent = {_key(node): node.input[0] for node in self.sends}
        self.takers: dict[str, list[str]] = collections.defaultdict(list)
        for node in self.nodes.values():
            for name in self.inputs(node):
                self.takers[node_name(name)].append(node.name)
        self.sizes, self.dtypes = self._infer_shapes()

    def inputs(self, node: tf.compat.v1.NodeDef) -> list[str]:
        """The inputs of an operation; a receive's input is the tensor that was sent."""
        return [self._sent[_key(node)]] if node.op in RECEIVES else list(node.input)

    def is_control(self, tensor: str) -> bool:
        """Whether a tensor only orders operations."""
        node = self.nodes[node_name(tensor)]
        return tensor.startswith("^") or (node.op == "Const" and bool(node.input))

    def origin(self, tensor: str, operations: Sequence[str]) -> tf.compat.v1.NodeDef:
        """The node that a tensor comes from, before these operations and receives."""
        origin = self.nodes[node_name(tensor)]
        while origin.op in (*operations, *RECEIVES):
            origin = self.nodes[node_name(self.inputs(origin)[0])]
        return origin

    def comes_from_weights(self, tensor: str) -> bool:
        """Whether a tensor is a variable's value, or a part of it."""
        return self.origin(tensor, (*PASS_ON, *CUT)).op == "ReadVariableOp"

    def walk(self, name: str, back: bool) -> Iterator[tf.compat.v1.NodeDef]:
        """A node and all that it depends on, or that depend on it."""
        seen, waiting = {name}, [name]
        while waiting:
            node = self.nodes[waiting.pop()]
            yield node
            names = map(node_name, self.inputs(node)) if back else self.takers[node.name]
            fresh = set(names) - seen
            seen |= fresh
            waiting += fresh

    def _infer_shapes(self) -> tuple[dict[str, int | None], dict[str, tf.DType]]:
        merged = tf.compat.v1.GraphDef()
        merged.versions.CopyFrom(self._graphs[0].versions)
        merged.library.CopyFrom(self._library)
        for node in self.nodes.values():
            if node.op not in SENDS:
                self._add(merged, node)
        with tf.Graph().as_default() as graph:
            tf.graph_util.import_graph_def(merged, name="")
        outputs = [tensor for op in graph.get_operations() for tensor in op.outputs]
        names = [tensor.name.removeprefix(_PREFIX) for tensor in outputs]
        shapes = dict(zip(names, [tensor.shape.num_elements() for tensor in outputs]))
        for node in self.nodes.values():
            if _WITH_BIAS in node.op:
                shapes[f"{node.name}:1"] = shapes[f"{node.name}/bias:0"]
            maxima = shapes.get(f"{node.name}:0")
            if node.op == _MAX_POOL and maxima is not None:
                is_large = math.prod(node.attr["ksize"].list.i) >= _LARGE_WINDOW
                shapes[f"{node.name}:1"] = (4 if is_large else 1) * maxima
        return shapes, dict(zip(names, [tensor.dtype for tensor in outputs]))

    def _add(self, merged: tf.compat.v1.GraphDef, node: tf.compat.v1.NodeDef) -> None:
        """Adds a node without its device; a receive becomes an identity."""
        added = merged.node.add()
        added.CopyFrom(node)
        added.name = _PREFIX + node.name
        added.device = ""
        if "_class" in added.attr:
            del added.attr["_class"]  # colocation with nodes by their old names
        del added.input[:]
        added.input.extend(map(self._renamed, self.inputs(node)))
        if node.op in RECEIVES:
            added.attr.clear()
            is_control = added.input[0].startswith("^")
            added.op = "NoOp" if is_control else "Identity"
            if not is_control:
                added.attr["T"].type = node.attr["tensor_type"].type
        if _WITH_BIAS in node.op:
            bias = merged.node.add(name=f"{added.name}/bias", op="BiasAddGrad")
            bias.input.append(self._renamed(node.input[2]))
            bias.attr["T"].CopyFrom(node.attr["T"])

    def _renamed(self, tensor: str) -> str:
        """A tensor's name in the merged graph."""
        if tensor.startswith("^"):
            return f"^{_PREFIX}{tensor[1:]}"
        name, _, number = tensor.partition(":")
        is_bias = number == "1" and _WITH_BIAS in self.nodes[name].op
        return f"{_PREFIX}{name}/bias" if is_bias else _PREFIX + tensor


def _key(node: tf.compat.v1.NodeDef) -> tuple[bytes, ...]:
    return tuple(node.attr[name].s for name in ("tensor_name", "send_device", "recv_device"))


def node_name(tensor: str) -> str:
    """The name of the node that makes a tensor."""
    return tensor.lstrip("^").partition(":")[0]


def is_gradient(name: str) -> bool:
    """Whether a node belongs to the backward pass."""
    return "gradient" in name
