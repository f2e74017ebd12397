"""Parquet files: read in chunks, short dictionaries as they are stored, other text as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from keras_multigpu.sparse.sources import (
    BadDataError,
    Block,
    Schema,
    Source,
    are_finite,
    hint_at,
    to_numbers,
)
from keras_multigpu.sparse.tables import to_columns
from keras_multigpu.sparse.text import is_text

# How much of a column is read together; Arrow would read whole row groups otherwise.
_BUFFER_BYTES = 2**18
# A stored dictionary of more bytes for each row of a chunk is taken to be longer than the chunk.
_LONG_BYTES = 4
_DICTIONARY = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}
_WITH_DICTIONARY = _DICTIONARY | {"PLAIN", "RLE", "BIT_PACKED"}


class ParquetSource(Source):
    """A Parquet file; a chunk is a part of a row group.

    Text that is stored as a dictionary is read as one, as long as the dictionary is not longer
    than a chunk. Arrow keeps one dictionary for a row group, and adds to it what is stored without:
    of many distinct values it would take more memory and time than the text itself.

    Args:
        path: the file.
        schema: the columns to read.
        chunk_rows: how many rows to read together.
        skips: count and leave out bad rows; they are errors otherwise.
    """

    _kind = "Parquet file"
    _reader: Iterator[pa.Table] | None = None
    _next: tuple[int, int] = (-1, -1)

    def __init__(self, path: str, schema: Schema, chunk_rows: int, skips: bool):
        super().__init__(path, schema, chunk_rows, skips)
        self._encoded: list[str] = []  # columns to read as dictionaries

    def close(self) -> None:
        """See `Source.close`."""
        super().close()
        self._reader = None

    def _scan(self) -> Iterator[tuple[int, int, Any]]:
        metadata = pq.read_metadata(self.path)
        self._check_types(metadata.schema.to_arrow_schema())
        self._encoded = self._stored_as_dictionaries(metadata)
        assert self._state is not None
        for group in range(metadata.num_row_groups):
            self.position = self._state[0] * group // metadata.num_row_groups
            rows = metadata.row_group(group).num_rows
            for number, first in enumerate(range(0, rows, self.chunk_rows)):
                # All columns are read, so that damage is found before training.
                table = self._load(group, number, threads=True)
                if len(table) != min(self.chunk_rows, rows - first):
                    raise self._too_few_rows(group)
                numbers = self._numbers(table)
                is_good = self._good(table, numbers, group, first)
                if is_good.any():
                    yield group, int(is_good.sum()), (group, number)
        self.close()

    def _read(self, place: tuple[int, int]) -> Block:
        table = self._load(*place, threads=False)
        numbers = self._numbers(table)
        is_good = are_finite(numbers)
        features = table.select(list(self.schema.features))
        if not is_good.all():
            features, numbers = features.filter(pa.array(is_good)), numbers[is_good]
        return Block(features, numbers.astype("float32"))

    def _load(self, group: int, number: int, threads: bool) -> pa.Table:
        """A chunk of a row group."""
        if self._reader is None or self._next[0] != group or self._next[1] > number:
            self.close()
            self._reader = self._open(group, threads)
            self._next = (group, 0)
        while self._next[1] < number:
            next(self._reader, None)
            self._next = (group, self._next[1] + 1)
        table = next(self._reader, None)
        if table is None:
            raise self._too_few_rows(group)
        self._next = (group, number + 1)
        long = {name for name in self._encoded if _dictionary_length(table, name) > self.chunk_rows}
        if long:
            self._encoded = [name for name in self._encoded if name not in long]
            self.close()
        return table

    def _open(self, group: int, threads: bool) -> Iterator[pa.Table]:
        """The chunks of a row group."""
        file = self.keep_open(
            pq.ParquetFile(
                self.path,
                metadata=_without_categories(self.path, self.schema.features),
                read_dictionary=self._encoded,
                pre_buffer=False,
                buffer_size=_BUFFER_BYTES,
                page_checksum_verification=True,
            )
        )
        batches = file.iter_batches(
            self.chunk_rows, row_groups=[group], columns=self.schema.names, use_threads=threads
        )
        return _chunks(batches, self.chunk_rows)

    def _too_few_rows(self, group: int) -> BadDataError:
        return BadDataError(
            f"{self.path} must have the rows that its metadata names. Received: fewer rows in row "
            f"group {group}. Write the file again."
        )

    def _check_types(self, schema: pa.Schema) -> None:
        self.check_columns(schema.names)
        names = self.schema.names
        row = pa.table({name: pa.nulls(1, schema.field(name).type) for name in names})
        try:
            to_columns(row, list(self.schema.features), others="ignore")
        except TypeError as error:
            raise BadDataError(f"{self.path}: {error}") from error
        for name in self.schema.numbers:
            kind = schema.field(name).type
            if pa.types.is_nested(kind):
                raise BadDataError(
                    f"{self.path}: a label or a weight must be a column of numbers. Received: "
                    f"column {name!r} of type {kind}. Write its parts as columns."
                )

    def _stored_as_dictionaries(self, metadata: pq.FileMetaData) -> list[str]:
        """The columns of text whose dictionaries in all row groups seem to be short."""
        schema = metadata.schema.to_arrow_schema()
        kinds = {name: _plain(schema.field(name).type) for name in self.schema.features}
        names = {name for name, kind in kinds.items() if is_text(kind)}
        for group in range(metadata.num_row_groups):
            columns = metadata.row_group(group)
            for place in range(columns.num_columns):
                column = columns.column(place)
                encodings = set(column.encodings)
                is_other = not encodings & _DICTIONARY or encodings - _WITH_DICTIONARY
                if is_other or _dictionary_bytes(column) > _LONG_BYTES * self.chunk_rows:
                    names.discard(column.path_in_schema)
        return [name for name in self.schema.features if name in names]

    def _numbers(self, table: pa.Table) -> np.ndarray:
        columns = [to_numbers(table.column(name)) for name in self.schema.numbers]
        return np.stack(columns, axis=1) if columns else np.empty((len(table), 0))

    def _good(self, table: pa.Table, numbers: np.ndarray, group: int, first: int) -> np.ndarray:
        is_good = are_finite(numbers)
        bad = np.flatnonzero(~is_good)
        if len(bad) and not self.skips:
            row = int(bad[0])
            place = int(np.flatnonzero(~are_finite(numbers[row][:, None]))[0])
            name = self.schema.numbers[place]
            value = table.column(name)[row].as_py()
            raise BadDataError(
                f"{self.path}, row group {group}, row {first + row + 1}: {name!r} must be a finite "
                f"number. Received: {value!r}. {hint_at(value)}Mend the file, or leave "
                'such rows out: errors="skip".'
            )
        if len(bad):
            self.skipped["no finite label or weight"] += len(bad)
        return is_good


def _chunks(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """Tables of so many rows; batches of Arrow may be shorter than it was asked for."""
    kept: list[pa.RecordBatch] = []
    for batch in batches:
        kept.append(batch)
        if sum(map(len, kept)) >= rows:
            table = pa.Table.from_batches(kept)
            yield table[:rows]
            rest = table[rows:]
            kept = rest.to_batches() if len(rest) else []  # empty ones keep the memory of all
    if kept:
        yield pa.Table.from_batches(kept)


def _dictionary_length(table: pa.Table, name: str) -> int:
    """The length of the longest dictionary of a column."""
    return max((len(chunk.dictionary) for chunk in table.column(name).chunks), default=0)


def _dictionary_bytes(column: pq.ColumnChunkMetaData) -> int:
    """The size of a column's dictionary page; 0 if the file does not say."""
    has_page = column.has_dictionary_page and column.dictionary_page_offset is not None
    return column.data_page_offset - column.dictionary_page_offset if has_page else 0


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type of a column's values."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _without_categories(path: str, names: Iterable[str]) -> pq.FileMetaData | None:
    """A file's metadata without the note that columns were categories; `None` if none was.

    Arrow reads such columns as dictionaries, whatever it is asked for. Where it can't write the
    schema of the file (timestamps of type INT96, say), they stay so: right, but of many distinct
    values slow and large.
    """
    metadata = pq.read_metadata(path)
    schema = metadata.schema.to_arrow_schema()
    if not any(pa.types.is_dictionary(schema.field(name).type) for name in names):
        return None
    sink = pa.BufferOutputStream()
    fields = [field.with_type(_plain(field.type)) for field in schema]
    pq.ParquetWriter(sink, pa.schema(fields), store_schema=False).close()
    plain = pq.read_metadata(pa.BufferReader(sink.getvalue()))
    try:
        plain.append_row_groups(metadata)
    except RuntimeError:  # the schemas differ
        return None
    return plain
