"""Batches of two texts and a rating: what a user wrote, and what was written about an item."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_multigpu.zoo.ratings import check_batch_size

if TYPE_CHECKING:
    from keras_multigpu.zoo.reviews import Reviews


class ReviewPairs(keras.utils.PyDataset):
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
        shuffle: draw another order for every epoch.
        seed: of that order.
        **kwargs: those of `keras.utils.PyDataset`.

    Item `i` is `({"user": words, "item": words}, ratings)`: int32 of shape `(batch_size, length)`
    and float32 of shape `(batch_size, 1)`; the last batch of an epoch may have fewer rows.

    Raises:
        ValueError: if a number is not a positive integer, or there are no rows.

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
        super().__init__(**kwargs)
        check_batch_size(batch_size)
        if type(length) is not int or length < 1:
            raise ValueError(f"`length` must be a positive integer. Received: length={length!r}.")
        if not len(rows):
            raise ValueError("`rows` must name at least one review. Received: none.")
        self.reviews = reviews
        self.length = length
        self.batch_size = batch_size
        self._order = np.asarray(rows)
        self._random = np.random.default_rng(seed) if shuffle else None
        self._texts = {
            "user": (reviews.user_rows, _by(reviews.user_rows, known)),
            "item": (reviews.item_rows, _by(reviews.item_rows, known)),
        }
        self.on_epoch_end()

    def __len__(self) -> int:
        return -(-len(self._order) // self.batch_size)

    def __getitem__(self, index: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        rows = self._order[index * self.batch_size : (index + 1) * self.batch_size]
        texts = {side: np.stack([self._text(side, row) for row in rows]) for side in self._texts}
        return texts, self.reviews.ratings[rows, None]

    def on_epoch_end(self) -> None:
        """Draws the order of the next epoch."""
        if self._random is not None:
            self._order = self._random.permutation(self._order)

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


def _by(owners: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The known reviews, grouped by owner, and where each owner's begin."""
    known = np.asarray(known)
    grouped = known[np.argsort(owners[known], kind="stable")]
    counts = np.bincount(owners[known], minlength=owners.max() + 1)
    return grouped, np.concatenate([[0], np.cumsum(counts)])
