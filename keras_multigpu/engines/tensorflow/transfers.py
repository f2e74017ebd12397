"""Counts the transfers between devices in TensorFlow's partitioned graphs.

Before TensorFlow runs a function, it optimizes the graph and cuts it into one graph per device,
with a send and a receive for every tensor that crosses. `tf.summary.trace_on` exports these graphs
without shapes. We merge them again, and TensorFlow infers the shapes from the function's arguments.
"""

from __future__ import annotations

import collections
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.names import short_name
from keras_multigpu.engines.values import Transfer

_SENDS = ("_Send", "_HostSend")
_RECEIVES = ("_Recv", "_HostRecv")
_PASS_ON = ("Identity", "Cast")
# Large weights are sent in parts.
_CUT = ("Reshape", "Slice", "SplitV", "StridedSlice")
# Prepended to node names, because TensorFlow reserves some names when it imports graphs.
_PREFIX = "merged/"
# The step's name in the file of traces.
_TAG = "step"
# A fused gradient of oneDNN. Its shape function does not know the shape of its second result,
# the gradient by the bias.
_WITH_BIAS = "BackpropFilterWithBias"


def count_transfers(run: Callable[[], object]) -> list[Transfer]:
    """The transfers of a step."""
    graphs = _function_graphs(run)
    return _Step(graphs.partition_graphs, graphs.post_optimization_graph.library).transfers()


def _function_graphs(run: Callable[[], object]) -> Any:
    """The graphs of the largest function that runs.

    TensorFlow also exports the functions that it calls, although they were inlined.
    """
    with tempfile.TemporaryDirectory() as folder:
        writer = tf.summary.create_file_writer(folder)
        with writer.as_default():
            try:
                # TensorFlow keeps collecting after a trace: export what is left over first.
                for name, step in (("before", lambda: None), (_TAG, run)):
                    tf.summary.trace_on(graph=True, profiler=False)
                    step()
                    tf.summary.trace_export(name, step=0)
            finally:
                tf.summary.trace_off()
        writer.close()
        found = [
            graphs
            for metadata in _metadata(next(pathlib.Path(folder).iterdir()))
            for graphs in metadata.function_graphs
        ]
    return max(found, key=lambda one: sum(len(graph.node) for graph in one.partition_graphs))


def _metadata(file: pathlib.Path) -> Iterator[tf.compat.v1.RunMetadata]:
    for record in tf.data.TFRecordDataset(str(file)):
        for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
            for text in value.tensor.string_val if value.tag == _TAG else ():
                yield tf.compat.v1.RunMetadata.FromString(text)


class _Step:
    """A function's graphs, one per device, merged into one; `library` has the called functions."""

    def __init__(self, partitions: Iterable[tf.compat.v1.GraphDef], library: Any):
        self._graphs = list(partitions)
        self._library = library
        self._nodes = {node.name: node for graph in self._graphs for node in graph.node}
        self._sends = [node for node in self._nodes.values() if node.op in _SENDS]
        self._sent = {_key(node): node.input[0] for node in self._sends}
        self._takers: dict[str, list[str]] = collections.defaultdict(list)
        for node in self._nodes.values():
            for name in self._inputs(node):
                self._takers[_node_name(name)].append(node.name)
        self._shapes = self._infer_shapes()

    def transfers(self) -> list[Transfer]:
        """A transfer for every tensor sent, except those that only order operations."""
        return [
            self._transfer(node, node.input[0])
            for node in self._sends
            if not self._is_control(node.input[0])
        ]

    def _transfer(self, node: tf.compat.v1.NodeDef, tensor: str) -> Transfer:
        dtype = tf.as_dtype(node.attr["T"].type)
        elements = self._shapes.get(tensor if ":" in tensor else f"{tensor}:0")
        return Transfer(
            source=short_name(node.attr["send_device"].s.decode()),
            target=short_name(node.attr["recv_device"].s.decode()),
            kind=self._kind(tensor, elements),
            tensor=tensor,
            bytes=None if elements is None else elements * dtype.size,
        )

    def _inputs(self, node: tf.compat.v1.NodeDef) -> list[str]:
        """The inputs of an operation; a receive's input is the tensor that was sent."""
        return [self._sent[_key(node)]] if node.op in _RECEIVES else list(node.input)

    def _is_control(self, tensor: str) -> bool:
        """Whether a tensor only orders operations."""
        node = self._nodes[_node_name(tensor)]
        return tensor.startswith("^") or (node.op == "Const" and bool(node.input))

    def _kind(self, tensor: str, elements: int | None) -> str:
        origin = self._origin(tensor, _PASS_ON)
        if _is_gradient(origin.name):
            return "gradients"
        if self._origin(tensor, (*_PASS_ON, *_CUT)).op == "ReadVariableOp":
            return "weights" if elements is None or elements > 1 else "other"
        if self._is_input(origin):
            return "inputs"
        return "activations" if self._is_used(tensor) else "other"

    def _origin(self, tensor: str, operations: Sequence[str]) -> tf.compat.v1.NodeDef:
        """The node that a tensor comes from, before these operations and receives."""
        origin = self._nodes[_node_name(tensor)]
        while origin.op in (*operations, *_RECEIVES):
            origin = self._nodes[_node_name(self._inputs(origin)[0])]
        return origin

    def _is_input(self, node: tf.compat.v1.NodeDef) -> bool:
        """Whether a node belongs to the batch: it depends on the function's data alone."""
        leaves = [one for one in self._walk(node.name, back=True) if not one.input]
        kinds = {one.op for one in leaves if one.op not in ("Const", "NoOp")}
        is_data = any(
            one.op in ("_Arg", "IteratorGetNext") and one.attr["T"].type != tf.resource
            for one in leaves
        )
        return is_data and kinds <= {"_Arg", "IteratorGetNext"} and not self._reads(leaves)

    def _reads(self, leaves: Iterable[tf.compat.v1.NodeDef]) -> bool:
        return any(one.op == "_Arg" and one.attr["T"].type == tf.resource for one in leaves)

    def _is_used(self, tensor: str) -> bool:
        """Whether a gradient or a result depends on a tensor, not only the model's state."""
        return any(
            node.op == "_Retval" or _is_gradient(node.name)
            for node in self._walk(_node_name(tensor), back=False)
        )

    def _walk(self, name: str, back: bool) -> Iterator[tf.compat.v1.NodeDef]:
        seen, waiting = {name}, [name]
        while waiting:
            node = self._nodes[waiting.pop()]
            yield node
            names = map(_node_name, self._inputs(node)) if back else self._takers[node.name]
            fresh = set(names) - seen
            seen |= fresh
            waiting += fresh

    def _infer_shapes(self) -> dict[str, int | None]:
        """The number of elements of every tensor; `None` if unknown before the step."""
        merged = tf.compat.v1.GraphDef()
        merged.versions.CopyFrom(self._graphs[0].versions)
        merged.library.CopyFrom(self._library)
        for node in self._nodes.values():
            if node.op not in _SENDS:
                self._add(merged, node)
        with tf.Graph().as_default() as graph:
            tf.graph_util.import_graph_def(merged, name="")
        outputs = [tensor for op in graph.get_operations() for tensor in op.outputs]
        names = [tensor.name.removeprefix(_PREFIX) for tensor in outputs]
        shapes = dict(zip(names, [tensor.shape.num_elements() for tensor in outputs]))
        for node in self._nodes.values():
            if _WITH_BIAS in node.op:
                shapes[f"{node.name}:1"] = shapes[f"{node.name}/bias:0"]
        return shapes

    def _add(self, merged: tf.compat.v1.GraphDef, node: tf.compat.v1.NodeDef) -> None:
        """Adds a node without its device; a receive becomes an identity."""
        added = merged.node.add()
        added.CopyFrom(node)
        added.name = _PREFIX + node.name
        added.device = ""
        if "_class" in added.attr:
            del added.attr["_class"]  # colocation with nodes by their old names
        del added.input[:]
        added.input.extend(map(self._renamed, self._inputs(node)))
        if node.op in _RECEIVES:
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
        is_bias = number == "1" and _WITH_BIAS in self._nodes[name].op
        return f"{_PREFIX}{name}/bias" if is_bias else _PREFIX + tensor


def _key(node: tf.compat.v1.NodeDef) -> tuple[bytes, ...]:
    return tuple(node.attr[name].s for name in ("tensor_name", "send_device", "recv_device"))


def _node_name(tensor: str) -> str:
    return tensor.lstrip("^").partition(":")[0]


def _is_gradient(name: str) -> bool:
    return "gradient" in name
