"""What a step reads that is no part of its model: variables, and tables of keys and values."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

_MOST = 4096  # keys of a table that are read before each step; of more only the number
_TOLD = 4  # elements


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
            return size, f"a table of {size} keys"
        rows = self.rows()
        return rows, f"a table of {size} keys, {str(rows[:_TOLD])[1:-1]}"

    def rows(self) -> list[Any]:
        """Its keys and their values, in order."""
        found = tf.raw_ops.LookupTableExportV2(
            table_handle=self.handle, Tkeys=self.keys, Tvalues=self.values
        )
        return sorted(zip(*(np.asarray(one).tolist() for one in found)))


Outside: TypeAlias = OutsideVariable | OutsideTable
"""Something that a step reads, and that processes compare."""
