"""Structures of tensors, and the floating-point parts that gradients run through."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

# What TensorFlow's own functions ask before they prepare for gradients; it has no public form.
from tensorflow.python.ops.gradients_util import PossibleTapeGradientTypes  # noqa: TID251

from keras_multigpu.engines.values import Tensor


def is_float(value: Any) -> bool:
    """Whether a gradient can run through it."""
    return tf.is_tensor(value) and (value.dtype.is_floating or value.dtype.is_complex)


def floats(structure: Any) -> list[Tensor]:
    """The dense floating-point tensors of a structure, and those in its sparse ones."""
    return [part for part in tf.nest.flatten(structure, expand_composites=True) if is_float(part)]


def substitute(structure: Any, replacements: Iterator[Tensor]) -> Any:
    """The structure with the tensors that `floats` finds replaced, in order."""
    return map_tensors(
        lambda part: next(replacements) if is_float(part) else part,
        structure,
    )


def map_tensors(function: Callable[[Tensor], Tensor], structure: Any) -> Any:
    """The structure with a function applied to its tensors, and to the parts of sparse ones."""
    return tf.nest.map_structure(
        lambda part: function(part) if tf.is_tensor(part) else part,
        structure,
        expand_composites=True,
    )


def for_any_rows(value: Any) -> Any:
    """A tensor's type without the number of its rows; anything else as it is."""
    if not tf.is_tensor(value):
        return value
    spec = tf.type_spec_from_value(value)
    shape = [None, *spec.shape[1:]] if spec.shape.rank else spec.shape
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


def cast(gradient: Tensor | None, dtype: str) -> Tensor | None:
    """A dense or sparse gradient in another type."""
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.cast(gradient.values, dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return None if gradient is None else tf.cast(gradient, dtype)


def add(gradients: list[Tensor]) -> Tensor | None:
    """The sum of dense gradients, or all the rows of sparse ones; `None` of none."""
    if not gradients:
        return None
    if all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        values = tf.concat([gradient.values for gradient in gradients], axis=0)
        indices = tf.concat([gradient.indices for gradient in gradients], axis=0)
        return tf.IndexedSlices(values, indices, gradients[0].dense_shape)
    return tf.add_n([tf.convert_to_tensor(gradient) for gradient in gradients])


def to_dense(gradient: tf.IndexedSlices, rows: int) -> Tensor:
    """A sparse gradient as a dense one of so many rows."""
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)


def message_of(error: Exception) -> str:
    """What an error says, without the arguments of the layers that Keras adds to it."""
    text = re.search(r"\x1b\[1m(.*)\x1b\[0m", str(error), flags=re.DOTALL)
    return text[1] if text else str(error)


def is_watched(tensor: Tensor) -> bool:
    """Whether a tape around the call may take a gradient by a tensor."""
    return PossibleTapeGradientTypes([tensor]) > 0


def gradient_order(tensors: list[Tensor]) -> int:
    """How often the tapes around a call may differentiate by tensors: 0, 1, or 2 for more."""
    order = int(PossibleTapeGradientTypes(tensors))
    # Eagerly a tape may be persistent without its being known here.
    return 2 if order and tf.executing_eagerly() else order
