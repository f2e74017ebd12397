"""Batches of rows of ratings, for autoencoders."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_multigpu.arguments import finite_number
from keras_multigpu.zoo.batches import ShuffledRows


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
        self._hiding_seed = seed
        if self.targets.shape != matrix.shape:
            raise ValueError(
                "`targets` must have the shape of the inputs. Received: "
                f"targets.shape={self.targets.shape}, inputs of shape {matrix.shape}."
            )

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Some rows, as inputs and as targets."""
        inputs = _dense(self.matrix[rows])
        return inputs, inputs if self.targets is self.matrix else _dense(self.targets[rows])

    def _make_batch(self, epoch: int | None, number: int) -> tuple[Any, ...]:
        inputs, targets = super()._make_batch(epoch, number)
        if self.hide and epoch is not None:
            draw = np.random.default_rng([self._hiding_seed, epoch, number])
            inputs = inputs * (draw.random(inputs.shape, dtype="float32") >= self.hide)
        return inputs, targets


def _dense(rows: Any) -> np.ndarray:
    return np.asarray(rows.toarray(), "float32")
