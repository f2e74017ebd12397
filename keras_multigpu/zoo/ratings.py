"""Ratings of items by users, as one sparse matrix."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, overload

import numpy as np
import scipy.sparse

from keras_multigpu.arguments import check_choice, short
from keras_multigpu.zoo.batches import RatingBatches, split_numbers


@dataclasses.dataclass(frozen=True, eq=False)
class Ratings:
    """A sparse matrix of ratings; made by `read_ratings`.

    Args:
        matrix: the ratings divided by `highest`, a `scipy.sparse.csr_matrix` of float32 and of
            shape `(users, items)`. An item that is not in it has not been rated.
        users: the users, in the order of the rows: integers if all are written as integers, else
            the texts in the file (`034` is not an integer).
        items: the items, in the order of the columns.
        highest: the rating that is 1 in the matrix.
        skipped: how many lines were left out, by reason.
        repeated: how many ratings were replaced by a later one of the same user and item.

    Example:
        >>> matrix = scipy.sparse.csr_matrix(np.array([[0.2, 1.0], [0.0, 0.6]], "float32"))
        >>> ratings = Ratings(matrix, np.array([7, 8]), np.array([1, 2]), highest=5.0)
        >>> batches = ratings.batches(batch_size=1, shuffle=False, by="user", hide=0)
        >>> inputs, targets = batches[1]
        >>> inputs.tolist(), len(batches)
        ([[0.0, 0.6000000238418579]], 2)
    """

    matrix: Any
    users: np.ndarray
    items: np.ndarray
    highest: float
    skipped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    repeated: int = 0

    def __str__(self) -> str:
        rows, columns = self.matrix.shape
        return (
            f"{self.matrix.nnz:,} ratings of {columns:,} items by {rows:,} users, up to "
            f"{self.highest:g}; {sum(self.skipped.values()):,} skipped, {self.repeated:,} repeated"
        )

    @property
    def lowest(self) -> float:
        """The lowest rating that occurs; 0 if there are none."""
        return float(self.matrix.data.min()) * self.highest if self.matrix.nnz else 0.0

    def rows(self, by: str = "item") -> Any:
        """The ratings divided by `highest`, with a row for each item, or for each user.

        Args:
            by: `"item"` or `"user"`.
        """
        check_choice("by", by, "item", "user")
        return self.matrix.tocsr() if by == "user" else self.matrix.T.tocsr()

    def batches(
        self,
        batch_size: int = 64,
        shuffle: bool = True,
        seed: int = 0,
        *,
        by: str = "item",
        hide: float = 0.5,
        targets: Ratings | None = None,
    ) -> RatingBatches:
        """Rows as inputs and as targets, to train an autoencoder.

        Args:
            batch_size: rows in a batch.
            shuffle: draw another order of the rows for every epoch of `fit`.
            seed: the seed of that order, and of what is hidden.
            by: `"item"` for the ratings of an item as a row, `"user"` for those of a user.
            hide: as for `RatingBatches`.
            targets: ratings of the same users and items to predict from these, such as those held
                out by `split`: `fit(train.batches(), validation_data=train.batches(targets=test))`.
                `None` for these ratings.
        """
        goal = None
        if targets is not None:
            self._check_same_names(targets)
            goal = targets.rows(by) * (targets.highest / self.highest)
        return RatingBatches(self.rows(by), batch_size, shuffle, seed, hide=hide, targets=goal)

    @overload
    def split(self, share: float = 0.1, seed: int = 0) -> tuple[Ratings, Ratings]: ...

    @overload
    def split(self, *, folds: int, seed: int = 0) -> list[tuple[Ratings, Ratings]]: ...

    def split(self, share: float | None = None, seed: int = 0, *, folds: int | None = None) -> Any:
        """Ratings to train on, and ratings to test on, drawn at random.

        All parts keep all users and items: their rows and columns mean the same.

        Args:
            share: the part to test on; 0.1 without `folds`.
            seed: the seed of the draw.
            folds: cut the ratings into this many parts of equal size, and test on each in turn.

        Returns:
            `(train, test)`; with `folds`, a list of such pairs.

        Raises:
            ValueError: if an argument is invalid, or a part would have no ratings.
        """
        if share is not None and folds is not None:
            raise ValueError(
                f"`split` takes a share or folds. Received: share={share!r}, folds={folds!r}."
            )
        share = 0.1 if share is None else share
        pairs = split_numbers(self.matrix.nnz, "rating", seed, share, folds)
        found = [(self._take(train), self._take(test)) for train, test in pairs]
        return found[0] if folds is None else found

    def _take(self, numbers: np.ndarray) -> Ratings:
        """Some of the ratings, by their places in the matrix."""
        whole = self.matrix.tocoo()
        places = whole.row[numbers], whole.col[numbers]
        part = scipy.sparse.csr_matrix((whole.data[numbers], places), shape=whole.shape)
        return Ratings(part, self.users, self.items, self.highest)

    def _check_same_names(self, other: Ratings) -> None:
        for name in ("users", "items"):
            mine, others = getattr(self, name), getattr(other, name)
            if not np.array_equal(mine, others):
                raise ValueError(
                    f"`targets` must have the same {name}, in the same order, as parts of one "
                    f"`split` have. Received: {len(others)} {name} instead of {len(mine)}, or "
                    "others. For another file, use `evaluate_ratings`."
                )


def check_ratings(name: str, value: Any, hint: str = "") -> None:
    """Raises a `TypeError` if an argument is no `Ratings`."""
    if not isinstance(value, Ratings):
        raise TypeError(
            f"`{name}` must be `Ratings`, as `read_ratings` returns. Received: {short(value)}."
            + (f" {hint}" if hint else "")
        )
