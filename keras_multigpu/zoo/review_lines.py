"""A line of a file of reviews."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

_HIGHEST = float(np.finfo("float32").max)
# Of the collections of 2014 and 2018, and of 2023.
_FIELDS = {
    "user": ("reviewerID", "user_id"),
    "item": ("asin", "parent_asin"),
    "text": ("reviewText", "text"),
    "rating": ("overall", "rating"),
}


def parse_review(data: bytes) -> tuple[str, str, str, float]:
    """The user, the item, the text and the rating of a line.

    Args:
        data: the line, a JSON object.

    Raises:
        ValueError: if it is none, or one of them is missing but the text.

    Example:
        >>> parse_review(b'{"user_id": "A1", "asin": "B7", "text": "Good.", "rating": 5}')
        ('A1', 'B7', 'Good.', 5.0)
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"a line must be a JSON object. Received: {data[:60]!r}.")
    user, item, text, rating = (
        next((found[name] for name in names if name in found), None) for names in _FIELDS.values()
    )
    for field, value in {"user": user, "item": item}.items():
        if not isinstance(value, str) or not value:
            raise ValueError(
                f"a review must have its {field} as a text named {_either(field)}. Received: "
                f"{value!r}."
            )
    if not _is_number(rating):
        raise ValueError(
            f"a review must have its rating as a finite number named {_either('rating')}. "
            f"Received: {rating!r}."
        )
    return str(user), str(item), text if isinstance(text, str) else "", float(rating or 0)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) < _HIGHEST  # not-a-number is not


def _either(field: str) -> str:
    return " or ".join(map(repr, _FIELDS[field]))
