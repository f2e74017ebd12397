"""What joined processes compare of a step's batch: checksums, shapes, and a text for people."""

from __future__ import annotations

import zlib
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.cluster.descriptions import COMPARED
from keras_multigpu.engines.shared import count_rows
from keras_multigpu.engines.tensorflow.tensors import tensors_of
from keras_multigpu.engines.values import Tensor


def rows(data: Any) -> Any:
    """The number of rows of the first tensor that has any."""
    tensors = [one for one in tf.nest.flatten(data) if tf.is_tensor(one) and one.shape.rank]
    return count_rows(tensors[0]) if tensors else tf.constant(0)


def digest(data: Any) -> Tensor:
    """A checksum of a batch: shapes, types, and about `COMPARED` values of each tensor."""
    found = tf.constant(0, tf.int64)
    for one in tensors_of(data):
        step = tf.maximum(1, tf.size(one) // COMPARED)
        found = _add_to(_add_to(found, tf.shape(one)), tf.reshape(one, [-1])[::step])
    return found


def digest_of_part(data: Any) -> Tensor:
    """A checksum of what the parts of a batch have in common, scalars with their values."""
    kinds = tf.nest.map_structure(_kind, data)
    found = tf.constant(zlib.crc32(repr(kinds).encode()), tf.int64)
    for one in filter(tf.is_tensor, tf.nest.flatten(data)):
        found = _add_to(found, tf.shape(one)[1:] if len(one.shape) else one)
    return found


def _add_to(digest: Tensor, values: Tensor) -> Tensor:
    text = tf.strings.join([tf.strings.as_string(digest), tf.io.serialize_tensor(values)])
    return tf.strings.to_hash_bucket_fast(text, 2**31)


def _kind(value: Any) -> str:
    if not tf.is_tensor(value):
        return repr(value)
    return value.dtype.name


def is_composite(value: Tensor) -> bool:
    """Whether a tensor is sparse or ragged."""
    return isinstance(value, (tf.SparseTensor, tf.RaggedTensor))


def describe(data: Any) -> str:
    """The types and shapes of a batch, for people."""

    def name(one: Any) -> Any:
        if not tf.is_tensor(one):
            return one
        if one.shape.rank is None:
            return f"{one.dtype.name}(?)"
        axes = ["rows", *("?" if axis is None else str(axis) for axis in one.shape[1:])]
        kind = type(one).__name__.removesuffix("Tensor").lower() if is_composite(one) else ""
        return f"{kind} {one.dtype.name}({', '.join(axes[: len(one.shape)])})".strip()

    return repr(tf.nest.map_structure(name, data)).replace("'", "")
