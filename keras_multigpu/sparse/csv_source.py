"""CSV files, plain or compressed: cut where rows end, and parsed by Arrow piece by piece."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import csv as arrow_csv

from keras_multigpu.sparse.csv_rows import Rows, count_lines, find_rows, read_rows
from keras_multigpu.sparse.sources import (
    BadDataError,
    Block,
    Schema,
    Source,
    are_finite,
    hint_at,
    to_numbers,
)

_MARK = "\ufeff".encode()  # the byte order mark


class Piece(NamedTuple):
    """Where in the file, once decompressed, some rows are.

    Attributes:
        start: the first byte.
        size: how many bytes.
        line: the number of the first line, from 1.
        broken: the bytes of the rows to leave out, as `Rows.broken` has them.
    """

    start: int
    size: int
    line: int
    broken: np.ndarray


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

    def close(self) -> None:
        """See `Source.close`."""
        super().close()
        self._file = None

    def _scan(self) -> Iterator[tuple[int, int, Any]]:
        with open(self.path, "rb") as raw:
            pieces = self._cut(_decompressed(raw, self.path))
            _, header = next(pieces, (None, b""))
            self._read_header(header)
            for number, (piece, data) in enumerate(pieces):
                self.position = raw.tell()
                numbers = self._parse(data, piece, is_scan=True).numbers
                if len(numbers):
                    # A compressed file can be read from its beginning only.
                    yield 0 if self.path.endswith(".gz") else number, len(numbers), piece

    def _read(self, place: Piece) -> Block:
        if self._file is None:
            self._file = self.keep_open(self._open())
        self._file.seek(place.start)
        return self._parse(self._file.read(place.size), place, is_scan=False)

    def _open(self) -> BinaryIO:
        is_compressed = self.path.endswith(".gz")
        return gzip.open(self.path, "rb") if is_compressed else open(self.path, "rb")  # type: ignore[return-value]

    def _cut(self, file: BinaryIO) -> Iterator[tuple[Piece, bytes]]:
        """The file in pieces: the header, and then `chunk_rows` rows in each."""
        start, line, wanted = 0, 1, 1
        parts: list[tuple[bytes, np.ndarray]] = []
        count = 0
        for data, rows in read_rows(file, self.delimiter):
            first = 0
            while first < len(rows.ends):
                last = min(first + wanted - count, len(rows.ends))
                parts.append(_part(data, rows, first, last))
                count, first = count + last - first, last
                if count == wanted:
                    text, broken = _join(parts)
                    yield Piece(start, len(text), line, broken), text
                    start, line = start + len(text), line + count_lines(text)
                    parts, count, wanted = [], 0, self.chunk_rows
        if parts:
            text, broken = _join(parts)
            yield Piece(start, len(text), line, broken), text

    def _read_header(self, data: bytes) -> None:
        text = data.decode("utf-8-sig", errors="replace")
        try:
            rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=self.delimiter))
        except csv.Error as error:
            raise BadDataError(
                f"{self.path} must begin with a header, the names of its columns. Received: "
                f"{text[:60]!r}: {error}."
            ) from error
        self._header = rows[0] if rows else []
        self.check_columns(self._header)

    def _parse(self, data: bytes, piece: Piece, is_scan: bool) -> Block:
        """The good rows of a piece; a scan counts the others, and leaves out what is hashed."""
        if len(piece.broken) and not self.skips:
            raise self._broken(data, piece)
        features = () if is_scan else self.schema.features
        table, malformed = self._to_arrow(_without(data, piece.broken), features)
        if malformed and not self.skips:
            raise self._malformed(data, piece, malformed[0])
        columns = [to_numbers(table.column(name)) for name in self.schema.numbers]
        numbers = np.stack(columns, axis=1) if columns else np.empty((len(table), 0))
        is_good = are_finite(numbers)
        if not is_good.all() and not self.skips:
            raise self._not_a_number(data, piece, table, numbers)
        if is_scan:
            self._count("malformed", len(malformed) + len(piece.broken))
            self._count("no finite label or weight", int((~is_good).sum()))
        table = table.select(list(features))
        if not is_good.all():
            table, numbers = table.filter(pa.array(is_good)), numbers[is_good]
        return Block(table, numbers.astype("float32"))

    def _to_arrow(self, data: bytes, features: tuple[str, ...]) -> tuple[pa.Table, list[Any]]:
        """Features and numbers as bytes, and Arrow's account of rows with other fields."""
        names = list(dict.fromkeys((*features, *self.schema.numbers))) or self._header[:1]
        if not data:
            return pa.table({name: pa.array([], pa.binary()) for name in names}), []
        malformed: list[Any] = []

        def skip(row: Any) -> str:
            malformed.append(row)
            return "skip"

        table = arrow_csv.read_csv(
            # Arrow leaves out a byte order mark; behind the header it belongs to a value.
            pa.py_buffer(_MARK + data if data.startswith(_MARK) else data),
            # One block: rows don't go over its end.
            arrow_csv.ReadOptions(
                use_threads=False, block_size=len(data) + 4, column_names=self._header
            ),
            arrow_csv.ParseOptions(
                delimiter=self.delimiter, newlines_in_values=True, invalid_row_handler=skip
            ),
            arrow_csv.ConvertOptions(
                include_columns=names,
                column_types=dict.fromkeys(names, pa.binary()),
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=True,
            ),
        )
        return table, malformed

    def _count(self, reason: str, rows: int) -> None:
        if rows:
            self.skipped[reason] += rows

    def _row(self, data: bytes, piece: Piece, number: int) -> tuple[int, str]:
        """The line in which a row begins, and the row; blank ones don't count."""
        ends = find_rows(data, self.delimiter, is_whole=True).ends
        starts = np.concatenate([[0], ends[:-1]])
        first_bytes = np.frombuffer(data, "uint8")[starts]
        place = np.flatnonzero(~np.isin(first_bytes, list(b"\r\n")))[number]
        start = int(starts[place])
        text = data[start : ends[place]].decode("utf-8", errors="replace")
        return piece.line + count_lines(data[:start]), text.rstrip("\r\n")

    def _broken(self, data: bytes, piece: Piece) -> BadDataError:
        start, stop = piece.broken[0]
        line = piece.line + count_lines(data[:start])
        return BadDataError(
            f"{self.path}, line {line}: a field that begins with a quotation mark must end with "
            f"one, before a {self.delimiter!r} or the end of the line. Received: "
            f"{data[start:stop][:60]!r}. Mend the file (it may have been cut off), or leave such "
            'lines out: errors="skip".'
        )

    def _malformed(self, data: bytes, piece: Piece, row: Any) -> BadDataError:
        line, text = self._row(data, piece, row.number - 1)
        return BadDataError(
            f"{self.path}, line {line}: a row must have {row.expected_columns} fields, as the "
            f"header has. Received: {row.actual_columns} fields, {text[:60]!r}. Mend the file, or "
            'leave such rows out: errors="skip".'
        )

    def _not_a_number(
        self, data: bytes, piece: Piece, table: pa.Table, numbers: np.ndarray
    ) -> BadDataError:
        number = int(np.argmin(are_finite(numbers)))
        name = self.schema.numbers[int(np.argmin(are_finite(numbers[number][:, None])))]
        line, _ = self._row(data, piece, number)
        value = (table.column(name)[number].as_py() or b"").decode("utf-8", errors="replace")
        return BadDataError(
            f"{self.path}, line {line}: {name!r} must be a finite number. Received: {value!r}. "
            f'{hint_at(value)}Mend the file, or leave such rows out: errors="skip".'
        )


def _decompressed(raw: BinaryIO, path: str) -> BinaryIO:
    return gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw  # type: ignore[return-value]


def _part(data: bytes, rows: Rows, first: int, last: int) -> tuple[bytes, np.ndarray]:
    """The text of some rows, and which of them are broken."""
    begin, end = int(rows.ends[first - 1]) if first else 0, int(rows.ends[last - 1])
    bounds = np.searchsorted(rows.broken[:, 0], [begin, end])
    return data[begin:end], rows.broken[slice(*bounds)] - begin


def _join(parts: list[tuple[bytes, np.ndarray]]) -> tuple[bytes, np.ndarray]:
    """Texts as one, and its broken rows."""
    starts = np.cumsum([0, *(len(data) for data, _ in parts)])
    broken = [rows + start for (_, rows), start in zip(parts, starts)]
    return b"".join(data for data, _ in parts), np.concatenate(broken)


def _without(data: bytes, rows: np.ndarray) -> bytes:
    """A text without some rows."""
    if not len(rows):
        return data
    bounds = [0, *rows.ravel().tolist(), len(data)]
    return b"".join(data[start:stop] for start, stop in zip(bounds[::2], bounds[1::2]))
