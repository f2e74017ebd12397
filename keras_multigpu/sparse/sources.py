"""A file as chunks that are read one at a time: what CSV and Parquet have in common."""

from __future__ import annotations

import abc
import collections
import dataclasses
import os
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

_TOO_LARGE = 2**53
# What reading damaged bytes raises: a name in a Parquet file may be no UTF-8 any more.
_UNREADABLE = (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError)


class BadDataError(ValueError):
    """A file, or a row of a file, that can't be used; the text names it."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some rows of a file, read together.

    Attributes:
        file: the file's number in the data set.
        unit: the number, within the file, of the part that is read from its beginning on: a row
            group of Parquet, a compressed file, or the chunk itself.
        rows: how many good rows it has.
        place: where it is; the source knows what that means.
    """

    file: int
    unit: int
    rows: int
    place: Any


@dataclasses.dataclass(frozen=True)
class Schema:
    """The columns to read.

    Attributes:
        features: those to hash.
        numbers: the labels and the weight, which must be finite.
    """

    features: tuple[str, ...]
    numbers: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """All of them, each once."""
        return list(dict.fromkeys((*self.features, *self.numbers)))


@dataclasses.dataclass(frozen=True)
class Block:
    """The good rows of a chunk.

    Attributes:
        table: the columns to hash.
        numbers: float32, of shape `(rows, len(schema.numbers))`.
    """

    table: pa.Table
    numbers: np.ndarray


class Source(abc.ABC):
    """One file; abstract.

    Args:
        path: the file.
        schema: the columns to read.
        chunk_rows: about how many rows to read together.
        skips: count and leave out bad rows; they are errors otherwise.

    Attributes:
        skipped: how many rows were left out in `scan`, by reason.
        position: how many bytes of the file `scan` has read.
    """

    position = 0
    _kind = "file"
    _state: tuple[int, int] | None = None
    _closer: weakref.finalize | None = None
    _when_open = ("_closer", "_file", "_reader", "_next")  # attributes that a copy doesn't share

    def __init__(self, path: str, schema: Schema, chunk_rows: int, skips: bool):
        self.path = path
        self.schema = schema
        self.chunk_rows = chunk_rows
        self.skips = skips
        self.skipped: collections.Counter[str] = collections.Counter()

    def scan(self) -> Iterator[tuple[int, int, Any]]:
        """The unit, the number of good rows and the place of each chunk, in order.

        Raises:
            BadDataError: if the file can't be read, or bad rows are not to be skipped.
        """
        try:
            self._state = self._current_state()
            yield from self._scan()
        except _UNREADABLE as error:
            raise self._unreadable(error) from error
        self._check_unchanged()

    def read(self, chunk: Chunk) -> Block:
        """The good rows of a chunk; the chunks of a unit are read fastest in order.

        Raises:
            BadDataError: if the file is not what it was when it was scanned.
        """
        self._check_unchanged()
        try:
            block = self._read(chunk.place)
        except _UNREADABLE as error:
            raise self._unreadable(error) from error
        self._check_unchanged()
        if len(block.numbers) != chunk.rows:
            raise self._changed(f"{len(block.numbers)} rows where there were {chunk.rows}")
        return block

    @abc.abstractmethod
    def _scan(self) -> Iterator[tuple[int, int, Any]]:
        """See `scan`."""

    @abc.abstractmethod
    def _read(self, place: Any) -> Block:
        """The good rows of the chunk at a place."""

    def _current_state(self) -> tuple[int, int]:
        found = os.stat(self.path)
        return found.st_size, found.st_mtime_ns

    def _check_unchanged(self) -> None:
        try:
            state = self._current_state()
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

    def _unreadable(self, error: BaseException) -> BadDataError:
        return BadDataError(
            f"{self.path} must be a readable {self._kind}. "
            f"Received: {type(error).__name__}: {error}."
        )

    def keep_open(self, file: Any) -> Any:
        """Keeps a file open until `close`, or until there is no more use for this source."""
        # Not `__del__`: Python may collect the file before the source, with a warning.
        self._closer = weakref.finalize(self, file.close)
        return file

    def close(self) -> None:
        """Lets go of the file; `read` opens it again."""
        if self._closer is not None:
            self._closer()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self._when_open}

    def check_columns(self, names: Sequence[str]) -> None:
        """Refuses a file that lacks a column, or has it several times.

        Raises:
            BadDataError: if it does.
        """
        missing = [name for name in self.schema.names if name not in names]
        if missing:
            raise BadDataError(
                f"{self.path} must have the columns {', '.join(map(repr, self.schema.names))}. "
                f"Received: {', '.join(map(repr, names)) or 'no columns'}; missing: "
                f"{', '.join(map(repr, missing))}."
            )
        twice = [name for name in self.schema.names if list(names).count(name) > 1]
        if twice:
            raise BadDataError(
                f"{self.path} must have each of its columns once. Received: "
                f"{', '.join(map(repr, twice))} more than once, in the header "
                f"{', '.join(map(repr, names))}. Rename or remove one of them."
            )


def to_numbers(column: pa.ChunkedArray) -> np.ndarray:
    """The numbers of a column as float64; not-a-number where there is none.

    Infinite where an integer is not below 2**53: from there on, several share one float.
    """
    array = column.combine_chunks()
    kind = array.type
    if pa.types.is_dictionary(kind):
        array = array.dictionary_decode()
    if pa.types.is_integer(kind):
        integers = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return np.where(np.abs(integers) >= _TOO_LARGE, np.inf, integers)
    if pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return array.cast(pa.float64()).to_numpy(zero_copy_only=False)
    try:
        numbers = array.cast(pa.string()).cast(pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        numbers = np.array([_number(value) for value in array.to_pylist()])
    large = np.flatnonzero(np.abs(numbers) >= _TOO_LARGE)
    integers = [int(row) for row in large if _is_integer(array[int(row)].as_py())]
    if integers:
        numbers = numbers.copy()  # Arrow's own can't be written to
        numbers[integers] = np.inf
    return numbers


def hint_at(value: Any) -> str:
    """A sentence for the message about a number that can't be used, where it needs one."""
    if not _is_integer(value):
        return ""
    return "Integers must be below 2**53, up to which floats tell them apart. "


def are_finite(numbers: np.ndarray) -> np.ndarray:
    """Which rows are finite in the type in which they are trained on, float32."""
    with np.errstate(over="ignore"):
        return np.isfinite(numbers.astype("float32")).all(axis=1)


def _is_integer(value: Any) -> bool:
    text = value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
    return text.strip().lstrip("+-").isdigit()


def _number(value: Any) -> float:
    is_other = isinstance(value, (str, bytes)) and ("_" in str(value) or not str(value).isascii())
    try:
        return float("nan" if is_other else value)
    except (TypeError, ValueError):
        return float("nan")
