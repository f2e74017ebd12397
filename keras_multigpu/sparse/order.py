"""Which rows are in which batch: chunks and their rows are shuffled, and shared by processes."""

from __future__ import annotations

import bisect
import itertools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_multigpu.arguments import as_integer
from keras_multigpu.sparse.sources import Chunk


class ChunkShare(NamedTuple):
    """The rows of a chunk that belong to one process: `rows` rows from `first` on.

    `chunk` is the chunk's number in the data set. Shares of the same `unit` of a file stay in
    order, because a unit has to be read from its beginning.
    """

    chunk: int
    unit: tuple[int, int]
    first: int
    rows: int


class Order:
    """The order of rows in an epoch: a function of the seed and of the epoch's number.

    With `seed=None` it is the order of the files. All processes get the same number of rows: the
    last rows of the data set, fewer than there are processes, are left out.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        batch_size: int,
        seed: int | None,
        process: int = 0,
        processes: int = 1,
    ):
        total = sum(chunk.rows for chunk in chunks)
        self.rows = total // processes
        self.left_out = total - self.rows * processes
        self.num_batches = -(-self.rows // batch_size)
        self._batch_size = batch_size
        self._seed = seed
        shares = _share(chunks, process * self.rows, (process + 1) * self.rows)
        self._units = [list(unit) for _, unit in itertools.groupby(shares, lambda one: one.unit)]
        self._epoch: int | None = -1
        self._drawn: tuple[Any, np.ndarray] = (None, np.empty(0, int))

    def find_batch(self, epoch: int | None, number: int) -> list[tuple[int, np.ndarray]]:
        """The rows of a batch, in order: the number of a chunk, and which of its rows, and so on.

        If the epoch is `None`, they are in the order of the files.
        """
        first = number * self._batch_size
        last = min(first + self._batch_size, self.rows)
        parts = []
        place = self._find_place(epoch, first)
        while first < last:
            share, start = self._sequence[place], self._starts[place]
            stop = min(last, start + share.rows)
            parts.append((share.chunk, self._draw_rows(share)[first - start : stop - start]))
            first, place = stop, place + 1
        return parts

    def find_following(self, epoch: int | None, number: int, count: int) -> list[int]:
        """The next `count` chunks from a batch on, in the order in which they are read."""
        place = self._find_place(epoch, number * self._batch_size)
        return [share.chunk for share in self._sequence[place : place + count]]

    def _find_place(self, epoch: int | None, row: int) -> int:
        """The place of the chunk with a row, among the chunks of an epoch."""
        if epoch != self._epoch:
            self._epoch = epoch
            units = self._draw(np.arange(len(self._units)))
            self._sequence = [share for unit in units for share in self._units[unit]]
            lengths = [share.rows for share in self._sequence]
            self._starts = list(itertools.accumulate(lengths, initial=0))[:-1]
        return bisect.bisect_right(self._starts, row) - 1

    def _draw_rows(self, share: ChunkShare) -> np.ndarray:
        """The rows of a chunk's share, in the order of this epoch."""
        drawn = self._epoch, share.chunk
        if self._drawn[0] != drawn:  # the next batch begins in the chunk in which this one ends
            rows = np.arange(share.first, share.first + share.rows)
            self._drawn = drawn, self._draw(rows, share.chunk)
        return self._drawn[1]

    def _draw(self, numbers: np.ndarray, *chunk: int) -> np.ndarray:
        """Numbers in the order of this epoch: of its units, or of the rows of a chunk."""
        if self._seed is None or self._epoch is None:
            return numbers
        return np.random.default_rng([self._seed, self._epoch, *chunk]).permutation(numbers)


def _share(chunks: Sequence[Chunk], first: int, last: int) -> list[ChunkShare]:
    """The parts of chunks that are among the rows `first` to `last` of the data set."""
    shares, start = [], 0
    for number, chunk in enumerate(chunks):
        begin, end = max(first, start), min(last, start + chunk.rows)
        if begin < end:
            shares.append(ChunkShare(number, (chunk.file, chunk.unit), begin - start, end - begin))
        start += chunk.rows
    return shares


def check_process(process: Any, processes: int) -> int:
    """The number of one of several processes, as Python's integer."""
    number = as_integer(process)
    if number is None or not 0 <= number < processes:
        raise ValueError(
            f"`process` must be an integer from 0 to {processes - 1}, one less than "
            f"`processes`. Received: process={process!r}."
        )
    return number


def choose_shuffle(shuffle: Any, has_label: bool) -> bool:
    """Whether to shuffle; by default, only data with labels."""
    if shuffle not in (None, True, False):
        raise ValueError(f"`shuffle` must be True, False or None. Received: shuffle={shuffle!r}.")
    if shuffle and not has_label:
        warnings.warn(
            "A dataset without labels is shuffled in `fit`, and where its batches are asked for "
            "one by one: these are not in the order of the files. `predict` and `evaluate` keep "
            f"that order. Received: shuffle={shuffle!r}, label=None. Leave `shuffle` out to keep "
            "it everywhere.",
            stacklevel=3,
        )
    return has_label if shuffle is None else bool(shuffle)
