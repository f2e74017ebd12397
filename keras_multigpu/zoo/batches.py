"""Lines of files, and batches from memory, for ratings and for reviews."""

from __future__ import annotations

import abc
import os
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_multigpu.arguments import check_choice, non_negative_integer, positive_integer
from keras_multigpu.progress import ReadingBar
from keras_multigpu.sparse.csv_rows import decompressed, read_parts
from keras_multigpu.sparse.epochs import EpochDataset
from keras_multigpu.sparse.sources import BadDataError

if TYPE_CHECKING:
    from keras_multigpu.zoo.reviews import Reviews

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


def _by(owners: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The known reviews, grouped by owner, and where each owner's group begins."""
    grouped = known[np.argsort(owners[known], kind="stable")]
    counts = np.bincount(owners[known], minlength=owners.max() + 1)
    return grouped, np.concatenate([[0], np.cumsum(counts)])


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
