"""Estimated costs of a graph's calls, for placing layers on devices."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

import keras

from keras_multigpu.graphs.graph import LayerCall

# The assumed length of unknown axes.
_UNKNOWN = 128


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The speeds of a device and its links. Only their ratios affect a placement.

    Attributes:
        flops: floating-point operations per second.
        memory: bytes read or written per second.
        link: bytes between two devices per second.
    """

    flops: float = 1e13
    memory: float = 1e12
    link: float = 1e10


HARDWARE = Hardware()
# The batch size that a placement is chosen for; work and traffic both grow with it.
ROWS = 128


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


def seconds(call: LayerCall, rows: int = ROWS, hardware: Hardware = HARDWARE) -> float:
    """The estimated time of a call in a training step: forward, backward and update."""
    # The backward pass has two products for each forward one. An update reads and writes a weight,
    # its gradient and two slots.
    computing = 3 * rows * flops(call) / hardware.flops
    updating = 6 * variables_bytes(call.variables) / hardware.memory
    return computing + updating


def crossing(tensor: keras.KerasTensor, rows: int = ROWS, hardware: Hardware = HARDWARE) -> float:
    """The estimated time to send a tensor and its gradient between two devices."""
    return 2 * rows * row_bytes(tensor) / hardware.link


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
    """The bytes of an element; 1 for a string, whose length is unknown."""
    digits = re.match(r"[a-z]+(\d+)", keras.backend.standardize_dtype(dtype))
    return max(int(digits[1]) // 8, 1) if digits else 1
