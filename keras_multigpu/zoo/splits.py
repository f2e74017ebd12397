"""Which rows to train on, and which to test on."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_multigpu.arguments import finite_number, non_negative_integer, positive_integer


def split_share(count: int, share: Any, seed: Any, what: str) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the rows to train on, and of a random share of rows to test on."""
    finite_number("share", share, "between 0 and 1", lambda one: 0 < one < 1)
    order = np.random.default_rng(non_negative_integer("seed", seed)).permutation(count)
    first = round(share * count)
    if not 0 < first < count:
        raise ValueError(
            f"`share` must leave at least one {what} to train on and one to test on. "
            f"Received: share={share!r} of {count} {what}s, which is {first}."
        )
    return np.sort(order[first:]), np.sort(order[:first])


def split_folds(
    count: int, folds: Any, seed: Any, what: str
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The same for each of several parts of equal size."""
    folds = positive_integer("folds", folds)
    if not 2 <= folds <= count:
        raise ValueError(
            f"`folds` must be from 2 to the number of {what}s, {count}. Received: folds={folds}."
        )
    order = np.random.default_rng(non_negative_integer("seed", seed)).permutation(count)
    parts = np.array_split(order, folds)
    return [
        (np.sort(np.concatenate(parts[:fold] + parts[fold + 1 :])), np.sort(part))
        for fold, part in enumerate(parts)
    ]
