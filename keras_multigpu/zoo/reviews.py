"""Reviews in memory: the users, the items, the words and the ratings; batches of their texts."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np

from keras_multigpu.arguments import positive_integer
from keras_multigpu.zoo.batches import ShuffledRows, split_numbers


@dataclasses.dataclass(frozen=True, eq=False)
class Reviews:
    """Reviews as numbers; made by `read_reviews`.

    Args:
        user_rows: for each review, the place of its user in `users`, int32.
        item_rows: the place of its item in `items`, int32.
        ratings: float32.
        words: the words of all reviews, one after the other: places in `vocabulary`, int32.
        starts: where each review's words begin in `words`, and where the last one's end.
        users: the names of the users, in the order in which they first appear.
        items: the names of the items, in that order.
        vocabulary: `""` for no word, `"?"` for all rare words, then the words, the most frequent
            first.
        skipped: how many lines were left out, by reason.

    Example:
        >>> reviews = Reviews(
        ...     user_rows=np.array([0, 0]),
        ...     item_rows=np.array([0, 1]),
        ...     ratings=np.array([5.0, 1.0], "float32"),
        ...     words=np.array([2, 3, 4]),
        ...     starts=np.array([0, 2, 3]),
        ...     users=["ann"],
        ...     items=["pen", "cup"],
        ...     vocabulary=["", "?", "writes", "well", "broke"],
        ... )
        >>> train, test = reviews.split(0.5)
        >>> len(train), len(test), [len(reviews.words_of(number)) for number in (0, 1)]
        (1, 1, [2, 1])
    """

    user_rows: np.ndarray
    item_rows: np.ndarray
    ratings: np.ndarray
    words: np.ndarray
    starts: np.ndarray
    users: list[str]
    items: list[str]
    vocabulary: list[str]
    skipped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def __str__(self) -> str:
        return (
            f"{len(self.ratings):,} reviews of {len(self.items):,} items by {len(self.users):,} "
            f"users, {len(self.words):,} words, {len(self.vocabulary) - 2:,} different; "
            f"{sum(self.skipped.values()):,} skipped"
        )

    def words_of(self, review: int) -> np.ndarray:
        """The words of a review, int32."""
        return self.words[self.starts[review] : self.starts[review + 1]]

    def split(self, share: float = 0.1, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the reviews to train on, and of the reviews to test on.

        Args:
            share: the part to test on.
            seed: the seed of the draw.

        Raises:
            ValueError: if the share is not between 0 and 1, or leaves no review on one side.
        """
        return split_numbers(len(self.ratings), "review", seed, share)[0]

    def pairs(
        self, rows: np.ndarray | None = None, known: np.ndarray | None = None, **options: Any
    ) -> ReviewPairs:
        """A user's text, an item's text, and the rating, to train a DeepCoNN.

        Args:
            rows: the numbers of the reviews whose ratings are predicted; `None` for all.
            known: the numbers of the reviews that the texts are taken from; `None` for `rows`. To
                test on other reviews, pass those that the model was trained on.
            **options: `length`, `batch_size`, `shuffle` and `seed`, as for `ReviewPairs`.
        """
        rows = np.arange(len(self.ratings)) if rows is None else rows
        return ReviewPairs(self, rows, rows if known is None else known, **options)


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
