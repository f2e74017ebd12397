"""Parquet files: dictionaries are read as they are stored, and never decoded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from keras_multigpu.sparse.sources import (
    BadDataError,
    Block,
    Source,
    are_finite,
    hint_at,
    to_numbers,
)
from keras_multigpu.sparse.text import is_text


class ParquetSource(Source):
    """A Parquet file; a chunk is a part of a row group."""

    _reader: Iterator[pa.RecordBatch] | None = None
    _next: tuple[int, int] = (-1, -1)

    def scan(self) -> Iterator[tuple[int, int, Any]]:
        """See `Source.scan`; reads no column but the labels and the weight."""
        try:
            with self._open() as file:
                size = os.path.getsize(self.path)
                for group in range(file.num_row_groups):
                    self.position = size * group // file.num_row_groups
                    numbers = file.read_row_group(group, columns=list(self.schema.numbers))
                    is_good = self._good(numbers, group)
                    for number in range(0, len(is_good), self.chunk_rows):
                        rows = int(is_good[number : number + self.chunk_rows].sum())
                        if rows:
                            yield group, rows, (group, number // self.chunk_rows)
        except (pa.ArrowException, OSError) as error:
            raise BadDataError(f"{self.path} must be a readable Parquet file. {error}") from error

    def read(self, place: tuple[int, int]) -> Block:
        """See `Source.read`; chunks of a row group are read fastest in order."""
        group, number = place
        if self._reader is None or self._next[0] != group or self._next[1] > number:
            names = self.schema.names
            self.close()
            self._reader = self.keep_open(self._open()).iter_batches(
                self.chunk_rows, row_groups=[group], columns=names, use_threads=False
            )
            self._next = (group, 0)
        while self._next[1] < number:
            next(self._reader)
            self._next = (group, self._next[1] + 1)
        table = pa.Table.from_batches([next(self._reader)])
        self._next = (group, number + 1)
        numbers = self._numbers(table)
        is_good = are_finite(numbers)
        features = table.select(list(self.schema.features))
        if not is_good.all():
            features, numbers = features.filter(pa.array(is_good)), numbers[is_good]
        return Block(features, numbers.astype("float32"))

    def close(self) -> None:
        """See `Source.close`."""
        super().close()
        self._reader = None

    def _open(self) -> pq.ParquetFile:
        with pq.ParquetFile(self.path) as file:
            schema, metadata = file.schema_arrow, file.metadata
        self.check_columns(schema.names)
        encoded = [name for name in self.schema.features if is_text(schema.field(name).type)]
        return pq.ParquetFile(self.path, metadata=metadata, read_dictionary=encoded)

    def _numbers(self, table: pa.Table) -> np.ndarray:
        columns = [to_numbers(table.column(name)) for name in self.schema.numbers]
        return np.stack(columns, axis=1) if columns else np.empty((len(table), 0))

    def _good(self, table: pa.Table, group: int) -> np.ndarray:
        numbers = self._numbers(table)
        is_good = are_finite(numbers)
        bad = np.flatnonzero(~is_good)
        if len(bad) and not self.skips:
            row = int(bad[0])
            place = int(np.flatnonzero(~are_finite(numbers[row][:, None]))[0])
            name = self.schema.numbers[place]
            value = table.column(name)[row].as_py()
            raise BadDataError(
                f"{self.path}, row group {group}, row {row + 1}: {name!r} must be a finite number. "
                f"Received: {value!r}. {hint_at(value)}Mend the file, or leave such rows out: "
                'errors="skip".'
            )
        if len(bad):
            self.skipped["no finite label or weight"] += len(bad)
        return is_good
