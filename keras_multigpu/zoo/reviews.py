"""Amazon's reviews, as JSON lines: who wrote which words about what, and the rating."""

from __future__ import annotations

import array
import collections
import dataclasses
import os
import re
from typing import Any

import numpy as np

from keras_multigpu.sparse.sources import BadDataError
from keras_multigpu.zoo.lines import check_errors, check_path, read_blocks
from keras_multigpu.zoo.pairs import ReviewPairs
from keras_multigpu.zoo.review_lines import parse_review

_WORD = re.compile(r"\w+(?:'\w+)*")
_UNKNOWN = 1  # 0 is what texts are padded with


def read_reviews(
    path: str | os.PathLike[str],
    *,
    vocabulary: int = 20_000,
    max_words: int = 800,
    errors: str = "raise",
    verbose: int = 1,
) -> Reviews:
    r"""Reads Amazon's reviews: one JSON object in a line, gzipped if the name ends in `.gz`.

    Known are the names of fields of the collections of 2014 and 2018 (`reviewerID`, `asin`,
    `reviewText`, `overall`) and of 2023 (`user_id`, `asin`, `text`, `rating`). The file is read
    some megabytes at a time. In memory stay the numbers of the words, 4 bytes each, and every
    distinct word once.

    Args:
        path: the file.
        vocabulary: how many words are kept, the most frequent ones; all others have one number
            together.
        max_words: how many words of a review are kept, the first ones.
        errors: `"raise"`, or `"skip"` to leave out and count lines that are no JSON objects, that
            lack a field, or whose rating is no finite number. A review without a text is one
            with no words.
        verbose: 1 for a progress bar, 0 for silence.

    Returns:
        The reviews.

    Raises:
        ValueError: if the file can't be read or has no reviews, an argument is not of its kind;
            and, unless errors are skipped, for the first bad line, with its number.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "reviews.json")
        >>> line = '{"reviewerID": "A1", "asin": "B7", "reviewText": "Good, good!", "overall": 5}'
        >>> with open(path, "w") as file:
        ...     _ = file.write(line + "\n" + line[:40] + "\n")
        >>> reviews = read_reviews(path, errors="skip", verbose=0)
        >>> print(reviews)
        1 reviews of 1 items by 1 users, 2 words, 1 different; 1 skipped
        >>> reviews.words_of(0).tolist(), reviews.vocabulary
        ([2, 2], ['', '?', 'good'])
    """
    path, skips = check_path(path), check_errors(errors)
    for name, value in {"vocabulary": vocabulary, "max_words": max_words}.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"`{name}` must be a positive integer. Received: {name}={value!r}.")
    gathered = _Gathered(max_words)
    for line, block in read_blocks(path, verbose):
        for number, text in enumerate(block.split(b"\n"), line):
            if text.strip():
                gathered.add(path, number, text, skips)
    if not gathered.ratings:
        raise BadDataError(f"{path} must have at least one review. Received: a file with none.")
    return gathered.finish(vocabulary)


@dataclasses.dataclass(frozen=True, eq=False)
class Reviews:
    """Reviews as numbers; made by `read_reviews`.

    Args:
        user_rows: for each review the place of its user in `users`, int32.
        item_rows: that of its item in `items`, int32.
        ratings: float32.
        words: the words of all reviews, one after the other, int32: places in `vocabulary`.
        starts: where each review's words begin in `words`, and, as the last, where they end.
        users: the users' names, in the order in which they come.
        items: the items'.
        vocabulary: the words, the most frequent first, behind `""` for no word and `"?"` for all
            others.
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
        """The numbers of the reviews to train on, and of those to test on.

        Args:
            share: the part to test on.
            seed: of the draw.

        Raises:
            ValueError: if the share is not between 0 and 1, or leaves no review on one side.
        """
        if not 0 < share < 1:
            raise ValueError(f"`share` must be between 0 and 1. Received: share={share!r}.")
        order = np.random.default_rng(seed).permutation(len(self.ratings))
        first = round(share * len(order))
        if not 0 < first < len(order):
            raise ValueError(
                "`share` must leave at least one review to train on and one to test on. "
                f"Received: share={share!r} of {len(order)} reviews, which is {first}."
            )
        return np.sort(order[first:]), np.sort(order[:first])

    def pairs(
        self,
        rows: np.ndarray | None = None,
        known: np.ndarray | None = None,
        **options: Any,
    ) -> ReviewPairs:
        """What a DeepCoNN is trained on: a user's text, an item's text, and the rating.

        Args:
            rows: the numbers of the reviews whose ratings are to be found; `None` for all.
            known: those from which the texts are taken: to test on other reviews than those
                trained on, give here those trained on. `None` for `rows`.
            **options: those of `ReviewPairs`: `length`, `batch_size`, `shuffle`, `seed`.
        """
        every = np.arange(len(self.ratings))
        rows = every if rows is None else rows
        return ReviewPairs(self, rows, rows if known is None else known, **options)


class _Gathered:
    """What has been read so far."""

    def __init__(self, max_words: int):
        self.max_words = max_words
        self.users: dict[str, int] = {}
        self.items: dict[str, int] = {}
        self.known: dict[str, int] = {}
        self.user_rows, self.item_rows = array.array("i"), array.array("i")
        self.words, self.starts = array.array("i"), array.array("q", [0])
        self.ratings = array.array("f")
        self.skipped: collections.Counter[str] = collections.Counter()

    def add(self, path: str, line: int, data: bytes, skips: bool) -> None:
        """Takes in a line."""
        try:
            user, item, text, rating = parse_review(data)
        except ValueError as error:
            if not skips:
                raise BadDataError(
                    f"{path}, line {line}: {error} Mend the file, or leave such lines out: "
                    'errors="skip".'
                ) from error
            self.skipped["no review"] += 1
            return
        self.user_rows.append(self.users.setdefault(user, len(self.users)))
        self.item_rows.append(self.items.setdefault(item, len(self.items)))
        self.ratings.append(rating)
        words = _WORD.findall(text.lower())[: self.max_words]
        self.words.extend(self.known.setdefault(word, len(self.known)) for word in words)
        self.starts.append(len(self.words))

    def finish(self, size: int) -> Reviews:
        """The reviews, with the most frequent words only."""
        found = np.asarray(self.words, "int32")
        counts = np.bincount(found, minlength=len(self.known))
        kept = np.argsort(-counts, kind="stable")[:size]
        numbers = np.full(len(self.known), _UNKNOWN, "int32")
        numbers[kept] = np.arange(2, 2 + len(kept), dtype="int32")
        texts = list(self.known)
        return Reviews(
            np.asarray(self.user_rows, "int32"),
            np.asarray(self.item_rows, "int32"),
            np.asarray(self.ratings, "float32"),
            numbers[found],
            np.asarray(self.starts),
            list(self.users),
            list(self.items),
            ["", "?", *(texts[number] for number in kept)],
            self.skipped,
        )
