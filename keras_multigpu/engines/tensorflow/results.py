"""What a replica is given, and what it returns, on its own device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.attributes import get_attributes
from keras_multigpu.engines.shared import split_tensors
from keras_multigpu.engines.values import Call, Tensor


@dataclasses.dataclass
class LocalResult:
    """What a replica returns, on its own device.

    Attributes:
        outputs: the tensors of the template's outputs.
        attributes: what Keras hung on each of them.
        losses: the tensors given to `add_loss`.
        updates: the new values of the variables assigned, by their keys.
        arguments: the tensors that the traced function was called with; `None` eagerly.
    """

    outputs: list[Tensor]
    attributes: list[dict[str, Tensor]]
    losses: list[Tensor]
    updates: dict[str, Tensor]
    arguments: list[Tensor] | None = None

    @property
    def differentiable(self) -> Any:
        """What gradients can come back to."""
        return self.outputs, self.attributes, self.losses


Arguments = tuple[list[Tensor], list[dict[str, Tensor]]]
"""The tensors of a call, and what Keras hung on each of them."""


def split_call(call: Call) -> tuple[Arguments, Callable[[Sequence[Tensor]], Any]]:
    """The tensors of a call, with their attributes, and what makes it of others."""
    tensors, restore = split_tensors(call, tf.is_tensor)
    return (tensors, [get_attributes(tensor) for tensor in tensors]), restore


def tensors_of(structure: Any) -> list[Tensor]:
    """The tensors of a structure, and the parts of sparse ones."""
    return [
        part for part in tf.nest.flatten(structure, expand_composites=True) if tf.is_tensor(part)
    ]
