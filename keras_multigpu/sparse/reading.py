"""Reads and hashes the chunks of a data set: on request, or ahead, by workers.

A worker is a thread or a process with its own copy of the sources, and therefore its own files.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import os
import pickle
import subprocess
import sys
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from keras_multigpu.sparse.encoder import HashEncoder
from keras_multigpu.sparse.sources import BadDataError, Chunk, Source

# The indices and the numbers of a chunk, int32 and float32, with a row for each good row.
Hashed = tuple[np.ndarray, np.ndarray]
_KEPT_CHUNKS = 3
_MANY_READS = 3
_SERVE = "from keras_multigpu.sparse.reading import serve_chunks; serve_chunks()"


class Scanned(NamedTuple):
    """Files that were scanned, their chunks, and what hashes their rows."""

    sources: Sequence[Source]
    chunks: Sequence[Chunk]
    encoder: HashEncoder


class ChunkLoader:
    """Reads and hashes chunks by their number; one file at a time is open."""

    def __init__(self, data: Scanned):
        self._sources = copy.deepcopy(data.sources)
        self._chunks = data.chunks
        self._encode = data.encoder.stream()
        self._open: Source | None = None

    def load(self, number: int) -> Hashed:
        """A chunk; a `BadDataError` if the file has changed since it was scanned."""
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


class ChunkReader:
    """Chunks by their number; the latest ones are kept.

    So many `workers` together read `ahead` chunks in advance. A single thread does not read ahead.
    All chunks of a unit, which has to be read from its beginning, go to one worker; the next unit
    goes to the next worker.
    """

    def __init__(self, data: Scanned, workers: int, in_processes: bool, ahead: int):
        is_ahead = workers > 1 or (workers > 0 and in_processes)
        make = _ProcessLoader if is_ahead and in_processes else ChunkLoader
        self._chunks = data.chunks
        self._ahead = ahead if is_ahead else 0
        self._loaders = [make(data) for _ in range(workers if is_ahead else 1)]
        # One thread for each: a worker does one thing at a time.
        self._threads = [ThreadPoolExecutor(1) for _ in self._loaders]
        self._units: list[Any] = [None] * len(self._loaders)
        self._latest_worker = 0
        self._pending: dict[int, Future[Hashed]] = {}
        self._kept: dict[int, Hashed] = {}  # the latest one is the last
        self._reads: collections.Counter[int] = collections.Counter()
        self._has_warned = False

    def begin_epoch(self) -> None:
        """Starts to count how often a chunk is read."""
        self._reads.clear()

    def read(self, number: int, following: Sequence[int] = ()) -> Hashed:
        """A chunk. `following` are the chunks that will be needed next, if they are known."""
        chunk = self._kept.pop(number, None)
        if chunk is None:
            self._count(number)
            chunk = self._load(number, [one for one in following if one not in self._kept])
        self._kept[number] = chunk
        while len(self._kept) > _KEPT_CHUNKS:
            del self._kept[next(iter(self._kept))]
        return chunk

    def _load(self, number: int, following: Sequence[int]) -> Hashed:
        """A chunk; meanwhile the workers read those that follow."""
        if not self._ahead:
            return self._loaders[0].load(number)
        wanted = list(dict.fromkeys([number, *following]))[: self._ahead + 1]
        for old in self._pending.keys() - set(wanted):
            self._pending.pop(old).cancel()
        for one in wanted:
            if one not in self._pending:
                worker = self._choose_worker(self._chunks[one])
                self._pending[one] = self._threads[worker].submit(self._loaders[worker].load, one)
        return self._pending.pop(number).result()

    def _choose_worker(self, chunk: Chunk) -> int:
        unit = chunk.file, chunk.unit
        if unit not in self._units:
            self._latest_worker = (self._latest_worker + 1) % len(self._units)
            self._units[self._latest_worker] = unit
        return self._units.index(unit)

    def _count(self, number: int) -> None:
        self._reads[number] += 1
        if self._reads[number] == _MANY_READS and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "The batches of a HashedDataset are asked for in disorder, so that chunks are read "
                f"again and again. Received: chunk {number} read {_MANY_READS} times in an epoch. "
                "Call `fit(..., shuffle=False)`: the dataset shuffles itself.",
                stacklevel=4,
            )


class _ProcessLoader:
    """A loader in another process, which starts with the first chunk and ends with this object.

    Fork would copy locks that other threads hold; the spawn of multiprocessing would run the
    user's script once more. This process imports nothing of that script.
    """

    def __init__(self, data: Scanned):
        self._data = data
        self._process: subprocess.Popen[bytes] | None = None

    def load(self, number: int) -> Hashed:
        """A chunk; the process's own error if it failed, a `RuntimeError` if it has ended."""
        if self._process is None:
            self._process = self._start()
        try:
            pickle.dump(number, self._process.stdin)  # type: ignore[arg-type]
            self._process.stdin.flush()  # type: ignore[union-attr]
            is_good, result = pickle.load(self._process.stdout)  # type: ignore[arg-type]
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise RuntimeError(
                "A process that reads files must stay alive. Received: one that ended with exit "
                f"code {self._process.wait()}. Its messages are on the standard error output. Use "
                "fewer workers if memory ran out, or `use_multiprocessing=False`."
            ) from error
        if not is_good:
            raise result
        return result

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(one for one in sys.path if one)
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The NumPy backend is enough to import the package, and occupies no GPU.
            env={**os.environ, "KERAS_BACKEND": "numpy", "PYTHONPATH": path},
            start_new_session=True,  # the user's interrupt must not end it
        )
        weakref.finalize(self, _end, process)
        pickle.dump(self._data, process.stdin)  # type: ignore[arg-type]
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Closes the pipes; the process ends when it has nothing more to read."""
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # it has ended, and did not read everything
            pipe.close()  # type: ignore[union-attr]
    process.wait()


def serve_chunks() -> None:
    """The loop of a worker process: numbers of chunks come in, chunks or errors go out."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # anything else that is printed
    loader = ChunkLoader(pickle.load(sys.stdin.buffer))
    while True:
        try:
            number = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: tuple[bool, Any]
        try:
            answer = True, loader.load(number)
        except Exception as error:  # the caller raises it
            answer = False, error
        pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()
