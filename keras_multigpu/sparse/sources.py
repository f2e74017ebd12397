"""Data files as chunks that are read one at a time: what CSV and Parquet have in common."""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from keras_multigpu.arguments import number_of
from keras_multigpu.sparse.tables import compare_names, list_names

_TOO_LARGE = 2**53
# What reading damaged bytes raises; a name in a Parquet file may no longer be UTF-8.
_UNREADABLE = (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError)


class BadDataError(ValueError):
    """A file, or a row of a file, that can't be used; the message names it."""


@contextlib.contextmanager
def explaining_damage(path: str, kind: str = "file") -> Iterator[None]:
    """Scope that names the file in errors about damaged bytes."""
    try:
        yield
    except _UNREADABLE as error:
        raise BadDataError(
            f"{path} must be a readable {kind}. Received: {type(error).__name__}: {error}."
        ) from error


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some rows of a file, read together: `rows` good ones.

    `file` is the file's number in the data set, and `unit` the number, within the file, of the part
    that has to be read from its beginning: a row group of Parquet, a compressed file, or the chunk
    itself. What `place` means is private to the source.
    """

    file: int
    unit: int
    rows: int
    place: Any


@dataclasses.dataclass(frozen=True)
class Schema:
    """The columns to read: `features` to hash, and `numbers`, the labels and the weight.

    An empty field of a CSV file is null in a feature, or the empty text.
    """

    features: tuple[str, ...]
    numbers: tuple[str, ...]
    is_empty_field_null: bool = True

    @property
    def names(self) -> list[str]:
        """All columns, without repetition."""
        return list(dict.fromkeys((*self.features, *self.numbers)))


@dataclasses.dataclass(frozen=True)
class Block:
    """The good rows of a chunk: the columns to hash, and float32 numbers of shape `(rows, n)`."""

    table: pa.Table
    numbers: np.ndarray


@dataclasses.dataclass(eq=False)
class Source(abc.ABC):
    """One file; abstract.

    About `chunk_rows` rows are read together. If it `skips`, bad rows are left out, and `skipped`
    counts them by reason; otherwise they are errors. `position` is how many bytes `scan` has read,
    and `extremes` are the least and the largest numbers that it saw.
    """

    kind = "file"
    path: str
    schema: Schema
    chunk_rows: int
    skips: bool

    def __post_init__(self) -> None:
        self.position = 0
        self.skipped: collections.Counter[str] = collections.Counter()
        self.extremes: list[np.ndarray] = []
        self._state: tuple[int, int] | None = None  # the file's size and time, when it was scanned
        self._open: Any = None  # for `_read`; Arrow closes its files when nothing uses them

    def scan(self) -> Iterator[tuple[int, int, Any]]:
        """The unit, the number of good rows and the place of each chunk, in order."""
        with explaining_damage(self.path, self.kind):
            self._state = self._find_state()
            yield from self._scan()
        self._check_unchanged()

    def read(self, chunk: Chunk) -> Block:
        """The good rows of a chunk; reading the chunks of a unit in order is fastest."""
        self._check_unchanged()
        with explaining_damage(self.path, self.kind):
            block = self._read(chunk.place)
        self._check_unchanged()
        if len(block.numbers) != chunk.rows:
            raise self._changed(
                f"{number_of(len(block.numbers), 'row')} where there were {chunk.rows}"
            )
        return block

    @abc.abstractmethod
    def _scan(self) -> Iterator[tuple[int, int, Any]]:
        """See `scan`."""

    @abc.abstractmethod
    def _read(self, place: Any) -> Block:
        """The good rows of the chunk at a place."""

    def _find_state(self) -> tuple[int, int]:
        found = os.stat(self.path)
        return found.st_size, found.st_mtime_ns

    def _check_unchanged(self) -> None:
        try:
            state = self._find_state()
        except OSError as error:
            raise self._changed(f"{type(error).__name__}: {error}") from error
        if state != self._state:
            assert self._state is not None
            raise self._changed(
                f"{state[0]} bytes, last modified at {state[1] / 1e9:.3f}, in place of "
                f"{self._state[0]} bytes, at {self._state[1] / 1e9:.3f}"
            )

    def _changed(self, received: str) -> BadDataError:
        return BadDataError(
            f"{self.path} must stay as it was when it was scanned, until the training ends. "
            f"Received: {received}. Write new data to new files, and create the dataset again."
        )

    def close(self) -> None:
        """Closes the file; `read` opens it again."""
        self._open = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy opens the file itself."""
        return {**vars(self), "_open": None}

    def check_columns(self, names: Sequence[str]) -> None:
        """Refuses a file that lacks a column, or has it several times."""
        missing, _, twice = compare_names(names, self.schema.names)
        if missing:
            raise BadDataError(
                f"{self.path} must have the columns {list_names(self.schema.names)}. "
                f"Received: {list_names(names) or 'no columns'}; missing: {missing}."
            )
        if twice:
            raise BadDataError(
                f"{self.path} must have each of its columns once. Received: {twice} more than "
                f"once, in the header {list_names(names)}. Rename or remove one of them."
            )

    def take_good(self, table: pa.Table, locate: Callable[[int], str], is_scan: bool) -> Block:
        """The rows whose numbers are usable; a scan counts the others, and needs no features.

        `locate` says where a row is, for the error about one that is not usable.
        """
        columns = [to_numbers(table.column(name)) for name in self.schema.numbers]
        numbers = np.stack(columns, axis=1) if columns else np.empty((len(table), 0))
        with np.errstate(over="ignore"):
            numbers = numbers.astype("float32")
        # Reducing the columns one after the other is faster than reducing short rows.
        is_good = np.logical_and.reduce(np.isfinite(numbers).T, axis=0)
        bad = len(table) - int(is_good.sum())
        if bad and not self.skips:
            row = int(np.argmin(is_good))
            raise BadDataError(f"{self.path}, {locate(row)}: {self._explain(table, numbers, row)}")
        table = table.select([] if is_scan else list(self.schema.features))
        if bad:
            table, numbers = table.filter(pa.array(is_good)), numbers[is_good]
        if is_scan:
            self.skipped += collections.Counter({"no finite label or weight": bad})
            if numbers.size:
                found = np.stack([*self.extremes, numbers.min(axis=0), numbers.max(axis=0)])
                self.extremes = [found.min(axis=0), found.max(axis=0)]
        return Block(table, numbers)

    def _explain(self, table: pa.Table, numbers: np.ndarray, row: int) -> str:
        """What is wrong with a row's numbers."""
        name = self.schema.numbers[int(np.argmin(np.isfinite(numbers[row])))]
        value = table.column(name)[row].as_py()
        if table.column(name).type == pa.binary():  # a field of a CSV file
            value = (value or b"").decode("utf-8", errors="replace")
        hint = "Integers must be below 2**53 to be exact as floats. " if _is_integer(value) else ""
        return (
            f"{name!r} must be a finite number. Received: {value!r}. {hint}Fix the file, or "
            'leave such rows out: errors="skip".'
        )


def to_numbers(column: pa.ChunkedArray) -> np.ndarray:
    """The numbers of a column as float64; not-a-number where there is none.

    Integers from 2**53 up become infinite: several of them share one float.
    """
    array = column.combine_chunks()
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind, types = array.type, pa.types
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    try:
        plain = array if is_number else array.cast(pa.string())
        numbers = plain.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        numbers = np.array([to_number(value) for value in array.to_pylist()])
    if not types.is_floating(kind):
        large = np.flatnonzero(np.abs(numbers) >= _TOO_LARGE).tolist()
        integers = [row for row in large if _is_integer(array[row].as_py())]
        if integers:
            numbers = numbers.copy()  # Arrow's memory is read-only
            numbers[integers] = np.inf
    return numbers


def _is_integer(value: Any) -> bool:
    text = value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
    return text.strip().lstrip("+-").isdigit()


def to_number(value: Any) -> float:
    """A number as Arrow reads it, or not-a-number; Python also accepts underscores, for example."""
    is_other = isinstance(value, (str, bytes)) and ("_" in str(value) or not str(value).isascii())
    try:
        return float("nan" if is_other else value)
    except (TypeError, ValueError):
        return float("nan")
