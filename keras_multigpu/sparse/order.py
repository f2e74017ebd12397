"""Which rows are in which batch: shuffled by chunk and within, and shared among processes."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from keras_multigpu.sparse.sources import Chunk


@dataclasses.dataclass(frozen=True)
class Piece:
    """The rows of a chunk that are one process's own.

    Attributes:
        chunk: the chunk's number in the data set.
        unit: the part of a file that is read from its beginning on; pieces of a unit stay in order.
        first: the first row.
        rows: how many there are.
    """

    chunk: int
    unit: tuple[int, int]
    first: int
    rows: int


class Order:
    """The order of rows in an epoch: a function of the seed and of the epoch's number.

    Args:
        chunks: all chunks of the data set.
        batch_size: the rows in a batch; the last one has what is left.
        seed: of the random order; `None` for the order of the files.
        process: which process this is, from 0.
        processes: how many there are. Each has as many rows as the others: the data set's last
            rows, fewer than there are processes, are left out.

    Example:
        >>> chunks = [Chunk(0, 0, rows=3, place=None), Chunk(0, 1, rows=4, place=None)]
        >>> order = Order(chunks, batch_size=2, seed=None)
        >>> order.num_batches
        4
        >>> order.batch(epoch=0, number=1)
        [(0, array([2])), (1, array([0]))]
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
        self._pieces = _share(chunks, process * self.rows, (process + 1) * self.rows)
        self._epoch: int | None = -1

    def batch(self, epoch: int | None, number: int) -> list[tuple[int, np.ndarray]]:
        """The rows of a batch: numbers of chunks, and which of their rows, in order.

        Args:
            epoch: the epoch's number; `None` for the order of the files.
            number: the batch's number in the epoch.
        """
        self._begin(epoch)
        first = number * self._batch_size
        last = min(first + self._batch_size, self.rows)
        parts = []
        place = bisect.bisect_right(self._starts, first) - 1
        while first < last:
            piece, start = self._sequence[place], self._starts[place]
            stop = min(last, start + piece.rows)
            parts.append((piece.chunk, self._rows_of(piece)[first - start : stop - start]))
            first, place = stop, place + 1
        return parts

    def following(self, epoch: int | None, number: int, count: int) -> list[int]:
        """The next chunks from a batch on, each once, in the order in which they are read."""
        self._begin(epoch)
        place = bisect.bisect_right(self._starts, number * self._batch_size) - 1
        return [piece.chunk for piece in self._sequence[place : place + count]]

    def _begin(self, epoch: int | None) -> None:
        """Draws the order of the pieces, once an epoch."""
        if epoch == self._epoch:
            return
        units = [list(group) for _, group in itertools.groupby(self._pieces, lambda p: p.unit)]
        if self._seed is not None and epoch is not None:
            draw = np.random.default_rng([self._seed, epoch])
            units = [units[number] for number in draw.permutation(len(units))]
        self._sequence = [piece for unit in units for piece in unit]
        lengths = [piece.rows for piece in self._sequence]
        self._starts = list(itertools.accumulate(lengths, initial=0))[:-1]
        self._epoch = epoch
        self._drawn: dict[int, np.ndarray] = {}

    def _rows_of(self, piece: Piece) -> np.ndarray:
        """The rows of a piece, in the order of this epoch."""
        if piece.chunk not in self._drawn:
            rows = np.arange(piece.first, piece.first + piece.rows)
            if self._seed is not None and self._epoch is not None:
                draw = np.random.default_rng([self._seed, self._epoch, piece.chunk])
                rows = draw.permutation(rows)
            while len(self._drawn) > 1:  # a batch goes over few chunks: keep the latest
                self._drawn.pop(next(iter(self._drawn)))
            self._drawn[piece.chunk] = rows
        return self._drawn[piece.chunk]


def _share(chunks: Sequence[Chunk], first: int, last: int) -> list[Piece]:
    """The parts of chunks that are among the rows `first` to `last` of the data set."""
    pieces, start = [], 0
    for number, chunk in enumerate(chunks):
        begin, end = max(first, start), min(last, start + chunk.rows)
        if begin < end:
            pieces.append(Piece(number, (chunk.file, chunk.unit), begin - start, end - begin))
        start += chunk.rows
    return pieces
