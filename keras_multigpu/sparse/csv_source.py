"""CSV files, plain or compressed: cut between rows, and parsed by Arrow piece by piece."""

from __future__ import annotations

import collections
import csv
import dataclasses
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from keras_multigpu.arguments import number_of
from keras_multigpu.sparse.lines import (
    Piece,
    count_lines,
    cut_rows,
    find_rows,
    open_decompressed,
    read_fields,
)
from keras_multigpu.sparse.sources import BadDataError, Block, Source


@dataclasses.dataclass(eq=False)
class CsvSource(Source):
    """A CSV file with a header; the text in the file is hashed as it stands.

    Empty fields, quoted or not, are nulls or empty texts, as the schema says. A quoted field may
    contain line ends. `delimiter` is the character between fields; the other arguments are
    described at `Source`.
    """

    delimiter: str = ","

    def _scan(self) -> Iterator[tuple[int, int, Any]]:
        raw = pa.OSFile(self.path)
        file = open_decompressed(raw, self.path)
        pieces = cut_rows(file, self.delimiter, self.chunk_rows)
        _, header = next(pieces, (None, b""))
        self._read_header(header)
        for number, (piece, data) in enumerate(pieces):
            self.position = raw.tell()
            rows = len(self._parse(data, piece, is_scan=True).numbers)
            if rows:
                # A compressed file can only be read from its beginning.
                yield 0 if self.path.endswith(".gz") else number, rows, piece

    def _read(self, place: Piece) -> Block:
        if self._open is None:
            self._open = open_decompressed(pa.OSFile(self.path), self.path)
        self._open.seek(place.start)
        return self._parse(self._open.read(place.size), place, is_scan=False)

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
        """The good rows of a piece; a scan skips the features."""
        if len(piece.broken) and not self.skips:
            raise self._broken(data, piece)
        table, malformed = read_fields(
            _remove(data, piece.broken),
            self._header,
            list(self.schema.numbers if is_scan else self.schema.names) or self._header[:1],
            has_nulls=self.schema.is_empty_field_null,
            delimiter=self.delimiter,
            newlines_in_values=True,
        )
        if malformed and not self.skips:
            raise self._malformed(data, piece, malformed[0])
        if is_scan:
            bad = len(malformed) + len(piece.broken)
            self.skipped += collections.Counter({"malformed": bad})  # adds no zero
        return self.take_good(
            table, lambda row: f"line {self._find_row(data, piece, row)[0]}", is_scan
        )

    def _find_row(self, data: bytes, piece: Piece, number: int) -> tuple[int, str]:
        """The line on which a row begins, and its text; blank rows have no number."""
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
            f"{data[start:stop][:60]!r}. Fix the file (it may have been cut off), or leave such "
            'lines out: errors="skip".'
        )

    def _malformed(self, data: bytes, piece: Piece, row: Any) -> BadDataError:
        line, text = self._find_row(data, piece, row.number - 1)
        return BadDataError(
            f"{self.path}, line {line}: a row must have "
            f"{number_of(row.expected_columns, 'field')}, as the header has. Received: "
            f"{number_of(row.actual_columns, 'field')}, {text[:60]!r}. Fix the file, or "
            'leave such rows out: errors="skip".'
        )


def _remove(data: bytes, rows: np.ndarray) -> bytes:
    """A text without some rows."""
    if not len(rows):
        return data
    bounds = [0, *rows.ravel().tolist(), len(data)]
    return b"".join(data[start:stop] for start, stop in zip(bounds[::2], bounds[1::2]))
