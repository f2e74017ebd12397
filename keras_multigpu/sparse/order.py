"""Which rows are in which batch: chunks and their rows are shuffled, and shared by processes."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from keras_multigpu.sparse.sources import Chunk


@dataclasses.dataclass(frozen=True)
class ChunkShare:
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
        self._shares = _share(chunks, process * self.rows, (process + 1) * self.rows)
        self._epoch: int | None = -1

    def batch(self, epoch: int | None, number: int) -> list[tuple[int, np.ndarray]]:
        """The rows of a batch, in order: the number of a chunk, and which of its rows, and so on.

        If the epoch is `None`, they are in the order of the files.
        """
        self._begin(epoch)
        first = number * self._batch_size
        last = min(first + self._batch_size, self.rows)
        parts = []
        place = bisect.bisect_right(self._starts, first) - 1
        while first < last:
            share, start = self._sequence[place], self._starts[place]
            stop = min(last, start + share.rows)
            parts.append((share.chunk, self._rows_of(share)[first - start : stop - start]))
            first, place = stop, place + 1
        return parts

    def following(self, epoch: int | None, number: int, count: int) -> list[int]:
        """The next `count` chunks from a batch on, in the order in which they are read."""
        self._begin(epoch)
        place = bisect.bisect_right(self._starts, number * self._batch_size) - 1
        return [share.chunk for share in self._sequence[place : place + count]]

    def _begin(self, epoch: int | None) -> None:
        """Draws the order of the chunks, once for an epoch."""
        if epoch == self._epoch:
            return
        units = [list(group) for _, group in itertools.groupby(self._shares, lambda p: p.unit)]
        if self._seed is not None and epoch is not None:
            draw = np.random.default_rng([self._seed, epoch])
            units = [units[number] for number in draw.permutation(len(units))]
        self._sequence = [share for unit in units for share in unit]
        lengths = [share.rows for share in self._sequence]
        self._starts = list(itertools.accumulate(lengths, initial=0))[:-1]
        self._epoch = epoch
        self._drawn: dict[int, np.ndarray] = {}

    def _rows_of(self, share: ChunkShare) -> np.ndarray:
        """The rows of a chunk's share, in the order of this epoch."""
        if share.chunk not in self._drawn:
            rows = np.arange(share.first, share.first + share.rows)
            if self._seed is not None and self._epoch is not None:
                draw = np.random.default_rng([self._seed, self._epoch, share.chunk])
                rows = draw.permutation(rows)
            while len(self._drawn) > 1:  # a batch needs few chunks: keep the latest
                self._drawn.pop(next(iter(self._drawn)))
            self._drawn[share.chunk] = rows
        return self._drawn[share.chunk]


def _share(chunks: Sequence[Chunk], first: int, last: int) -> list[ChunkShare]:
    """The parts of chunks that are among the rows `first` to `last` of the data set."""
    shares, start = [], 0
    for number, chunk in enumerate(chunks):
        begin, end = max(first, start), min(last, start + chunk.rows)
        if begin < end:
            shares.append(ChunkShare(number, (chunk.file, chunk.unit), begin - start, end - begin))
        start += chunk.rows
    return shares
