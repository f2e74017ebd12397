"""Workers that read chunks ahead, in threads or in processes, each with its own files."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_multigpu.sparse.reading import ChunkLoader, Hashed

_MODULE = "keras_multigpu.sparse.worker_process"


class Workers:
    """Copies of a loader, each of which reads its own part of the chunks, in order.

    A part of a file that is read from its beginning on belongs to one worker; the next part goes
    to the next worker.

    Args:
        loader: what is copied.
        count: how many copies.
        in_processes: whether each is in a process of its own, and not in a thread.
        ahead: how many chunks are read ahead, by all of them together.
    """

    def __init__(self, loader: ChunkLoader, count: int, in_processes: bool, ahead: int):
        make = ProcessLoader if in_processes else copy.deepcopy
        self._loader = loader
        self._loaders = [make(loader) for _ in range(count)]
        # One thread for each: a worker does one thing at a time.
        self._threads = [ThreadPoolExecutor(1) for _ in range(count)]
        self._units: list[Any] = [None] * count
        self._latest = 0
        self._ahead = ahead
        self._pending: dict[int, Future[Hashed]] = {}

    def load(self, number: int, following: Sequence[int]) -> Hashed:
        """A chunk; those that follow are read meanwhile.

        Raises:
            BadDataError: as the loader does.
        """
        wanted = list(dict.fromkeys([number, *following]))[: self._ahead + 1]
        for old in self._pending.keys() - set(wanted):
            self._pending.pop(old).cancel()
        for one in wanted:
            if one not in self._pending:
                worker = self._worker_of(one)
                self._pending[one] = self._threads[worker].submit(self._loaders[worker].load, one)
        return self._pending.pop(number).result()

    def _worker_of(self, number: int) -> int:
        unit = self._loader.unit(number)
        if unit not in self._units:
            self._latest = (self._latest + 1) % len(self._units)
            self._units[self._latest] = unit
        return self._units.index(unit)


class ProcessLoader:
    """A loader in another process, which imports nothing of the caller's script.

    Neither fork, which copies locks that other threads hold, nor multiprocessing's spawn, which
    runs the caller's script once more.

    Args:
        loader: what is sent there. The process starts with the first chunk, and ends with this
            object.
    """

    def __init__(self, loader: ChunkLoader):
        self._loader = loader
        self._process: subprocess.Popen[bytes] | None = None

    def load(self, number: int) -> Hashed:
        """A chunk.

        Raises:
            RuntimeError: if the process has ended.
        """
        if self._process is None:
            self._process = self._start()
        try:
            pickle.dump(number, self._process.stdin)  # type: ignore[arg-type]
            self._process.stdin.flush()  # type: ignore[union-attr]
            is_good, result = pickle.load(self._process.stdout)  # type: ignore[arg-type]
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise RuntimeError(
                "A process that reads files must stay alive. Received: one that ended with exit "
                f"code {self._process.wait()}. Its messages are on the standard error output; take "
                "fewer workers if memory ran out, or `use_multiprocessing=False`."
            ) from error
        if not is_good:
            raise result
        return result

    def _start(self) -> subprocess.Popen[bytes]:
        # NumPy's backend is enough to import the package, and takes no GPU.
        path = os.pathsep.join(one for one in sys.path if one)
        process = subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "KERAS_BACKEND": "numpy", "PYTHONPATH": path},
            start_new_session=True,  # an interrupt is for the caller
        )
        weakref.finalize(self, _end, process)
        pickle.dump(self._loader, process.stdin)  # type: ignore[arg-type]
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Closes the pipes; the process ends when it has nothing more to read."""
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # it has ended, and took in no more
            pipe.close()  # type: ignore[union-attr]
    process.wait()
