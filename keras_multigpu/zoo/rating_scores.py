"""How good a model's predictions of ratings are, and its recommendations."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import keras
import numpy as np
import scipy.sparse

from keras_multigpu.arguments import finite_number, positive_integer
from keras_multigpu.zoo.ratings import Ratings, check_ratings
from keras_multigpu.zoo.recommending import BestItems, check_predicts, predict_blocks


@dataclasses.dataclass(frozen=True)
class RatingScore:
    """How well a model predicts ratings that it has not seen; made by `evaluate_ratings`.

    Args:
        rmse: the root of the mean squared error, in the unit of the ratings.
        mae: the mean absolute error.
        ratings: how many ratings were predicted.
        unknown: how many of these have a user or an item without known ratings. They are predicted
            by a mean, and count in both errors.
        recall: the mean share of a user's relevant held-out items that are among the `k` items
            recommended.
        ndcg: the normalized discounted cumulative gain of these `k` items: 1 if all relevant items
            come first.
        k: how many items are recommended.
        users: how many users have known ratings and relevant held-out items; recall and NDCG are
            means over these. Without any, both are nan.

    Example:
        >>> score = RatingScore(0.9, 0.7, 100, 2, recall=0.1, ndcg=0.15, k=10, users=40)
        >>> str(score).split("; ")[0]
        'RMSE 0.9000, MAE 0.7000 of 100 ratings, 2 by a mean'
    """

    rmse: float
    mae: float
    ratings: int
    unknown: int
    recall: float
    ndcg: float
    k: int
    users: int

    def __str__(self) -> str:
        return (
            f"RMSE {self.rmse:.4f}, MAE {self.mae:.4f} of {self.ratings:,} ratings, "
            f"{self.unknown:,} by a mean; recall@{self.k} {self.recall:.3f}, "
            f"NDCG@{self.k} {self.ndcg:.3f} of {self.users:,} users"
        )


def evaluate_ratings(
    model: keras.Model,
    known: Ratings,
    held_out: Ratings,
    *,
    by: str = "item",
    k: int = 10,
    relevant: float | None = None,
    batch_size: int = 250,
) -> RatingScore:
    """How well a model predicts held-out ratings from known ones, and ranks items.

    Users and items are matched by name, so the two may come from different files. If the user or
    the item has no known rating, the prediction is the mean of the other's known ratings, or of
    all. Predictions are clipped to the range of the known ratings.

    Args:
        model: an autoencoder of rows of `known`, on one device or several.
        known: the ratings that predictions are made from: those the model was trained on.
        held_out: the ratings to predict.
        by: what the model's rows are, `"item"` or `"user"`.
        k: how many items to recommend to each user, among those without a known rating.
        relevant: an item is relevant for a user who rated it this high; `None` for 0.8 of the
            highest rating: 4 of 5 stars.
        batch_size: how many rows to predict together.

    Returns:
        The errors, recall and NDCG.

    Raises:
        ValueError: if an argument is invalid, or a held-out rating is among the known ones.

    Example:
        >>> import scipy.sparse
        >>> from keras_multigpu.zoo.autorec import autorec
        >>> matrix = scipy.sparse.random(30, 12, density=0.3, format="csr", random_state=0)
        >>> train, test = Ratings(matrix, np.arange(30), np.arange(12), 5.0).split(0.2)
        >>> score = evaluate_ratings(autorec(train, hidden=(8,)), train, test, k=3)
        >>> score.ratings, score.unknown
        (22, 3)
    """
    check_predicts(model)
    check_ratings("known", known)
    check_ratings("held_out", held_out)
    k = positive_integer("k", k)
    limit = 0.8 * known.highest if relevant is None else relevant
    limit = finite_number("relevant", limit, "a number above 0", lambda one: one > 0)
    test = _align(known, held_out)
    users = np.arange(len(known.users))
    best, found = BestItems(len(users), k), np.full(len(test.ratings), np.nan)
    wanted = _number_known(test, known.matrix.shape)
    for block in predict_blocks(model, known, users, by, batch_size):
        best.add(block)
        part = wanted[block.users][:, block.items].tocoo()
        found[part.data - 1] = block.scores[part.row, part.col] * known.highest
    is_unknown = _fill_unknown(found, known, test)
    errors = np.clip(found, known.lowest, known.highest) - test.ratings
    recall, ndcg, count = _rank(best, known, test, limit)
    return RatingScore(
        float(np.sqrt(np.mean(errors**2))),
        float(np.mean(np.abs(errors))),
        len(errors),
        int(is_unknown.sum()),
        recall,
        ndcg,
        k,
        count,
    )


class _Test(NamedTuple):
    """Held-out ratings, with the places of users and items among the known; -1 if unknown."""

    users: np.ndarray
    items: np.ndarray
    ratings: np.ndarray


def _align(known: Ratings, held_out: Ratings) -> _Test:
    found = held_out.matrix.tocoo()
    if not found.nnz:
        raise ValueError("`held_out` must have at least one rating. Received: none.")
    users = _find_places(known.users, held_out.users)[found.row]
    items = _find_places(known.items, held_out.items)[found.col]
    both = (users >= 0) & (items >= 0)
    seen = np.asarray(known.matrix[users[both], items[both]]).ravel() > 0
    if seen.any():
        raise ValueError(
            "`held_out` must not have ratings that `known` has: the model has seen them. Received: "
            f"{seen.sum():,} such ratings of {found.nnz:,}. `ratings.split()` makes two parts."
        )
    return _Test(users, items, found.data.astype("float64") * held_out.highest)


def _find_places(known: np.ndarray, names: np.ndarray) -> np.ndarray:
    """Where names are among the known ones; -1 if they aren't. An integer is what it is written."""
    places = {str(name): place for place, name in enumerate(known.tolist())}
    return np.array([places.get(str(name), -1) for name in names.tolist()], dtype="int64")


def _number_known(test: _Test, shape: tuple[int, int]) -> Any:
    """1 plus the number of each held-out rating, where user and item are known."""
    both = np.flatnonzero((test.users >= 0) & (test.items >= 0))
    places = test.users[both], test.items[both]
    return scipy.sparse.csr_matrix((both + 1, places), shape=shape)


def _fill_unknown(found: np.ndarray, known: Ratings, test: _Test) -> np.ndarray:
    """Puts means where a user or an item has no known rating; returns where that is."""
    is_unknown = np.zeros(len(found), bool)
    means = np.full(len(found), known.matrix.data.mean(dtype="float64"))
    for axis, places in ((1, test.users), (0, test.items)):
        counts = known.matrix.getnnz(axis=axis)
        sums = np.asarray(known.matrix.sum(axis=axis, dtype="float64")).ravel()
        is_known = (places >= 0) & (counts[places] > 0)
        means[is_known] = sums[places[is_known]] / counts[places[is_known]]
        is_unknown |= ~is_known
    found[is_unknown] = means[is_unknown] * known.highest
    return is_unknown


def _rank(best: BestItems, known: Ratings, test: _Test, limit: float) -> tuple[float, float, int]:
    """Recall and NDCG of the best items of each user, and for how many users."""
    top = best.items
    # Ratings are kept in float32, as parts of the highest.
    is_scored = (test.ratings >= limit * (1 - 1e-6)) & (test.users >= 0)
    counts = np.bincount(test.users[is_scored], minlength=len(top))
    counts[known.matrix.getnnz(axis=1) == 0] = 0
    users = np.flatnonzero(counts)
    if not len(users):
        return float("nan"), float("nan"), 0
    is_scored &= test.items >= 0
    places = test.users[is_scored], test.items[is_scored]
    good = scipy.sparse.csr_matrix(
        (np.ones(len(places[0]), bool), places), shape=known.matrix.shape
    )
    hits = np.asarray(good[np.repeat(users, top.shape[1]), top[users].ravel()])
    # A user with few items left has places that no item takes.
    hits = hits.reshape(len(users), -1) & (best.scores[users] > -np.inf)
    gains = 1 / np.log2(np.arange(2, 2 + top.shape[1]))
    ideal = np.cumsum(gains)[np.minimum(counts[users], len(gains)) - 1]
    return (
        float((hits.sum(1) / counts[users]).mean()),
        float((hits @ gains / ideal).mean()),
        len(users),
    )
