"""Replaces the random numbers of a traced function by constants, equal for all rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.engines.values import Tensor

# A uniform number near 1 keeps what a dropout would drop.
_FILLS = {
    "StatelessRandomUniform": 0.99999,
    "StatelessRandomUniformV2": 0.99999,
    "StatelessRandomNormal": 0.5,
    "StatelessRandomNormalV2": 0.5,
    "StatelessTruncatedNormal": 0.5,
    "StatelessTruncatedNormalV2": 0.5,
}
# Which input has the minimum, which replaces the draws.
_INTEGERS = {"StatelessRandomUniformInt": 2, "StatelessRandomUniformIntV2": 4}


class Stilled:
    """A copy of a traced function that draws no random numbers."""

    def __init__(self, forward: Any):
        self._forward = forward
        definition = forward.graph.as_graph_def()
        _still(definition.node, output="")
        for body in definition.library.function:
            _still(body.node_def, output=":output:0")
        self._wrapped = tf.compat.v1.wrap_function(
            lambda: tf.graph_util.import_graph_def(definition, name=""), []
        )
        self._function = self._prune([one.name for one in forward.outputs])

    def __call__(self, state: list[Tensor], call: Any) -> list[np.ndarray]:
        """The values of the function's outputs."""
        return self._run(self._function, state, call)

    def trace_rows(self, state: list[Tensor], calls: Any) -> Iterator[tuple[Any, ...]]:
        """The name, and the value in each call, of every tensor that seems to have a batch axis.

        They are in the order of the computation.
        """
        graph = self._wrapped.graph
        inputs = {one.op.name for one in self._forward.inputs}
        names = [
            one.name
            for operation in graph.get_operations()
            for one in operation.outputs
            if operation.name not in inputs and (one.dtype.is_floating or one.dtype.is_integer)
            if one.shape.rank and one.shape[0] is None
        ]
        function = self._prune(names)
        values = [self._run(function, state, call) for call in calls]
        return zip(names, *values)

    def _prune(self, names: list[str]) -> Any:
        element = self._wrapped.graph.as_graph_element
        feeds = [element(one.name) for one in self._forward.inputs]
        return self._wrapped.prune(feeds, [element(name) for name in names])

    def _run(self, function: Any, state: list[Tensor], call: Any) -> list[np.ndarray]:
        with tf.init_scope():
            given = (state, call, tf.constant(0), tf.constant(1.0))
            flat = tf.nest.flatten(given, expand_composites=True)
            captured = [_made_up(one) for one in self._forward.captured_inputs]
            return [_array(value) for value in function(*flat, *captured)]


def _array(value: Tensor) -> np.ndarray:
    return np.asarray(tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value)


def _made_up(captured: Tensor) -> Tensor:
    """A captured tensor; ones in its place if its value is not known yet."""
    if hasattr(captured, "numpy"):
        return captured
    if captured.dtype in (tf.resource, tf.variant):
        raise ValueError(f"the tensor {captured.name!r} is not known before the step runs")
    return tf.ones([axis or 1 for axis in captured.shape], captured.dtype)


def _still(nodes: Any, output: str) -> None:
    """Makes nodes that draw random numbers fill their tensors with a constant.

    `output` is the suffix of a node's name as an input: in functions, outputs have names.
    """
    for node in list(nodes):
        if node.op not in _FILLS and node.op not in _INTEGERS:
            continue
        dtype, shape = node.attr["dtype"].type, node.input[0]
        index_type = node.attr["Tshape" if "Tshape" in node.attr else "T"].type
        if node.op in _INTEGERS:
            value = node.input[_INTEGERS[node.op]]
        else:
            constant = nodes.add(name=f"{node.name}/stilled", op="Const")
            number = tf.make_tensor_proto(_FILLS[node.op], tf.as_dtype(dtype))
            constant.attr["value"].tensor.CopyFrom(number)
            constant.attr["dtype"].type = dtype
            value = constant.name + output
        node.op = "Fill"
        node.attr.clear()
        node.attr["T"].type, node.attr["index_type"].type = dtype, index_type
        del node.input[:]
        node.input.extend([shape, value])
