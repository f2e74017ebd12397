"""Parquet files, read in chunks: short dictionaries as they are stored, other text decoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from keras_multigpu.sparse.sources import BadDataError, Block, Schema, Source
from keras_multigpu.sparse.tables import is_text, to_columns

# How much of a column is read together; Arrow would read whole row groups otherwise.
_BUFFER_BYTES = 2**18
# A dictionary with more bytes for each row of a chunk is assumed to be longer than the chunk.
_LONG_BYTES = 4
_DICTIONARY = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}
_WITH_DICTIONARY = _DICTIONARY | {"PLAIN", "RLE", "BIT_PACKED"}


class ParquetSource(Source):
    """A Parquet file; a chunk is a part of a row group. For the arguments, see `Source`.

    Text that is stored with a dictionary is read as one, unless the dictionary is longer than a
    chunk. Arrow builds one dictionary for a row group, and adds the values that are stored without
    one. With many distinct values that takes more memory and time than the text itself.
    """

    _kind = "Parquet file"
    when_open = (*Source.when_open, "_metadata")
    _metadata: pq.FileMetaData | None = None
    _reader: Iterator[pa.Table] | None = None
    _next: tuple[int, int] = (-1, -1)  # the row group, and the chunk in it, that comes next

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
                good = self._count_good(group, number, min(self.chunk_rows, rows - first))
                if good:
                    yield group, good, (group, number)
        self.close()

    def _count_good(self, group: int, number: int, rows: int) -> int:
        """Reads a chunk of so many rows, all columns, to find damage before training."""
        table = self._load(group, number, threads=True)
        if len(table) != rows:
            raise self._too_few_rows(group)
        numbers, is_good = self.numbers_of(table)
        if not is_good.all() and not self.skips:
            row, problem = self.first_bad(table, numbers)
            row += number * self.chunk_rows + 1
            raise BadDataError(f"{self.path}, row group {group}, row {row}: {problem}")
        self.note_extremes(numbers[is_good])
        good = int(is_good.sum())
        if good < rows:
            self.skipped["no finite label or weight"] += rows - good
        return good

    def _read(self, place: tuple[int, int]) -> Block:
        table = self._load(*place, threads=False)
        return self.good_rows(table, self.schema.features, *self.numbers_of(table))

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
        if self._metadata is None:
            self._metadata = _without_categories(self.path, self.schema.features)
        file = self.keep_open(
            pq.ParquetFile(
                self.path,
                metadata=self._metadata,
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
            f"{self.path} must have as many rows as its metadata says. Received: fewer rows in row "
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
        """The text columns whose dictionaries seem to be short in every row group."""
        schema = metadata.schema.to_arrow_schema()
        kinds = {name: _value_type(schema.field(name).type) for name in self.schema.features}
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


def _chunks(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """Tables of so many rows; Arrow's batches may have fewer than it was asked for."""
    kept: list[pa.RecordBatch] = []
    for batch in batches:
        kept.append(batch)
        del batch  # what is alive here takes memory beside the next batch
        if sum(map(len, kept)) >= rows:
            chunk, kept = _split(kept, rows)
            yield chunk
            del chunk
    if kept:
        yield pa.Table.from_batches(kept)


def _split(batches: list[pa.RecordBatch], rows: int) -> tuple[pa.Table, list[pa.RecordBatch]]:
    """The first rows as a table, and the rest."""
    table = pa.Table.from_batches(batches)
    rest = table[rows:]
    return table[:rows], rest.to_batches() if len(rest) else []  # empty ones keep all memory


def _dictionary_length(table: pa.Table, name: str) -> int:
    """The length of the longest dictionary of a column."""
    return max((len(chunk.dictionary) for chunk in table.column(name).chunks), default=0)


def _dictionary_bytes(column: pq.ColumnChunkMetaData) -> int:
    """The size of a column's dictionary page; 0 if the file does not say."""
    has_page = column.has_dictionary_page and column.dictionary_page_offset is not None
    return column.data_page_offset - column.dictionary_page_offset if has_page else 0


def _value_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column's values, without their dictionary."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _without_categories(path: str, names: Iterable[str]) -> pq.FileMetaData:
    """A file's metadata without the note that columns were categories.

    Arrow reads such columns as dictionaries in any case. If Arrow can't write the file's schema
    (with timestamps of type INT96, for example), the note stays: the result is right, but slow
    and large with many distinct values.
    """
    metadata = pq.read_metadata(path)
    schema = metadata.schema.to_arrow_schema()
    if not any(pa.types.is_dictionary(schema.field(name).type) for name in names):
        return metadata
    sink = pa.BufferOutputStream()
    fields = [field.with_type(_value_type(field.type)) for field in schema]
    pq.ParquetWriter(sink, pa.schema(fields), store_schema=False).close()
    plain = pq.read_metadata(pa.BufferReader(sink.getvalue()))
    try:
        plain.append_row_groups(metadata)
    except RuntimeError:  # the schemas differ
        return metadata
    return plain
