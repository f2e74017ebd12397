"""Helpers for structures of tensors, and for their floating-point parts, which get gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# TensorFlow's own check for tapes that watch a tensor; there is no public one.
from tensorflow.python.framework.ops import gradient_registry  # noqa: TID251
from tensorflow.python.ops.gradients_util import PossibleTapeGradientTypes  # noqa: TID251

from keras_multigpu.engines.values import Tensor


def is_float(value: Any) -> bool:
    """Whether a tensor can have a gradient."""
    return tf.is_tensor(value) and (value.dtype.is_floating or value.dtype.is_complex)


def tensors_of(structure: Any) -> list[Tensor]:
    """The tensors of a structure, including the parts of sparse ones."""
    return [
        part for part in tf.nest.flatten(structure, expand_composites=True) if tf.is_tensor(part)
    ]


def floats(structure: Any) -> list[Tensor]:
    """The floating-point tensors of a structure, including the parts of sparse ones."""
    return [part for part in tf.nest.flatten(structure, expand_composites=True) if is_float(part)]


def map_tensors(function: Callable[[Tensor], Tensor], structure: Any) -> Any:
    """Applies a function to all tensors, including the parts of sparse ones."""
    return tf.nest.map_structure(
        lambda part: function(part) if tf.is_tensor(part) else part,
        structure,
        expand_composites=True,
    )


def knows_gradient(name: str) -> bool:
    """Whether a gradient of a name is registered."""
    return name in gradient_registry.list()


def is_watched(tensor: Tensor) -> bool:
    """Whether an active tape may differentiate by a tensor."""
    return PossibleTapeGradientTypes([tensor]) > 0


def gradient_order(tensors: list[Tensor]) -> int:
    """The highest derivative that active tapes may take: 0, 1, or 2 for two and more."""
    order = int(PossibleTapeGradientTypes(tensors))
    # In eager mode we can't see whether a tape is persistent.
    return 2 if order and tf.executing_eagerly() else order


def take_rows(tensor: Tensor, start: Tensor, size: Tensor) -> Tensor:
    """Rows `start` to `start + size` of a dense, sparse or ragged tensor."""
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[start : start + size]
    shape = tensor.dense_shape
    first = tf.reshape(tf.cast(start, tf.int64), [1])
    length = tf.reshape(tf.cast(size, tf.int64), [1])
    starts = tf.concat([first, tf.zeros_like(shape[1:])], axis=0)
    part = tf.sparse.slice(tensor, starts, tf.concat([length, shape[1:]], axis=0))
    known = tf.get_static_value(size)
    return with_static_shape(part, [None if known is None else int(known), *tensor.shape[1:]])


def join_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one kind, one after the other along their first axis."""
    if isinstance(tensors[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=list(tensors))
    return tf.concat(list(tensors), axis=0)


def with_static_shape(tensor: tf.SparseTensor, shape: Sequence[int | None]) -> tf.SparseTensor:
    """Restores the static shape that slicing a sparse tensor loses."""
    if any(axis is None for axis in shape[1:]):
        return tensor
    rows = tf.cast(tensor.dense_shape[0], tf.int64)
    static = [rows if axis is None else axis for axis in shape]
    dense_shape = tf.stack([tf.cast(axis, tf.int64) for axis in static])
    return tf.SparseTensor(tensor.indices, tensor.values, dense_shape)


def for_any_rows(value: Any) -> Any:
    """A tensor's type with an unknown row count; returns other values unchanged."""
    if not tf.is_tensor(value):
        return value
    spec = tf.type_spec_from_value(value)
    shape = [None, *spec.shape[1:]] if spec.shape.rank else spec.shape
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)
