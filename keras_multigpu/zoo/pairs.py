"""Batches of a user's text, an item's text, and a rating."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from keras_multigpu.arguments import positive_integer
from keras_multigpu.zoo.batches import ShuffledRows

if TYPE_CHECKING:
    from keras_multigpu.zoo.reviews import Reviews


class ReviewPairs(ShuffledRows):
    """Batches for `fit`, `evaluate` and `predict` of a DeepCoNN; made by `Reviews.pairs`.

    A user's text is everything that the user wrote; an item's text is everything that was written
    about it; both up to `length` words. The review whose rating is predicted is left out: it would
    reveal the rating, and does not exist yet when a rating is predicted.

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
        rows, known = _check("rows", rows, count), _check("known", known, count)
        super().__init__(rows, batch_size, shuffle, seed, **kwargs)
        self.reviews = reviews
        self.length = positive_integer("length", length)
        self._texts = {
            "user": (reviews.user_rows, _by(reviews.user_rows, known)),
            "item": (reviews.item_rows, _by(reviews.item_rows, known)),
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
            if review != row:
                words = self.reviews.words_of(review)[: self.length - place]
                text[place : place + len(words)] = words
                place += len(words)
            if place == self.length:
                break
        return text


def _check(name: str, rows: Any, count: int) -> np.ndarray:
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


def _by(owners: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The known reviews, grouped by owner, and where each owner's group begins."""
    grouped = known[np.argsort(owners[known], kind="stable")]
    counts = np.bincount(owners[known], minlength=owners.max() + 1)
    return grouped, np.concatenate([[0], np.cumsum(counts)])
