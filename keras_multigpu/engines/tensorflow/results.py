"""A replica's arguments and results, on its own device."""

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
    """A replica's results, on its own device.

    Attributes:
        outputs: the tensors of the template's outputs.
        attributes: what Keras attached to each output.
        losses: the tensors given to `add_loss`.
        updates: the new values of assigned variables, by key.
    """

    outputs: list[Tensor]
    attributes: list[dict[str, Tensor]]
    losses: list[Tensor]
    updates: dict[str, Tensor]

    @property
    def differentiable(self) -> Any:
        """The results that can get gradients."""
        return self.outputs, self.attributes, self.losses


Arguments = tuple[list[Tensor], list[dict[str, Tensor]]]
"""The tensors of a call, and what Keras attached to each."""


def split_call(call: Call) -> tuple[Arguments, Callable[[Sequence[Tensor]], Any]]:
    """Splits a call into its tensors and a function that rebuilds it from other tensors."""
    tensors, restore = split_tensors(call, tf.is_tensor)
    return (tensors, [get_attributes(tensor) for tensor in tensors]), restore


def tensors_of(structure: Any) -> list[Tensor]:
    """The tensors of a structure, including the parts of sparse ones."""
    return [
        part for part in tf.nest.flatten(structure, expand_composites=True) if tf.is_tensor(part)
    ]
