"""The chunks of a data set, read and hashed when they are asked for, or ahead by workers."""

from __future__ import annotations

import collections
import copy
import os
import warnings
from collections.abc import Sequence

import numpy as np

from keras_multigpu.sparse.encoder import HashEncoder
from keras_multigpu.sparse.sources import BadDataError, Chunk, Source
from keras_multigpu.sparse.workers import Workers

Hashed = tuple[np.ndarray, np.ndarray]
"""The indices and the numbers of a chunk, int32 and float32, a row for each good row."""

_KEPT_CHUNKS = 3
_MANY_READS = 3


class ChunkLoader:
    """Reads and hashes chunks by their number; one file at a time is open.

    A copy has files of its own, whether it was copied, pickled, or forked with its process.

    Args:
        sources: the files.
        chunks: all chunks of the data set.
        encoder: how the columns are hashed.
    """

    def __init__(self, sources: Sequence[Source], chunks: Sequence[Chunk], encoder: HashEncoder):
        self._sources = sources
        self._chunks = chunks
        self._encoder = encoder
        self._begin()

    def _begin(self) -> None:
        self._encode = self._encoder.stream()
        self._open: Source | None = None
        self._process_id = os.getpid()

    def unit(self, number: int) -> tuple[int, int]:
        """Which part of which file a chunk belongs to; a part is read from its beginning on."""
        chunk = self._chunks[number]
        return chunk.file, chunk.unit

    def load(self, number: int) -> Hashed:
        """A chunk.

        Raises:
            BadDataError: if it is not what it was when the file was scanned.
        """
        if self._process_id != os.getpid():
            # The open files are shared with the process that was forked, and so is their position.
            self._sources = copy.deepcopy(self._sources)
            self._begin()
        chunk = self._chunks[number]
        source = self._sources[chunk.file]
        if self._open is not None and self._open is not source:
            self._open.close()
        self._open = source
        block = source.read(chunk)
        try:
            return self._encode(block.table), block.numbers
        except TypeError as error:
            raise BadDataError(f"{source.path}: {error}") from error

    def __getstate__(self) -> dict[str, object]:
        return {
            "_sources": self._sources,
            "_chunks": self._chunks,
            "_encoder": self._encoder,
        }

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._begin()


class ChunkReader:
    """Chunks by their number; the latest are kept.

    Args:
        loader: reads them.
        workers: how many copies of the loader read ahead; none where there would be one.
        in_processes: whether each is in a process of its own, and not in a thread.
        ahead: how many chunks are read ahead, by all of them together.
    """

    def __init__(self, loader: ChunkLoader, workers: int, in_processes: bool, ahead: int):
        self._settings = loader, workers, in_processes, ahead
        self._begin()

    def _begin(self) -> None:
        loader, workers, in_processes, ahead = self._settings
        self._kept: collections.OrderedDict[int, Hashed] = collections.OrderedDict()
        self._reads: collections.Counter[int] = collections.Counter()
        self._has_warned = False
        self._process_id = os.getpid()
        is_ahead = workers > 1 or (workers > 0 and in_processes)
        self._workers = Workers(loader, workers, in_processes, ahead) if is_ahead else None

    def begin_epoch(self) -> None:
        """Counts from now on how often a chunk is read."""
        self._reads.clear()

    def read(self, number: int, following: Sequence[int] = ()) -> Hashed:
        """A chunk.

        Args:
            number: the chunk.
            following: those that will be asked for next, if that is known.

        Warns:
            UserWarning: if a chunk is read several times in an epoch.
        """
        if self._process_id != os.getpid():
            self._begin()  # forked, without the workers
        if number not in self._kept:
            self._note(number)
            self._kept[number] = self._load(number, following)
            while len(self._kept) > _KEPT_CHUNKS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return self._kept[number]

    def _load(self, number: int, following: Sequence[int]) -> Hashed:
        loader = self._settings[0]
        if self._workers is None:
            return loader.load(number)
        return self._workers.load(number, [one for one in following if one not in self._kept])

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

    def __getstate__(self) -> dict[str, object]:
        return {"_settings": self._settings}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._begin()
