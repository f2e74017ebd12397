"""What Keras attaches to tensors: masks and logits, kept where tensors are cut or joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_multigpu.engines.values import Tensor

_LOGITS = "_keras_logits"
"""The input of a softmax or sigmoid, from which Keras computes cross entropy (TensorFlow)."""


def get_mask(tensor: Tensor) -> Tensor | None:
    """The Keras mask that a tensor carries, if any.

    Keras's guide "Masking and padding" names the attribute; Keras exports no reader. Tensors of
    JAX take no attributes: for them Keras keeps a table, which its layers read.
    """
    if hasattr(tensor, "__dict__") or not keras.ops.is_tensor(tensor):
        return getattr(tensor, "_keras_mask", None)
    reader = _MaskReader()
    reader(tensor)
    return reader.mask


def set_mask(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Gives a tensor its Keras mask, and returns it."""
    if mask is not None and hasattr(tensor, "__dict__"):
        tensor._keras_mask = mask
    elif mask is not None:
        _MaskWriter(mask)(tensor)
    return tensor


def get_attributes(tensor: Tensor) -> dict[str, Tensor]:
    """Everything that Keras attached to a tensor, by name."""
    found = {"mask": get_mask(tensor), "logits": getattr(tensor, _LOGITS, None)}
    return {name: value for name, value in found.items() if value is not None}


def set_attributes(tensor: Tensor, attributes: dict[str, Tensor]) -> Tensor:
    """Attaches the result of `get_attributes` to a tensor, and returns the tensor."""
    set_mask(tensor, attributes.get("mask"))
    if "logits" in attributes:
        setattr(tensor, _LOGITS, attributes["logits"])
    return tensor


def with_attributes(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Applies a function to tensors, and to what Keras attached to them."""
    own: Sequence[dict[str, Tensor]] = [get_attributes(tensor) for tensor in tensors]
    names = [name for name in own[0] if all(name in one for one in own)]
    values: dict[str, Any] = {name: function(*(one[name] for one in own)) for name in names}
    return set_attributes(function(*tensors), values)


class _MaskReader(keras.Layer):
    mask: Tensor | None = None

    def __init__(self) -> None:
        super().__init__(autocast=False, name="mask_reader")
        self.supports_masking = True

    def call(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        object.__setattr__(self, "mask", mask)  # unseen by Keras, which would track it
        return inputs


class _MaskWriter(keras.Layer):
    mask: Tensor

    def __init__(self, mask: Tensor):
        super().__init__(autocast=False, name="mask_writer")
        self.supports_masking = True
        object.__setattr__(self, "mask", mask)

    def call(self, inputs: Tensor) -> Tensor:
        return inputs

    def compute_mask(self, inputs: Tensor, previous_mask: Any = None) -> Tensor:
        return self.mask
