"""Artificial data in the form of the real files, for use without a download.

The pattern to learn is known: what the artificial users like.
"""

from __future__ import annotations

import gzip
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq

from keras_multigpu.arguments import positive_integer

GENRES = 5
_TIME = 881_250_949
_PRAISE = ("great", "excellent", "perfect", "lovely")
_BLAME = ("poor", "broken", "useless", "dreadful")
_TOPICS = (
    ("guitar", "strings", "sound", "tone", "amp", "chord"),
    ("garden", "plants", "soil", "seeds", "hose", "roses"),
    ("baby", "stroller", "bottle", "soft", "sleep", "crib"),
    ("kitchen", "knife", "pan", "oven", "sharp", "recipe"),
    ("phone", "battery", "screen", "case", "charger", "cable"),
)


def make_ratings(
    path: str | os.PathLike[str], users: int = 900, items: int = 400, seed: int = 0
) -> str:
    """Writes a file of ratings from 1 to 5, in the form of MovieLens's file with this suffix.

    Item i has genre i % 5. User u likes genre u % 5, has seen more of it, and rates it higher.
    Some items are seen more often than others. A user has rated about 12% of the items.

    Args:
        path: a name that ends in `.data` or `.tsv` (tabs, the second with a header), `.dat`
            (`::`) or `.csv`.
        users: how many users.
        items: how many items.
        seed: the seed of the draw.

    Returns:
        The path.

    Raises:
        ValueError: if the name has another suffix, or a number is not positive.

    Example:
        >>> import os, pathlib, tempfile
        >>> path = make_ratings(os.path.join(tempfile.mkdtemp(), "ratings.dat"), users=3, items=20)
        >>> len(pathlib.Path(path).read_text().splitlines()[0].split("::"))
        4
    """
    path = os.fspath(path)
    users, items = positive_integer("users", users), positive_integer("items", items)
    forms = {
        ".data": ("", "\t"),
        ".dat": ("", "::"),
        ".csv": ("userId,movieId,rating,timestamp\n", ","),
        ".tsv": ("userID\tmovieID\trating\ttimestamp\n", "\t"),
    }
    header, delimiter = forms[_find_suffix(path, forms)]
    draw = np.random.default_rng(seed)
    genres = np.arange(1, items + 1) % GENRES
    popularity = draw.uniform(0.3, 1.7, size=items)
    with open(path, "w", encoding="utf-8") as file:
        file.write(header)
        for user in range(1, users + 1):
            likes = genres == user % GENRES
            seen = draw.random(items) < popularity * np.where(likes, 0.4, 0.05)
            seen[draw.integers(items)] = True
            scores = np.where(likes, 4.5, 2.5) + draw.normal(scale=0.8, size=items)
            for item in np.flatnonzero(seen):
                rating = int(np.clip(np.rint(scores[item]), 1, 5))
                fields = map(str, (user, item + 1, rating, _TIME + user))
                file.write(delimiter.join(fields) + "\n")
    return path


def make_reviews(
    path: str | os.PathLike[str],
    reviews: int = 3000,
    users: int = 200,
    items: int = 100,
    seed: int = 0,
) -> str:
    """Writes a file of reviews in the form of Amazon's, one JSON object on each line.

    An item has one of five topics, and a user likes one or two topics: their ratings are 4 and 5,
    those of other topics 1 to 3. The text praises or blames things that belong to the topic.

    Args:
        path: a name that ends in `.json`, `.jsonl`, `.json.gz` or `.jsonl.gz`.
        reviews: how many reviews.
        users: how many users.
        items: how many items.
        seed: the seed of the draw.

    Returns:
        The path.

    Raises:
        ValueError: if the name has another suffix, or a number is not positive.

    Example:
        >>> import json, os, pathlib, tempfile
        >>> path = make_reviews(os.path.join(tempfile.mkdtemp(), "reviews.json"), reviews=10)
        >>> sorted(json.loads(pathlib.Path(path).read_text().splitlines()[0]))
        ['asin', 'overall', 'reviewText', 'reviewerID']
    """
    path = os.fspath(path)
    reviews = positive_integer("reviews", reviews)
    users, items = positive_integer("users", users), positive_integer("items", items)
    suffix = _find_suffix(path, (".json", ".jsonl", ".json.gz", ".jsonl.gz"))
    opened: Any = gzip.open if suffix.endswith(".gz") else open
    with opened(path, "wt", encoding="utf-8") as file:
        for review in _draw_reviews(reviews, users, items, seed):
            file.write(json.dumps(review) + "\n")
    return path


def _draw_reviews(reviews: int, users: int, items: int, seed: int) -> Iterator[dict[str, Any]]:
    draw = np.random.default_rng(seed)
    topics = draw.integers(len(_TOPICS), size=items)
    liked = draw.integers(len(_TOPICS), size=(users, 2))
    for _ in range(reviews):
        user, item = int(draw.integers(users)), int(draw.integers(items))
        is_liked = topics[item] in liked[user]
        rating = int(draw.choice([4, 5] if is_liked else [1, 2, 3]))
        nouns = draw.choice(_TOPICS[topics[item]], size=int(draw.integers(2, 6)), replace=False)
        adjectives = draw.choice(_PRAISE if is_liked else _BLAME, size=len(nouns))
        text = ", ".join(f"{one} {other}" for one, other in zip(adjectives, nouns))
        yield {
            "reviewerID": f"A{user:05}",
            "asin": f"B{item:05}",
            "reviewText": f"{text.capitalize()}.",
            "overall": float(rating),
        }


def make_clicks(path: str | os.PathLike[str], rows: int = 20_000, seed: int = 0) -> str:
    """Writes a table of clicks: text columns with many values, and a label that depends on them.

    The columns are `site` (20,000 values), `city` (2,000), `device` (50), `hour` (24) and
    `clicked`, 0 or 1. A few values make up most of the rows.

    Args:
        path: a name that ends in `.csv` or `.parquet`.
        rows: how many rows.
        seed: the seed of the draw. Clicks depend on the same values with every seed.

    Returns:
        The path.

    Raises:
        ValueError: if the name has another suffix, or a number is not positive.

    Example:
        >>> import os, pathlib, tempfile
        >>> path = make_clicks(os.path.join(tempfile.mkdtemp(), "clicks.csv"), rows=10)
        >>> pathlib.Path(path).read_text().splitlines()[0]
        '"site","city","device","hour","clicked"'
    """
    path, rows = os.fspath(path), positive_integer("rows", rows)
    suffix = _find_suffix(path, (".csv", ".parquet"))
    draw = np.random.default_rng(seed)
    columns: dict[str, pa.Array] = {}
    score = np.full(rows, -0.5)
    for name, count in {"site": 20_000, "city": 2000, "device": 50, "hour": 24}.items():
        chances = 1 / np.arange(1, count + 1)
        values = draw.choice(count, size=rows, p=chances / chances.sum())
        columns[name] = pa.array(values if name == "hour" else [f"{name} {v}" for v in values])
        score += np.random.default_rng(count).normal(scale=1.0, size=count)[values]
    clicked = draw.random(rows) < 1 / (1 + np.exp(-score))
    table = pa.table({**columns, "clicked": pa.array(clicked.astype("int8"))})
    if suffix == ".csv":
        arrow_csv.write_csv(table, path)
    else:
        pq.write_table(table, path)
    return path


def _find_suffix(path: str, known: Any) -> str:
    """The suffix of a path."""
    found = [suffix for suffix in known if pathlib.PurePath(path).name.endswith(suffix)]
    if not found:
        raise ValueError(
            f"`path` must end in one of {', '.join(known)}. Received: path={path!r}. The suffix "
            "chooses the form of the file."
        )
    return found[0]
