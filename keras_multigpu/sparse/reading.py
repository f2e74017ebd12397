"""The chunks of a data set, read and hashed when they are asked for; the latest are kept."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Sequence

import numpy as np

from keras_multigpu.sparse.encoder import HashEncoder
from keras_multigpu.sparse.sources import BadDataError, Chunk, Source

_KEPT_CHUNKS = 3
_MANY_READS = 3


class ChunkReader:
    """Reads chunks by their number; one file at a time is open.

    Args:
        sources: the files.
        chunks: all chunks of the data set.
        encoder: how the columns are hashed.
    """

    def __init__(self, sources: Sequence[Source], chunks: Sequence[Chunk], encoder: HashEncoder):
        self._sources = sources
        self._chunks = chunks
        self._encode = encoder.stream()
        self._kept: collections.OrderedDict[int, tuple[np.ndarray, np.ndarray]]
        self._kept = collections.OrderedDict()
        self._reads: collections.Counter[int] = collections.Counter()
        self._has_warned = False
        self._open: Source | None = None

    def begin_epoch(self) -> None:
        """Counts from now on how often a chunk is read."""
        self._reads.clear()

    def read(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The indices and the numbers of a chunk, int32 and float32, a row for each good row.

        Warns:
            UserWarning: if a chunk is read several times in an epoch.
        """
        if number not in self._kept:
            self._note(number)
            self._kept[number] = self._load(self._chunks[number])
            while len(self._kept) > _KEPT_CHUNKS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return self._kept[number]

    def _load(self, chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
        source = self._sources[chunk.file]
        if self._open is not None and self._open is not source:
            self._open.close()
        self._open = source
        block = source.read(chunk)
        try:
            return self._encode(block.table), block.numbers
        except TypeError as error:
            raise BadDataError(f"{source.path}: {error}") from error

    def _note(self, number: int) -> None:
        self._reads[number] += 1
        if self._reads[number] == _MANY_READS and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "The batches of a HashedDataset are asked for in disorder, so that chunks are read "
                f"again and again. Received: chunk {number} read {_MANY_READS} times in an epoch. "
                "Call `fit(..., shuffle=False)`: the dataset shuffles itself.",
                stacklevel=4,
            )
