"""Finds custom gradients that see a batch as a whole: one that is divided by its norm, say.

Other gradients are sums over the rows if the call's results depend on their own rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.probing.batchwide import ROWS, BatchWide, Traits, has_rows
from keras_multigpu.engines.tensorflow.tensors import gradient_rule, is_float
from keras_multigpu.engines.tensorflow.tracing.functions import bodies_of
from keras_multigpu.engines.tensorflow.tracing.inspection import layer_of


class Backward:
    """The custom gradients of a traced call.

    Attributes:
        doubtful: an operation whose gradient only trials can judge, or `None`.
        reason: why gradients of rows may depend on other rows, or `None`.
        sees_places: whether the places of rows, or their number, may have an effect.
    """

    def __init__(self, graph: Any, wide: BatchWide):
        self.doubtful: Any = None
        self.reason: str | None = None
        self.sees_places = False
        for operation, is_inner in _custom(graph, is_inner=False):
            try:
                if is_inner or self._is_doubtful(operation, wide):
                    self.doubtful = self.doubtful or operation
            except Exception:  # anything: code that can be called in the step's tape only
                self.doubtful = self.doubtful or operation

    def _is_doubtful(self, operation: Any, wide: BatchWide) -> bool:
        graph, results = _trace(operation)
        given = {id(inner): wide.traits(outer) for outer, inner in graph.captures}
        upstream = (one for one in graph.inputs if id(one) not in given)
        given |= {id(one): _upstream(end, wide) for one, end in zip(upstream, operation.outputs)}
        found = BatchWide(graph, given)
        self.sees_places |= found.sees_places
        is_doubtful = found.sees_places  # a factor of the number of rows, say, as means have it
        for one, gradient in zip(operation.inputs, results):
            traits = [found.traits(part) for part in _parts(gradient)]
            maker = next((it.maker for it in traits if it.maker), None)
            if maker is not None and wide.traits(one).of_rows:
                self.reason = self.reason or _told(operation, maker)
            is_doubtful |= any(it.is_curved for it in traits)
        return is_doubtful

    def told(self) -> str:
        """Why gradients of rows depend on other rows, as trials have shown."""
        return _told(self.doubtful)


def _custom(graph: Any, is_inner: bool) -> Iterator[tuple[Any, bool]]:
    """The operations with a custom gradient, and whether they are in a branch or a function."""
    for operation in graph.get_operations():
        if operation.type == "IdentityN" and "_gradient_op_type" in operation.node_def.attr:
            yield operation, is_inner
        for body in bodies_of(operation):
            yield from _custom(body, is_inner=True)


def _trace(operation: Any) -> tuple[Any, list[Any]]:
    """The graph of an operation's custom gradient, and its gradients by the operation's inputs."""
    rule = gradient_rule(operation)
    gradients: list[Any] = []

    def run(*upstream: Any) -> Any:
        gradients[:] = rule(operation, *upstream)
        return [part for one in gradients for part in _parts(one)]

    specs = [tf.TensorSpec(one.shape, one.dtype) for one in operation.outputs]
    with operation.graph.as_default():
        traced = tf.function(run, autograph=False).get_concrete_function(*specs)
    return traced.graph, gradients


def _upstream(output: Any, wide: BatchWide) -> Traits:
    """What is known of the gradient by an output: of a weight, say, it is a sum over the rows."""
    if has_rows(output):
        return ROWS
    return Traits() if wide.traits(output).of_rows else Traits(of_rows=True, maker=output.op)


def _parts(gradient: Any) -> list[Any]:
    flat = tf.nest.flatten(gradient, expand_composites=True)
    return [one for one in flat if is_float(one)]


def _told(operation: Any, maker: Any = None) -> str:
    by = f", by its {maker.type}" if maker is not None else ""
    return (
        f"in {layer_of(operation.name)} a custom gradient of a row may depend on other rows{by} "
        "(compute it of each row alone)"
    )
