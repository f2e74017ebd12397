"""Ratings and reviews in memory: batches of their rows, and parts to train on and to test on."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_multigpu.arguments import finite_number, non_negative_integer, positive_integer
from keras_multigpu.sparse.epochs import EpochDataset

if TYPE_CHECKING:
    from keras_multigpu.zoo.reviews import Reviews


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


class ReviewPairs(ShuffledRows):
    """Batches for `fit`, `evaluate` and `predict` of a DeepCoNN; made by `Reviews.pairs`.

    A user's text is everything that the user wrote; an item's text is everything that was written
    about it; both up to `length` words. The review whose rating is predicted is left out: it would
    reveal the rating, and does not exist yet when a rating is predicted. So are its copies: what
    the user wrote about the same item, or in the same words about another item.

    Args:
        reviews: the reviews.
        rows: the numbers of the reviews whose ratings are predicted.
        known: the numbers of the reviews that the texts are taken from.
        length: the words of each text; shorter texts are padded with 0.
        batch_size: ratings in a batch.
        shuffle: draw another order for every epoch of `fit`; `evaluate` and `predict` keep the
            order of `rows`.
        seed: the seed of that order.
        **kwargs: passed to `keras.utils.PyDataset`; one worker makes the batches in any case.

    Item `i` is `({"user": words, "item": words}, ratings)`: int32 of shape `(batch_size, length)`
    and float32 of shape `(batch_size, 1)`; the last batch of an epoch may have fewer rows.

    Raises:
        ValueError: if an argument is invalid, or `rows` or `known` is empty.

    Example:
        >>> import os, tempfile
        >>> from keras_multigpu.zoo import make_reviews, read_reviews
        >>> path = make_reviews(os.path.join(tempfile.mkdtemp(), "reviews.json"), reviews=50)
        >>> pairs = read_reviews(path, verbose=0).pairs(length=20, batch_size=40)
        >>> texts, ratings = pairs[0]
        >>> texts["user"].shape, texts["item"].shape, ratings.shape, len(pairs)
        ((40, 20), (40, 20), (40, 1), 2)
    """

    def __init__(
        self,
        reviews: Reviews,
        rows: np.ndarray,
        known: np.ndarray,
        length: int = 800,
        batch_size: int = 100,
        shuffle: bool = True,
        seed: int = 0,
        **kwargs: Any,
    ):
        count = len(reviews.ratings)
        rows, known = _check_numbers("rows", rows, count), _check_numbers("known", known, count)
        super().__init__(rows, batch_size, shuffle, seed, **kwargs)
        self.reviews = reviews
        self.length = positive_integer("length", length)
        self._texts = {
            "user": (reviews.user_rows, _group_by(reviews.user_rows, known)),
            "item": (reviews.item_rows, _group_by(reviews.item_rows, known)),
        }

    def take(self, rows: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The texts and the ratings of some reviews."""
        texts = {side: np.stack([self._text(side, row) for row in rows]) for side in self._texts}
        return texts, self.reviews.ratings[rows, None]

    def _text(self, side: str, row: int) -> np.ndarray:
        """The words on one side of a rating."""
        owners, (grouped, starts) = self._texts[side]
        text, place = np.zeros(self.length, "int32"), 0
        for review in grouped[starts[owners[row]] : starts[owners[row] + 1]]:
            if self._is_copy(review, row):
                continue
            words = self.reviews.words_of(review)[: self.length - place]
            text[place : place + len(words)] = words
            place += len(words)
            if place == self.length:
                break
        return text

    def _is_copy(self, review: int, row: int) -> bool:
        """Whether a review is the one to predict, or repeats it."""
        reviews = self.reviews
        if reviews.user_rows[review] != reviews.user_rows[row]:
            return False
        return reviews.item_rows[review] == reviews.item_rows[row] or np.array_equal(
            reviews.words_of(review), reviews.words_of(row)
        )


def _check_numbers(name: str, rows: Any, count: int) -> np.ndarray:
    """The numbers of some reviews as an array."""
    numbers = np.asarray(rows)
    if not numbers.size:
        raise ValueError(f"`{name}` must name at least one review. Received: none.")
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise ValueError(
            f"`{name}` must be the numbers of reviews, integers in a list or an array of one axis. "
            f"Received: {name}={rows!r}. For a mask, use `np.flatnonzero(mask)`."
        )
    wrong = numbers[(numbers < 0) | (numbers >= count)]
    if len(wrong):
        raise ValueError(
            f"`{name}` must be the numbers of reviews, from 0 to {count - 1}. Received: {wrong[0]}."
        )
    return numbers


def _group_by(owners: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The known reviews, grouped by owner, and where each owner's group begins."""
    grouped = known[np.argsort(owners[known], kind="stable")]
    counts = np.bincount(owners[known], minlength=owners.max() + 1)
    return grouped, np.concatenate([[0], np.cumsum(counts)])


def split_share(count: int, share: Any, seed: Any, what: str) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the rows to train on, and of a random share of rows to test on."""
    finite_number("share", share, "between 0 and 1", lambda one: 0 < one < 1)
    order = np.random.default_rng(non_negative_integer("seed", seed)).permutation(count)
    first = round(share * count)
    if not 0 < first < count:
        raise ValueError(
            f"`share` must leave at least one {what} to train on and one to test on. "
            f"Received: share={share!r} of {count} {what}s, which is {first}."
        )
    return np.sort(order[first:]), np.sort(order[:first])


def split_folds(
    count: int, folds: Any, seed: Any, what: str
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The same for each of several parts of equal size."""
    folds = positive_integer("folds", folds)
    if not 2 <= folds <= count:
        raise ValueError(
            f"`folds` must be from 2 to the number of {what}s, {count}. Received: folds={folds}."
        )
    order = np.random.default_rng(non_negative_integer("seed", seed)).permutation(count)
    parts = np.array_split(order, folds)
    return [
        (np.sort(np.concatenate(parts[:fold] + parts[fold + 1 :])), np.sort(part))
        for fold, part in enumerate(parts)
    ]
