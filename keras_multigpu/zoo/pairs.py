"""Batches of two texts and a rating: what a user wrote, and what was written about an item."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from keras_multigpu.zoo.shuffled import ShuffledRows

if TYPE_CHECKING:
    from keras_multigpu.zoo.reviews import Reviews


class ReviewPairs(ShuffledRows):
    """Batches for `fit`, `evaluate` and `predict` of a DeepCoNN; made by `Reviews.pairs`.

    A user's text is all that the user wrote, an item's all that was written about it, up to
    `length` words, without the review whose rating is to be found: that one would tell it, and is
    not there yet when a rating is predicted.

    Args:
        reviews: the reviews.
        rows: the numbers of the reviews whose ratings are to be found.
        known: the numbers of those from which the texts are taken.
        length: how many words of each text are given; shorter ones are padded with 0.
        batch_size: ratings in a batch.
        shuffle: draw another order for every epoch of `fit`; that of `rows` is kept elsewhere.
        seed: of that order.
        **kwargs: those of `keras.utils.PyDataset`. One worker makes the batches, whatever they say.

    Item `i` is `({"user": words, "item": words}, ratings)`: int32 of shape `(batch_size, length)`
    and float32 of shape `(batch_size, 1)`; the last batch of an epoch may have fewer rows.

    Raises:
        ValueError: if an argument is not of its kind, or there are no rows, or none known.

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
        if type(length) is not int or length < 1:
            raise ValueError(f"`length` must be a positive integer. Received: length={length!r}.")
        count = len(reviews.ratings)
        rows, known = _check("rows", rows, count), _check("known", known, count)
        super().__init__(rows, batch_size, shuffle, seed, **kwargs)
        self.reviews = reviews
        self.length = length
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
    """The numbers of some reviews.

    Raises:
        ValueError: if there are none, or they are no numbers of reviews.
    """
    numbers = np.asarray(rows)
    if not numbers.size:
        raise ValueError(f"`{name}` must name at least one review. Received: none.")
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise ValueError(
            f"`{name}` must be the numbers of reviews, integers in a list or an array of one axis. "
            f"Received: {name}={rows!r}. Of a mask, take `np.flatnonzero(mask)`."
        )
    wrong = numbers[(numbers < 0) | (numbers >= count)]
    if len(wrong):
        raise ValueError(
            f"`{name}` must be the numbers of reviews, from 0 to {count - 1}. Received: {wrong[0]}."
        )
    return numbers


def _by(owners: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The known reviews, grouped by owner, and where each owner's begin."""
    grouped = known[np.argsort(owners[known], kind="stable")]
    counts = np.bincount(owners[known], minlength=owners.max() + 1)
    return grouped, np.concatenate([[0], np.cumsum(counts)])
