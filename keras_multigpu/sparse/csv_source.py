"""CSV files, plain or compressed: cut where rows end, and parsed by Arrow piece by piece."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import csv as arrow_csv

from keras_multigpu.sparse.csv_rows import find_rows
from keras_multigpu.sparse.sources import (
    BadDataError,
    Block,
    Schema,
    Source,
    are_finite,
    hint_at,
    to_numbers,
)

_READ_BYTES = 4 * 2**20
_UNREADABLE = (OSError, EOFError, zlib.error)


class Piece(NamedTuple):
    """Where in the file, once decompressed, some rows are.

    Attributes:
        start: the first byte.
        size: how many bytes.
        line: the number of the first line, from 1.
    """

    start: int
    size: int
    line: int


class CsvSource(Source):
    """A CSV file with a header; what is hashed is the text that is in the file.

    Empty fields are missing values. A row may go over several lines if its fields are quoted.

    Args:
        path: the file; `.gz` is decompressed while it is read.
        schema: the columns to read.
        chunk_rows: about how many rows to read together.
        skips: count and leave out bad rows; they are errors otherwise.
        delimiter: what stands between fields.
    """

    _file: BinaryIO | None = None

    def __init__(
        self, path: str, schema: Schema, chunk_rows: int, skips: bool, delimiter: str = ","
    ):
        super().__init__(path, schema, chunk_rows, skips)
        self.delimiter = delimiter
        self._header: list[str] = []

    def scan(self) -> Iterator[tuple[int, int, Any]]:
        """See `Source.scan`; parses the file once."""
        try:
            with open(self.path, "rb") as raw:
                pieces = self._cut(_decompressed(raw, self.path))
                for number, (piece, data) in enumerate(pieces):
                    self.position = raw.tell()
                    _, numbers = self._parse(data, piece, counts=True)
                    if len(numbers):
                        # A compressed file can be read from its beginning only.
                        yield 0 if self.path.endswith(".gz") else number, len(numbers), piece
        except _UNREADABLE as error:
            raise BadDataError(
                f"{self.path} must be a readable file. Received: {type(error).__name__}: {error}."
            ) from error

    def read(self, place: Piece) -> Block:
        """See `Source.read`; compressed chunks are read fastest in order."""
        if self._file is None:
            self._file = self.keep_open(self._open())
        self._file.seek(place.start)
        table, numbers = self._parse(self._file.read(place.size), place, counts=False)
        return Block(table, numbers.astype("float32"))

    def close(self) -> None:
        """See `Source.close`."""
        super().close()
        self._file = None

    def _open(self) -> BinaryIO:
        is_compressed = self.path.endswith(".gz")
        return gzip.open(self.path, "rb") if is_compressed else open(self.path, "rb")  # type: ignore[return-value]

    def _cut(self, file: BinaryIO) -> Iterator[tuple[Piece, bytes]]:
        """The file in pieces of `chunk_rows` rows; the header is read on the way."""
        start, line, kept = 0, 1, b""
        rows_wanted = 1  # the header first
        while True:
            more = file.read(_READ_BYTES)
            kept += more
            ends, _ = find_rows(kept, self.delimiter, is_whole=not more)
            first = 0
            while len(ends) and (len(ends) >= rows_wanted or not more):
                end = int(ends[min(rows_wanted, len(ends)) - 1])
                data = kept[first:end]
                piece = Piece(start + first, len(data), line)
                line += data.count(b"\n")
                ends = ends[ends > end]
                first = end
                if rows_wanted == 1 and not piece.start:
                    self._read_header(data)
                    rows_wanted = self.chunk_rows
                else:
                    yield piece, data
            start, kept = start + first, kept[first:]
            if not more:
                break
        if not start:
            self._read_header(kept)
        elif kept.strip():
            yield Piece(start, len(kept), line), kept

    def _read_header(self, data: bytes) -> None:
        text = data.decode("utf-8-sig", errors="replace")
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=self.delimiter))
        self._header = rows[0] if rows else []
        self.check_columns(self._header)

    def _parse(self, data: bytes, piece: Piece, counts: bool) -> tuple[pa.Table, np.ndarray]:
        """The good rows of some lines: what to hash, and the numbers."""
        _, broken = find_rows(data, self.delimiter, is_whole=True)
        if broken and not self.skips:
            raise self._broken(data, piece, broken[0])
        malformed: list[Any] = [*broken]
        for line in reversed(broken):
            data = data[: line.start] + data[line.stop :]

        def skip(row: Any) -> str:
            malformed.append(row)
            return "skip"

        names = list(self.schema.numbers) if counts else self.schema.names
        table = arrow_csv.read_csv(
            pa.py_buffer(data),
            # One block: rows don't go over its end.
            arrow_csv.ReadOptions(
                use_threads=False, block_size=len(data) + 1, column_names=self._header
            ),
            arrow_csv.ParseOptions(
                delimiter=self.delimiter, newlines_in_values=True, invalid_row_handler=skip
            ),
            arrow_csv.ConvertOptions(
                include_columns=names or self._header[:1],
                column_types=dict.fromkeys(self._header, pa.binary()),
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=True,
            ),
        )
        if malformed and not self.skips:
            raise self._malformed(data, piece)
        columns = [to_numbers(table.column(name)) for name in self.schema.numbers]
        numbers = np.stack(columns, axis=1) if columns else np.empty((len(table), 0))
        is_good = are_finite(numbers)
        if not is_good.all() and not self.skips:
            raise self._not_a_number(data, piece, numbers, int(np.argmin(is_good)))
        if counts:
            self._count("malformed", len(malformed))
            self._count("no finite label or weight", int((~is_good).sum()))
            return table, numbers[is_good]
        table = table.select(list(self.schema.features))
        return (table if is_good.all() else table.filter(pa.array(is_good))), numbers[is_good]

    def _count(self, reason: str, rows: int) -> None:
        if rows:
            self.skipped[reason] += rows

    def _rows(self, data: bytes, piece: Piece) -> Iterator[tuple[int, list[str]]]:
        """Rows with the lines in which they begin: slow, for messages."""
        text = io.StringIO(data.decode("utf-8", errors="replace"), newline="")
        reader, line = csv.reader(text, delimiter=self.delimiter), piece.line
        for row in reader:
            if row:
                yield line, row
            line = piece.line + reader.line_num

    def _broken(self, data: bytes, piece: Piece, line: slice) -> BadDataError:
        number = piece.line + data[: line.start].count(b"\n")
        return BadDataError(
            f"{self.path}, line {number}: a field that begins with a quotation mark must end with "
            f"one, before a {self.delimiter!r} or the end of the line. Received: "
            f"{data[line][:60]!r}. Mend the file (it may have been cut off), or leave such lines "
            'out: errors="skip".'
        )

    def _malformed(self, data: bytes, piece: Piece) -> BadDataError:
        expected = len(self._header)
        line, row = next(one for one in self._rows(data, piece) if len(one[1]) != expected)
        return BadDataError(
            f"{self.path}, line {line}: a row must have {expected} fields, as the header has. "
            f"Received: {len(row)} fields, {self.delimiter.join(row)[:60]!r}. Mend the file, or "
            'leave such rows out: errors="skip".'
        )

    def _not_a_number(
        self, data: bytes, piece: Piece, numbers: np.ndarray, place: int
    ) -> BadDataError:
        name = self.schema.numbers[int(np.argmin(are_finite(numbers[place][:, None])))]
        lines = self._rows(data, piece)
        line, row = next(one for number, one in enumerate(lines) if number == place)
        value = row[self._header.index(name)]
        return BadDataError(
            f"{self.path}, line {line}: {name!r} must be a finite number. Received: {value!r}. "
            f'{hint_at(value)}Mend the file, or leave such rows out: errors="skip".'
        )


def _decompressed(raw: BinaryIO, path: str) -> BinaryIO:
    return gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw  # type: ignore[return-value]
