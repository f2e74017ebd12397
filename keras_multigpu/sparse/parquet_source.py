"""Parquet files, read in chunks: short dictionaries as they are stored, other text decoded."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from keras_multigpu.sparse.sources import BadDataError, Block, Source
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

    kind = "Parquet file"
    _metadata: Any = None
    _next: tuple[int, int] = (-1, -1)  # the row group, and the chunk in it, that comes next
    _encoded: Sequence[str] = ()  # columns to read as dictionaries

    def _scan(self) -> Iterator[tuple[int, int, Any]]:
        metadata = pq.read_metadata(self.path)
        self._check_types(metadata.schema.to_arrow_schema())
        self._encoded = self._find_dictionaries(metadata)
        assert self._state is not None
        for group in range(metadata.num_row_groups):
            self.position = self._state[0] * group // metadata.num_row_groups
            rows = metadata.row_group(group).num_rows
            for number in range(-(-rows // self.chunk_rows)):
                good = len(self._read((group, number), is_scan=True).numbers)
                if good:
                    yield group, good, (group, number)
        self.close()

    def _read(self, place: tuple[int, int], is_scan: bool = False) -> Block:
        """The good rows of a chunk; a scan reads all columns, to find damage before training."""
        group, number = place
        first = number * self.chunk_rows + 1
        table = self._load(group, number, threads=is_scan)
        return self.take_good(table, lambda row: f"row group {group}, row {first + row}", is_scan)

    def _load(self, group: int, number: int, threads: bool) -> pa.Table:
        """A chunk of a row group."""
        if self._open is None or self._next[0] != group or self._next[1] > number:
            self.close()
            self._open = self._open_group(group, threads)
            self._next = (group, 0)
        table = next(itertools.islice(self._open, number - self._next[1], None), None)
        rows = self._metadata.row_group(group).num_rows - number * self.chunk_rows
        if table is None or len(table) < min(rows, self.chunk_rows):
            raise BadDataError(
                f"{self.path} must have as many rows as its metadata says. Received: fewer rows in "
                f"row group {group}. Write the file again."
            )
        self._next = (group, number + 1)
        long = {name for name in self._encoded if _count_dictionary(table, name) > self.chunk_rows}
        if long:
            self._encoded = [name for name in self._encoded if name not in long]
            self.close()
        return table

    def _open_group(self, group: int, threads: bool) -> Iterator[pa.Table]:
        """The chunks of a row group."""
        if self._metadata is None:
            self._metadata = _drop_categories(self.path, self.schema.features)
        file = pq.ParquetFile(
            self.path,
            metadata=self._metadata,
            read_dictionary=self._encoded,
            pre_buffer=False,
            buffer_size=_BUFFER_BYTES,
            page_checksum_verification=True,
        )
        batches = file.iter_batches(
            self.chunk_rows, row_groups=[group], columns=self.schema.names, use_threads=threads
        )
        return _regroup(batches, self.chunk_rows)

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

    def _find_dictionaries(self, metadata: pq.FileMetaData) -> list[str]:
        """The text columns whose dictionaries seem to be short in every row group."""
        schema = metadata.schema.to_arrow_schema()
        kinds = {name: _find_value_type(schema.field(name).type) for name in self.schema.features}
        names = {name for name, kind in kinds.items() if is_text(kind)}
        for group in range(metadata.num_row_groups):
            columns = metadata.row_group(group)
            for place in range(columns.num_columns):
                column = columns.column(place)
                encodings = set(column.encodings)
                is_other = not encodings & _DICTIONARY or encodings - _WITH_DICTIONARY
                if is_other or _count_dictionary_bytes(column) > _LONG_BYTES * self.chunk_rows:
                    names.discard(column.path_in_schema)
        return [name for name in self.schema.features if name in names]


def _regroup(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """Tables of so many rows; Arrow's batches may have fewer than it was asked for."""
    kept: list[pa.RecordBatch] = []
    for batch in batches:
        kept.append(batch)
        del batch  # what is alive here takes memory beside the next batch
        if sum(map(len, kept)) >= rows:
            table = pa.Table.from_batches(kept)
            kept = table[rows:].to_batches() if len(table) > rows else []  # empty ones keep memory
            yield table[:rows]
            del table
    if kept:
        yield pa.Table.from_batches(kept)


def _count_dictionary(table: pa.Table, name: str) -> int:
    """The length of the longest dictionary of a column."""
    return max((len(chunk.dictionary) for chunk in table.column(name).chunks), default=0)


def _count_dictionary_bytes(column: pq.ColumnChunkMetaData) -> int:
    """The size of a column's dictionary page; 0 if the file does not say."""
    has_page = column.has_dictionary_page and column.dictionary_page_offset is not None
    return column.data_page_offset - column.dictionary_page_offset if has_page else 0


def _find_value_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column's values, without their dictionary."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _drop_categories(path: str, names: Iterable[str]) -> pq.FileMetaData:
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
    fields = [field.with_type(_find_value_type(field.type)) for field in schema]
    pq.ParquetWriter(sink, pa.schema(fields), store_schema=False).close()
    plain = pq.read_metadata(pa.BufferReader(sink.getvalue()))
    try:
        plain.append_row_groups(metadata)
    except RuntimeError:  # the schemas differ
        return metadata
    return plain
