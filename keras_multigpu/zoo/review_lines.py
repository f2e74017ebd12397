"""Amazon's files of reviews: a JSON object on each line."""

from __future__ import annotations

import array
import collections
import json
import os
import re
from typing import Any

import numpy as np

from keras_multigpu.arguments import positive_integer
from keras_multigpu.sparse.lines import check_file, explain_line, read_lines
from keras_multigpu.sparse.sources import BadDataError
from keras_multigpu.zoo.reviews import Reviews

_WORD = re.compile(r"\w+(?:'\w+)*")
_UNKNOWN = 1  # 0 pads short texts
_HIGHEST = float(np.finfo("float32").max)
# The names in the collections of 2014 and 2018, and in the one of 2023.
_FIELDS = {
    "user": ("reviewerID", "user_id"),
    "item": ("asin", "parent_asin"),
    "text": ("reviewText", "text"),
    "rating": ("overall", "rating"),
}


def read_reviews(
    path: str | os.PathLike[str],
    *,
    vocabulary: int = 20_000,
    max_words: int = 800,
    errors: str = "raise",
    verbose: int = 1,
) -> Reviews:
    r"""Reads Amazon's reviews: one JSON object on each line, gzipped if the name ends in `.gz`.

    The fields may have the names of the collections of 2014 and 2018 (`reviewerID`, `asin`,
    `reviewText`, `overall`) or of 2023 (`user_id`, `asin`, `text`, `rating`). The file is read
    some megabytes at a time. Only the numbers of the words, 4 bytes each, and the distinct words
    stay in memory.

    Args:
        path: the file.
        vocabulary: how many of the most frequent words are kept; all others share one number.
        max_words: how many words of a review are kept, from its beginning.
        errors: `"raise"`, or `"skip"` to leave out and count lines that are not JSON objects, that
            lack a field, or whose rating is not a finite number. A review without a text counts
            as one with no words.
        verbose: 1 for a progress bar, 0 for silence.

    Returns:
        The reviews.

    Raises:
        ValueError: if an argument is invalid, or the file can't be read or has no reviews; and,
            unless errors are skipped, for the first bad line, with its number.

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
    path, skips = check_file(path, errors)
    vocabulary = positive_integer("vocabulary", vocabulary)
    gathered = _Gathered(positive_integer("max_words", max_words))
    for line, block in read_lines(path, verbose):
        for number, text in enumerate(block.split(b"\n"), line):
            if text.strip():
                gathered.add(path, number, text, skips)
    if not gathered.ratings:
        raise BadDataError(f"{path} must have at least one review. Received: a file with none.")
    return gathered.finish(vocabulary)


class _Gathered:
    """The reviews that have been read so far."""

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
        """Adds a line."""
        try:
            user, item, text, rating = parse_review(data)
        except ValueError as error:
            if not skips:
                raise explain_line(path, line, str(error)) from error
            self.skipped["no review"] += 1
            return
        self.user_rows.append(self.users.setdefault(user, len(self.users)))
        self.item_rows.append(self.items.setdefault(item, len(self.items)))
        self.ratings.append(rating)
        words = _WORD.findall(text.lower())[: self.max_words]
        self.words.extend(self.known.setdefault(word, len(self.known)) for word in words)
        self.starts.append(len(self.words))

    def finish(self, size: int) -> Reviews:
        """The reviews, with only the `size` most frequent words."""
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


def parse_review(data: bytes) -> tuple[str, str, str, float]:
    """The user, the item, the text (it may be missing) and the rating of a line."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"a line must be a JSON object. Received: {data[:60]!r}.")
    values: list[Any]
    values = [next((found[n] for n in names if n in found), None) for names in _FIELDS.values()]
    user, item, text, rating = values
    is_number = isinstance(rating, (int, float)) and not isinstance(rating, bool)
    for field, kind, value, is_good in (
        ("user", "a text", user, isinstance(user, str) and user),
        ("item", "a text", item, isinstance(item, str) and item),
        ("rating", "a finite number", rating, is_number and abs(rating) < _HIGHEST),
    ):
        if not is_good:
            names = " or ".join(map(repr, _FIELDS[field]))
            raise ValueError(
                f"a review must have its {field} as {kind} named {names}. Received: {value!r}."
            )
    return user, item, text if isinstance(text, str) else "", float(rating)
