"""Has the operations of an optimizer's step run where the gradients and the weights are.

Keras clips, scales and accumulates gradients, decays and averages weights outside `update_step`,
without a device. TensorFlow would run all this on the first device, and send every gradient there.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.values import Tensor

# What they call is placed operation by operation, and what they pass through tensor by tensor.
_OF_MANY = (
    "IdentityN",
    "If",
    "PartitionedCall",
    "StatefulPartitionedCall",
    "StatelessIf",
    "StatelessWhile",
    "While",
)


def follow_gradients(optimizer: keras.Optimizer) -> None:
    """Makes every operation of `apply` that has no device run on that of its largest input.

    Not used around a whole step: in such a scope TensorFlow pins the functions traced there, and so
    all replicas, to the device that traces them.
    """
    if "apply" in vars(optimizer):
        return  # it does already
    apply = optimizer.apply

    def apply_there(*args: Any, **kwargs: Any) -> None:
        if tf.executing_eagerly():
            return apply(*args, **kwargs)
        with tf.compat.v1.device(_Follower()):  # `tf.device` takes no function
            return apply(*args, **kwargs)

    optimizer.apply = apply_there


class _Follower:
    """Chooses the device of an operation by those of its inputs."""

    def __init__(self) -> None:
        # What the branches of a condition take from outside, by its `id` inside.
        self._outside: dict[int, Tensor] = {}

    def __call__(self, operation: tf.Operation) -> str:
        if operation.device or operation.type in _OF_MANY:
            return operation.device
        inputs = [(one, self._device_of(one)) for one in operation.inputs]
        known = [(one, device) for one, device in inputs if device]
        return max(known, key=lambda pair: _weight(pair[0]), default=(None, ""))[1]

    def _device_of(self, tensor: Tensor) -> str:
        """A tensor's device; `""` if it has none."""
        if tf.is_tensor(tensor) and not hasattr(tensor, "graph"):
            return tensor.device  # a variable that the step takes from outside
        operation = tensor.op
        if operation.device:
            return operation.device
        if operation.type == "ReadVariableOp":
            return self._device_of(operation.inputs[0])
        outside = self._taken(tensor) if operation.type == "Placeholder" else None
        return "" if outside is None else self._device_of(outside)

    def _taken(self, tensor: Tensor) -> Tensor | None:
        """What a function's placeholder stands for; `None` for an argument."""
        if id(tensor) not in self._outside:
            captures = getattr(tensor.graph, "captures", ())
            self._outside.update((id(inside), outside) for outside, inside in captures)
        return self._outside.get(id(tensor))


def _weight(tensor: Tensor) -> float:
    """How much a tensor has to say: variables can't move, the size of others may be unknown."""
    if tensor.dtype == tf.resource:
        return float("inf")
    elements = tensor.shape.num_elements()
    return float(1 if elements is None else elements)
