"""Rows that are divided among experts, say, and put together again."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import Value
from keras_multigpu.engines.tensorflow.partition.rules.table import rule


@rule("DynamicPartition")
def divide(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Notes the pieces of the numbers of all rows: each number is in one of them."""
    made, how = planner.fallback(op, values)
    known = values[0].known
    if known is not None and known[0] == "numbers":
        for place, one in enumerate(made):
            one.known = ("piece", id(op), place, len(made), known[1])
    return made, how


@rule("DynamicStitch", "ParallelDynamicStitch")
def stitch(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """All pieces of the numbers of rows: as many rows."""
    count = len(values) // 2
    pieces, data = [one.known for one in values[:count]], values[count:]
    known = pieces[0]
    if known is None or known[0] != "piece" or data[0].dims is None:
        return None
    _, source, _, number, rows = known
    if pieces != [("piece", source, place, number, rows) for place in range(count)]:
        return None
    rest = data[0].dims[1:]
    is_whole = number == count and all(v.dims and v.dims[1:] == rest for v in data)
    return planner.fallback(op, values, [(rows, *rest)]) if is_whole else None
