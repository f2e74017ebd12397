"""What a graph's calls cost, and what a placement of them on devices sends."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from keras_multigpu.graphs.graph import Graph, LayerCall

_UNKNOWN = 128  # the assumed length of unknown axes
_ROWS = 128  # the batch that a placement is chosen for; work and traffic both grow with it
# Per second: operations, bytes of a device's memory, bytes between two devices. Only their ratios
# affect a placement.
_FLOPS, _MEMORY, _LINK = 1e13, 1e12, 1e10


def flops(call: LayerCall) -> float:
    """Multiplications and additions of a call for one row of the batch.

    Each kernel (a weight with two axes or more) is applied once per position: an element of a
    sequence, a point of an image. Embeddings are counted as copies.
    """
    work = float(sum(map(_elements, call.outputs)))
    if isinstance(call.layer, keras.layers.Embedding):
        return work
    kernels = sum(math.prod(v.shape) for v in call.variables if len(v.shape) >= 2)
    return work + 2.0 * kernels * _positions(call)


def variables_bytes(variables: Iterable[keras.Variable]) -> int:
    """The bytes of variables; duplicates count once."""
    unique = {id(variable): variable for variable in variables}.values()
    return sum(_size(variable.dtype) * math.prod(variable.shape) for variable in unique)


def row_bytes(tensor: Any) -> int:
    """The bytes of one row of a tensor, symbolic or not."""
    return _elements(tensor) * _size(tensor.dtype)


def seconds(call: LayerCall) -> float:
    """The estimated time of a call in a training step: forward, backward and update."""
    # The backward pass has two products for each forward one. An update reads and writes a weight,
    # its gradient and two slots.
    computing = 3 * _ROWS * flops(call) / _FLOPS
    updating = 6 * variables_bytes(call.variables) / _MEMORY
    return computing + updating


def crossing_seconds(tensor: keras.KerasTensor) -> float:
    """The estimated time to send a tensor and its gradient between two devices."""
    return 2 * _ROWS * row_bytes(tensor) / _LINK


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A tensor that is made on one device and used on another.

    Attributes:
        maker: the index of the call that makes it; `None` for an input of the model.
        row_bytes: the bytes of one of its rows.
        has_gradient: whether its gradient is sent back.
    """

    maker: int | None
    row_bytes: int
    has_gradient: bool

    def bytes(self, rows: int) -> int:
        """The bytes sent in a training step on `rows` rows, including the gradient."""
        return rows * self.row_bytes * (2 if self.has_gradient else 1)


def with_loss(graph: Graph, numbers: Sequence[int]) -> tuple[Graph, list[int]]:
    """A graph and its placement with the loss as the last call, which runs on device 0.

    Outputs of other devices cross to it, and their gradients cross back.
    """
    layer, count = keras.layers.Identity(name="loss"), len(graph.calls)
    loss = LayerCall(layer, ("loss",), tuple(graph.outputs), (), count)
    return Graph(graph.inputs, graph.outputs, (*graph.calls, loss)), [*numbers, 0]


def find_crossings(graph: Graph, numbers: Sequence[int]) -> list[Crossing]:
    """The transfers of a placement; each tensor goes to a device once. Inputs are on device 0."""
    producers = graph.producers()
    found: dict[tuple[int, int], Crossing] = {}
    for place, call in enumerate(graph.calls):
        for tensor in call.inputs:
            maker = producers.get(id(tensor))
            if numbers[place] != (0 if maker is None else numbers[maker]):
                is_trained = maker is not None and keras.backend.is_float_dtype(tensor.dtype)
                crossing = Crossing(maker, row_bytes(tensor), is_trained)
                found[id(tensor), numbers[place]] = crossing
    return list(found.values())


def find_share(graph: Graph, numbers: Sequence[int]) -> float:
    """The estimated step time of a placement, relative to one device.

    Calls on different devices run in parallel unless one waits for another. Copies take no time.

    Returns:
        1 for a chain, 1 / n for n equal branches on n devices.
    """
    producers = graph.producers()
    work = [seconds(call) for call in graph.calls]
    free: dict[int, float] = collections.defaultdict(float)
    done: list[float] = []
    for call, number, spent in zip(graph.calls, numbers, work):
        arrivals = [done[producers[id(t)]] for t in call.inputs if id(t) in producers]
        free[number] = max([free[number], *arrivals]) + spent
        done.append(free[number])
    return max(done, default=0.0) / max(sum(work), 1e-12)


def _positions(call: LayerCall) -> float:
    """How often a layer applies its kernels to a row."""
    given, made = call.inputs[0].shape, call.outputs[0].shape
    shape = made if len(made) == len(given) else given
    is_first = getattr(call.layer, "data_format", None) == "channels_first"
    return float(math.prod(_known(shape[2:] if is_first else shape[1:-1])))


def _elements(tensor: keras.KerasTensor) -> int:
    return math.prod(_known(tensor.shape[1:]))


def _known(shape: Any) -> list[int]:
    return [_UNKNOWN if axis is None else axis for axis in shape]


def _size(dtype: Any) -> int:
    """The bytes of an element; 1 for a text, whose length is unknown."""
    if getattr(dtype, "kind", "") in ("O", "S", "U"):  # NumPy's texts
        return 1
    digits = re.match(r"[a-z]+(\d+)", keras.backend.standardize_dtype(dtype))
    return max(int(digits[1]) // 8, 1) if digits else 1
