"""Tables of categorical columns with Zipf-distributed values, for `hashing` and `stream`."""

from __future__ import annotations

import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

COLUMNS = 20
_ROW_GROUP = 2**17


def cardinalities(largest: int = 100_000) -> dict[str, int]:
    """The number of values of each column: a geometric series from 10 to the largest."""
    counts = np.geomspace(10, largest, COLUMNS).round().astype(int)
    return {f"column_{number}": int(count) for number, count in enumerate(counts)}


def make_table(rows: int, seed: int) -> pa.Table:
    """Rows of strings, drawn from Zipf's law, and a label that depends on them."""
    rng = np.random.default_rng(seed)
    columns: dict[str, pa.Array] = {}
    score = np.zeros(rows)
    for place, (name, count) in enumerate(cardinalities().items()):
        chances = 1 / np.arange(1, count + 1)
        bounds = np.cumsum(chances / chances.sum())
        ranks = np.minimum(np.searchsorted(bounds, rng.random(rows)), count - 1)
        words = pa.array([f"value_{place}_{rank * 7919 % count}" for rank in range(count)])
        columns[name] = pa.DictionaryArray.from_arrays(pa.array(ranks, pa.int32()), words)
        score += np.sin(ranks * (place + 1.0)) / 4
    columns["label"] = pa.array((score + rng.normal(size=rows) > 0).astype("float32"))
    return pa.table(columns)


def write_parquet(path: pathlib.Path, rows: int, seed: int = 0) -> pathlib.Path:
    """Writes `make_table` to a file, some rows at a time."""
    writer = None
    for number, first in enumerate(range(0, rows, _ROW_GROUP)):
        table = make_table(min(_ROW_GROUP, rows - first), seed + number)
        plain = {name: table.column(name) for name in table.column_names}
        strings = {
            name: column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
            for name, column in plain.items()
        }
        table = pa.table(strings)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()
    return path
