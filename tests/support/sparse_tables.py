"""The recipe of the hashed code written plainly, and the same table in every library."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import xxhash

from keras_multigpu.sparse import HashEncoder

CARDINALITIES = {"city": 300, "age": 50}
ENCODER = HashEncoder(CARDINALITIES, layout="published")


def content(data):
    """All labels and indices of a data set."""
    batches = [data[number] for number in range(len(data))]
    labels = np.concatenate([labels[:, 0] for _, labels in batches])
    return labels.tolist(), np.concatenate([indices for indices, _ in batches])


def plain_code(text, cardinality, splits=4):
    """The indices of a value's text within its column, as the recipe says it, digit by digit."""
    data = text if isinstance(text, bytes) else text.encode("utf-8")
    digits = f"{xxhash.xxh64(data, seed=0).intdigest():016x}"
    bucket = max(32, 4 * math.ceil(math.sqrt(cardinality)))
    if splits == 1:
        return [int(digits, 16) % bucket]
    group, length = bucket // splits, 16 // splits
    parts = [digits[length * i : length * (i + 1)] for i in range(splits)]
    return [int(part, 16) % group + group * i for i, part in enumerate(parts)]


def plain_codes(columns, cardinalities, splits=4):
    """The indices of a table's rows, value by value, from the texts of its columns."""
    rows, start = [[] for _ in next(iter(columns.values()))], 0
    for name, cardinality in cardinalities.items():
        for row, text in zip(rows, columns[name]):
            row += [start + index for index in plain_code(text, cardinality, splits)]
        start += max(32, 4 * math.ceil(math.sqrt(cardinality)))
    return np.array(rows, "int32")


def in_every_library(values, dtype=None):
    """A column of values as each library holds it: `{"pandas": table, ...}`."""
    objects = np.empty(len(values), object)
    objects[:] = values
    arrow = pa.array(values)
    tables = {
        "list": {"x": list(values)},
        "objects": {"x": objects},
        "pandas": pd.DataFrame({"x": pd.Series(values, dtype=dtype)}),
        "pandas objects": pd.DataFrame({"x": pd.Series(objects, dtype=object)}),
        "pandas category": pd.DataFrame({"x": pd.Categorical(values)}),
        "polars": pl.DataFrame({"x": pl.Series(values)}),
        "arrow": pa.table({"x": arrow}),
        "arrow dictionary": pa.table({"x": arrow.dictionary_encode()}),
        "arrow chunks": pa.table({"x": pa.chunked_array([arrow[:1], arrow[1:1], arrow[1:]])}),
        "record batch": pa.RecordBatch.from_arrays([arrow], names=["x"]),
    }
    if None not in values:
        tables["numpy"] = {"x": np.array(values)}
    if all(isinstance(value, str) or value is None for value in values):
        tables["polars category"] = pl.DataFrame({"x": pl.Series(values, dtype=pl.Categorical)})
        tables["arrow large"] = pa.table({"x": arrow.cast(pa.large_string())})
        tables["arrow view"] = pa.table({"x": arrow.cast(pa.string_view())})
    return tables
