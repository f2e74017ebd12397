"""Helpers for structures of tensors, and for their floating-point parts, which get gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

# TensorFlow's own check for tapes that watch a tensor; there is no public one.
from tensorflow.python.framework.ops import gradient_registry  # noqa: TID251
from tensorflow.python.ops.gradients_util import PossibleTapeGradientTypes  # noqa: TID251

from keras_multigpu.engines.values import Tensor


def tensors_of(structure: Any) -> list[Tensor]:
    """The tensors of a structure, including the parts of sparse ones."""
    return [
        part for part in tf.nest.flatten(structure, expand_composites=True) if tf.is_tensor(part)
    ]


def values_of(structure: Any) -> Any:
    """A structure with the values of its variables: whoever asks a tape knows tensors only."""
    kinds = (tf.Variable, keras.Variable)
    if not any(isinstance(one, kinds) for one in tf.nest.flatten(structure)):
        return structure

    def value(one: Any) -> Any:
        return tf.convert_to_tensor(one) if isinstance(one, kinds) else one

    return tf.nest.map_structure(value, structure)


def floats(structure: Any) -> list[Tensor]:
    """The floating-point tensors of a structure, including the parts of sparse ones."""
    return [one for one in tensors_of(structure) if one.dtype.is_floating or one.dtype.is_complex]


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


@tf.autograph.experimental.do_not_convert
def is_compiled_around() -> bool:
    """Whether the graph that is made lies in a function that XLA compiles, for one device."""
    condition: Any = tf.cond(tf.compat.v1.placeholder_with_default(True, []), lambda: 0, lambda: 1)
    while not condition.op.type.endswith("If"):
        condition = condition.op.inputs[0]
    # XLA has its own conditions; TensorFlow marks those that it lowers.
    return "_lower_using_switch_merge" not in condition.op.node_def.attr


def take_rows(tensor: Tensor, start: Tensor, size: Tensor) -> Tensor:
    """Rows `start` to `start + size` of a dense, sparse or ragged tensor."""
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[start : start + size]
    shape = tensor.dense_shape
    first = tf.reshape(tf.cast(start, tf.int64), [1])
    length = tf.reshape(tf.cast(size, tf.int64), [1])
    starts = tf.concat([first, tf.zeros_like(shape[1:])], axis=0)
    part = tf.sparse.slice(tensor, starts, tf.concat([length, shape[1:]], axis=0))
    if any(axis is None for axis in tensor.shape[1:]):
        return part
    # Restores the static shape that slicing loses.
    known = tf.get_static_value(size)
    static = [part.dense_shape[0] if known is None else int(known), *tensor.shape[1:]]
    dense_shape = tf.stack([tf.cast(axis, tf.int64) for axis in static])
    return tf.SparseTensor(part.indices, part.values, dense_shape)


def join_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one kind, one after the other along their first axis."""
    if isinstance(tensors[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=list(tensors))
    return tf.concat(list(tensors), axis=0)


def for_any_rows(value: Any) -> Any:
    """A tensor's type with an unknown row count; returns other values unchanged."""
    if not tf.is_tensor(value):
        return value
    spec = tf.type_spec_from_value(value)
    shape = [None, *spec.shape[1:]] if spec.shape.rank else spec.shape
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)
