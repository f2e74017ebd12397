"""Batches of data in memory, in another order in every epoch of `fit`."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from keras_multigpu.sparse.epochs import EpochDataset


class ShuffledRows(EpochDataset):
    """Batches of numbered rows; abstract. `evaluate` and `predict` keep the order of the rows.

    Args:
        rows: the numbers of the rows.
        batch_size: rows in a batch; the last batch may have fewer.
        shuffle: draw another order for every epoch of `fit`.
        seed: of that order.
        **kwargs: those of `keras.utils.PyDataset`. One worker makes the batches, whatever they say.

    Raises:
        ValueError: if an argument is not of its kind.
    """

    def __init__(self, rows: np.ndarray, batch_size: int, shuffle: bool, seed: int, **kwargs: Any):
        super().__init__(**kwargs)
        check_batch_size(batch_size)
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"`seed` must be an integer from 0 up. Received: seed={seed!r}.")
        self.batch_size = batch_size
        self._rows = rows
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


def check_batch_size(batch_size: Any) -> None:
    """Refuses what is not a number of rows.

    Raises:
        ValueError: if it is not a positive integer.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(
            f"`batch_size` must be a positive integer. Received: batch_size={batch_size!r}."
        )
