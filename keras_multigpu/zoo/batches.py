"""What the readers of ratings and of reviews share: lines of files, and batches in memory."""

from __future__ import annotations

import abc
import os
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_multigpu.arguments import check_choice, non_negative_integer, positive_integer
from keras_multigpu.progress import ReadingBar
from keras_multigpu.sparse.csv_rows import decompressed, read_parts
from keras_multigpu.sparse.epochs import EpochDataset
from keras_multigpu.sparse.sources import BadDataError

_BLOCK_BYTES = 4 * 2**20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class ShuffledRows(EpochDataset):
    """Batches of numbered rows, in another order in every epoch of `fit`; abstract.

    `evaluate` and `predict` keep the order of the rows. The last batch may have fewer rows.
    """

    def __init__(self, rows: np.ndarray, batch_size: int, shuffle: bool, seed: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.batch_size = positive_integer("batch_size", batch_size)
        self._rows = rows
        seed = non_negative_integer("seed", seed)
        self._seed = seed if shuffle else None
        self._drawn: tuple[int | None, np.ndarray] = (None, rows)

    @abc.abstractmethod
    def take(self, rows: np.ndarray) -> tuple[Any, ...]:
        """Some rows as a batch."""

    def __len__(self) -> int:
        return -(-len(self._rows) // self.batch_size)

    def _make_batch(self, epoch: int | None, number: int) -> tuple[Any, ...]:
        if self._drawn[0] != epoch:
            rows = self._rows
            if self._seed is not None and epoch is not None:
                rows = np.random.default_rng([self._seed, epoch]).permutation(rows)
            self._drawn = epoch, rows
        return self.take(self._drawn[1][number * self.batch_size :][: self.batch_size])


def read_blocks(
    path: str, verbose: int = 0, size: int = _BLOCK_BYTES
) -> Iterator[tuple[int, bytes]]:
    r"""A file in blocks of whole lines, about `size` bytes each, with the first line's number.

    The file is decompressed if its name ends in `.gz`. If it can't be read, a `BadDataError` says
    so. `verbose=1` shows a progress bar.
    """
    bar = ReadingBar([path], verbose)
    line = 1
    try:
        with open(path, "rb") as raw, decompressed(raw, path) as file:
            for block, _ in read_parts(file, size, _cut_lines):
                bar.show(0, raw.tell())
                yield line, block.removeprefix(_BYTE_ORDER_MARK) if line == 1 else block
                line += block.count(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        raise BadDataError(
            f"{path} must be a readable file. Received: {type(error).__name__}: {error}."
        ) from error
    bar.finish()


def _cut_lines(data: bytes, is_whole: bool) -> tuple[int, None]:
    return (len(data) if is_whole else data.rfind(b"\n") + 1), None


def check_file(path: Any, errors: Any) -> tuple[str, bool]:
    """A path as text, and whether to leave out bad lines."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"`path` must be the path of one file. Received: path={path!r}.")
    check_choice("errors", errors, "raise", "skip")
    return os.fspath(path), errors == "skip"
