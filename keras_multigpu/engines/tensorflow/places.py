"""Where the parts of a step are computed: the replicas of a tower, the stages of a model.

The operations of a part are made in a scope that has the part's number in its name. TensorFlow's
tapes name the gradient of an operation after it, so the name tells the device of both. What belongs
to no part, such as the update of a weight, is computed where what it takes is.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.values import Tensor

_PART = re.compile(r"(?:^|/)at_place_(\d+)(?:_\d+)?(?=/|$)")

_LOSS = "compile_loss"  # in which Keras computes the losses of `compile`
LOOPS = ("While", "StatelessWhile")
_OF_VARIABLES = re.compile("(ReadVariable|Assign|Resource|VarIsInitialized|VariableShape)")


class Places:
    """Chooses the devices of operations while a graph is built.

    Args:
        devices: the device of each part, as TensorFlow names it. The first one's is the home of
            what several parts have made.
    """

    def __init__(self, devices: Sequence[str]):
        self.devices = tuple(devices)
        self._captured: Any = weakref.WeakKeyDictionary()  # by graph: what it has for what outside

    @contextlib.contextmanager
    def part(self, number: int) -> Iterator[None]:
        """Scope of the operations of a part."""
        if tf.executing_eagerly():
            with tf.device(self.devices[number]):
                yield
        else:
            with tf.name_scope(f"at_place_{number}"), self.chosen():
                yield

    @contextlib.contextmanager
    def chosen(self) -> Iterator[None]:
        """Scope in which all operations of a graph get their devices: gradients and updates too."""
        with tf.compat.v1.device(self._device_of):
            yield

    def part_of(self, op: tf.Operation) -> int | None:
        """The number of the part that an operation belongs to, by its name."""
        found = _PART.findall(op.name)
        return int(found[-1]) if found and int(found[-1]) < len(self.devices) else None

    def part_alone(self, op: tf.Operation) -> int | None:
        """The part, if an operation is on its device, and so are the variables that it takes."""
        number = self.part_of(op)
        if number is None:
            return None
        devices = {op.device, *(one.device for one in self._handles(op))}
        return number if devices == {self.devices[number]} else None

    def _handles(self, op: tf.Operation) -> list[Tensor]:
        return [self._outside(one) for one in op.inputs if one.dtype == tf.resource]

    def _device_of(self, op: tf.Operation) -> str:
        if op.device:
            return op.device  # the code's own choice
        handles = self._handles(op)
        if handles and (_OF_VARIABLES.match(op.type) or "_XlaMustCompile" in op.node_def.attr):
            return handles[0].device  # XLA finds no variable of another device
        number = self.part_of(op)
        if number is not None:
            return self.devices[number]
        if _LOSS in op.name:
            return self.devices[0]  # of all outputs, with the targets
        known = [(one, self._device_of_input(one)) for one in op.inputs]
        large = {device for one, device in known if device and one.shape.rank != 0}
        found = large or {device for _, device in known if device}
        return self.devices[0] if len(found) > 1 else next(iter(found), "")

    def _device_of_input(self, tensor: Tensor) -> str:
        """Its device; TensorFlow reads a variable where it is, and names no device for that."""
        handles = self._handles(tensor.op) if tensor.op.type == "ReadVariableOp" else []
        return tensor.device or next((one.device for one in handles), "")

    def _outside(self, handle: Tensor) -> Tensor:
        """The variable's own handle, for what a function has captured, and a loop has passed on."""
        while not hasattr(handle, "numpy"):
            if handle.op.type in LOOPS:
                handle = handle.op.inputs[handle.value_index]
                continue
            graph = handle.graph
            known = self._captured.setdefault(graph, {})
            if id(handle) not in known:
                captures = getattr(graph, "captures", ())
                known.update((id(inside), outside) for outside, inside in captures)
            if id(handle) not in known:
                break
            handle = known[id(handle)]
        return handle
