"""Rows in memory: batches of them, and parts to train on and to test on."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from keras_multigpu.arguments import finite_number, non_negative_integer, positive_integer
from keras_multigpu.sparse.epochs import EpochDataset


class ShuffledRows(EpochDataset):
    """Batches of numbered rows, in another order in every epoch of `fit`; abstract.

    `evaluate` and `predict` keep the order of the rows. The last batch may have fewer rows.
    """

    def __init__(self, rows: np.ndarray, batch_size: int, shuffle: bool, seed: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.batch_size = positive_integer("batch_size", batch_size)
        self.seed = non_negative_integer("seed", seed)
        self.shuffle = shuffle
        self._rows = rows
        self._drawn: tuple[int | None, np.ndarray] = (None, rows)

    @abc.abstractmethod
    def take(self, rows: np.ndarray) -> tuple[Any, ...]:
        """Some rows as a batch."""

    def __len__(self) -> int:
        return -(-len(self._rows) // self.batch_size)

    def _make_batch(self, epoch: int | None, number: int) -> tuple[Any, ...]:
        if self._drawn[0] != epoch:
            rows = self._rows
            if self.shuffle and epoch is not None:
                rows = np.random.default_rng([self.seed, epoch]).permutation(rows)
            self._drawn = epoch, rows
        return self.take(self._drawn[1][number * self.batch_size :][: self.batch_size])


class RatingBatches(ShuffledRows):
    """Batches of rows of ratings, for `fit`, `evaluate` and `predict`; made by `Ratings.batches`.

    Args:
        matrix: a SciPy CSR matrix with a row for each item, or for each user.
        batch_size: rows in a batch. Only the rows of a batch are ever dense.
        shuffle: draw another order of the rows for every epoch of `fit`; `evaluate` and `predict`
            keep the order of the matrix.
        seed: the seed of that order, and of what is hidden.
        hide: the share of the inputs' ratings that `fit` does not see, drawn anew for every
            epoch. They stay among the targets, so the model learns to predict ratings that it
            can't copy. `evaluate` and `predict` see all ratings.
        targets: a matrix of the same shape whose rows are the targets; `None` for `matrix`.
        **kwargs: passed to `keras.utils.PyDataset`; one worker makes the batches in any case.

    Item `i` is `(inputs, targets)`, float32 of shape `(batch_size, columns)`; the last batch of an
    epoch may have fewer rows.

    Raises:
        ValueError: if the batch size is not a positive integer, the seed is negative, `hide` is
            not in [0, 1), or the targets have another shape.

    Example:
        >>> import scipy.sparse
        >>> batches = RatingBatches(scipy.sparse.eye(5, format="csr"), 2, shuffle=False)
        >>> [batches[number][0].shape for number in range(len(batches))]
        [(2, 5), (2, 5), (1, 5)]
    """

    def __init__(
        self,
        matrix: Any,
        batch_size: int = 64,
        shuffle: bool = True,
        seed: int = 0,
        hide: float = 0.0,
        targets: Any = None,
        **kwargs: Any,
    ):
        super().__init__(np.arange(matrix.shape[0]), batch_size, shuffle, seed, **kwargs)
        self.matrix = matrix
        self.hide = finite_number("hide", hide, "at least 0 and below 1", lambda h: 0 <= h < 1)
        self.targets = matrix if targets is None else targets
        if self.targets.shape != matrix.shape:
            raise ValueError(
                "`targets` must have the shape of the inputs. Received: "
                f"targets.shape={self.targets.shape}, inputs of shape {matrix.shape}."
            )

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Some rows, as inputs and as targets."""
        inputs = _to_dense(self.matrix[rows])
        return inputs, inputs if self.targets is self.matrix else _to_dense(self.targets[rows])

    def _make_batch(self, epoch: int | None, number: int) -> tuple[Any, ...]:
        inputs, targets = super()._make_batch(epoch, number)
        if self.hide and epoch is not None:
            draw = np.random.default_rng([self.seed, epoch, number])
            inputs = inputs * (draw.random(inputs.shape, dtype="float32") >= self.hide)
        return inputs, targets


def _to_dense(rows: Any) -> np.ndarray:
    return np.asarray(rows.toarray(), "float32")


def split_numbers(
    count: int, what: str, seed: Any, share: Any, folds: Any = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The numbers of the rows to train on, and of the rows to test on, drawn at random.

    The rows to test on are a share of all, or, if there are `folds`, each of so many equal parts.
    """
    order = np.random.default_rng(non_negative_integer("seed", seed)).permutation(count)
    if folds is None:
        finite_number("share", share, "between 0 and 1", lambda one: 0 < one < 1)
        first = round(share * count)
        if not 0 < first < count:
            raise ValueError(
                f"`share` must leave at least one {what} to train on and one to test on. "
                f"Received: share={share!r} of {count} {what}s, which is {first}."
            )
        parts = [order[:first]]
    else:
        folds = positive_integer("folds", folds)
        if not 2 <= folds <= count:
            raise ValueError(
                f"`folds` must be from 2 to the number of {what}s, {count}. "
                f"Received: folds={folds}."
            )
        parts = np.array_split(order, folds)
    rows = np.arange(count)
    return [(np.setdiff1d(rows, part, assume_unique=True), np.sort(part)) for part in parts]
