"""What joined processes compare of a step: its batch, and what it reads beside it and its model."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from keras_multigpu.arguments import number_of
from keras_multigpu.engines.cluster.listing import COMPARED
from keras_multigpu.engines.shared import count_rows
from keras_multigpu.engines.tensorflow.tensors import tensors_of
from keras_multigpu.engines.values import Tensor

_MOST = 4096  # keys of a table that are read before each step; of more only the number
_TOLD = 4  # elements


def rows_of(data: Any) -> Any:
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

    def kind(one: Any) -> str:
        return one.dtype.name if tf.is_tensor(one) else repr(one)

    kinds = tf.nest.map_structure(kind, data)
    found = tf.constant(zlib.crc32(repr(kinds).encode()), tf.int64)
    for one in filter(tf.is_tensor, tf.nest.flatten(data)):
        found = _add_to(found, tf.shape(one)[1:] if len(one.shape) else one)
    return found


def _add_to(digest: Tensor, values: Tensor) -> Tensor:
    text = tf.strings.join([tf.strings.as_string(digest), tf.io.serialize_tensor(values)])
    return tf.strings.to_hash_bucket_fast(text, 2**31)


def is_composite(value: Tensor) -> bool:
    """Whether a tensor is sparse or ragged."""
    return isinstance(value, (tf.SparseTensor, tf.RaggedTensor))


@dataclasses.dataclass(frozen=True)
class OutsideVariable:
    """A variable, by its handle."""

    name: str
    handle: Any
    dtype: tf.DType

    def read(self) -> tuple[Any, str]:
        """Its value."""
        value = np.asarray(tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype))
        some = str(value.reshape(-1)[:_TOLD].tolist())[1:-1]
        told = f"{self.name} of {some}{', ...' if value.size > _TOLD else ''}"
        is_number = value.dtype.kind in "biufc"
        return value.tolist(), told + (f", of a sum of {np.sum(value):.6g}" if is_number else "")


@dataclasses.dataclass(frozen=True)
class OutsideTable:
    """A table, by its handle, and the types of its keys and values."""

    handle: Any
    keys: tf.DType
    values: tf.DType

    def read(self) -> tuple[Any, str]:
        """Its rows, in the order of the keys; of a large table only their number."""
        size = int(tf.raw_ops.LookupTableSizeV2(table_handle=self.handle))
        if size > _MOST:
            return size, f"a table of {number_of(size, 'key')}"
        rows = self.rows()
        return rows, f"a table of {number_of(size, 'key')}, {str(rows[:_TOLD])[1:-1]}"

    def rows(self) -> list[Any]:
        """Its keys and their values, in order."""
        found = tf.raw_ops.LookupTableExportV2(
            table_handle=self.handle, Tkeys=self.keys, Tvalues=self.values
        )
        return sorted(zip(*(np.asarray(one).tolist() for one in found)))


Outside: TypeAlias = OutsideVariable | OutsideTable
"""Something that a step reads, and that processes compare."""
