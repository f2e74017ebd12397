"""Amazon's files of reviews: a JSON object on each line."""

from __future__ import annotations

import array
import collections
import itertools
import json
import os
import re
from collections.abc import Iterator
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
    size = positive_integer("vocabulary", vocabulary)
    max_words = positive_integer("max_words", max_words)
    users, items, known = _numbering(), _numbering(), _numbering()
    user_rows, item_rows, words = array.array("i"), array.array("i"), array.array("i")
    ratings, starts = array.array("f"), array.array("q", [0])
    skipped: collections.Counter[str] = collections.Counter()
    for user, item, text, rating in _parse(path, verbose, skipped if skips else None):
        user_rows.append(users[user])
        item_rows.append(items[item])
        ratings.append(rating)
        words.extend(known[word] for word in _WORD.findall(text.lower())[:max_words])
        starts.append(len(words))
    if not ratings:
        raise BadDataError(f"{path} must have at least one review. Received: a file with none.")
    numbers, kept = _keep_frequent(np.asarray(words, "int32"), list(known), size)
    rows = np.asarray(user_rows, "int32"), np.asarray(item_rows, "int32")
    stars = np.asarray(ratings, "float32")
    return Reviews(
        *rows, stars, numbers, np.asarray(starts), list(users), list(items), kept, skipped
    )


def _numbering() -> collections.defaultdict[str, int]:
    """Gives each name or word its number, in the order in which they first appear."""
    return collections.defaultdict(itertools.count().__next__)


def _keep_frequent(words: np.ndarray, texts: list[str], size: int) -> tuple[np.ndarray, list[str]]:
    """The places of words in the vocabulary of the most frequent ones; and the vocabulary."""
    kept = np.argsort(-np.bincount(words, minlength=len(texts)), kind="stable")[:size]
    numbers = np.full(len(texts), _UNKNOWN, "int32")
    numbers[kept] = np.arange(2, 2 + len(kept), dtype="int32")
    return numbers[words], ["", "?", *(texts[number] for number in kept)]


def _parse(
    path: str, verbose: int, skipped: collections.Counter[str] | None
) -> Iterator[tuple[str, str, str, float]]:
    """The reviews in a file; bad lines are counted in `skipped`, or, if that is `None`, errors."""
    for first, block in read_lines(path, verbose):
        for number, line in enumerate(block.split(b"\n"), first):
            try:
                if line.strip():
                    yield _parse_line(line)
            except ValueError as error:
                if skipped is None:
                    raise explain_line(path, number, str(error)) from error
                skipped["no review"] += 1


def _parse_line(data: bytes) -> tuple[str, str, str, float]:
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
