"""What a model of ratings recommends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_multigpu.arguments import check_choice, check_model, positive_integer
from keras_multigpu.zoo.ratings import Ratings, check_ratings


def recommend(
    model: keras.Model,
    ratings: Ratings,
    users: Sequence[Any] | None = None,
    *,
    by: str = "item",
    count: int = 10,
    batch_size: int = 250,
    verbose: int = 0,
) -> dict[Any, list[tuple[Any, float]]]:
    """The items without a rating that a model expects a user to rate highest.

    Args:
        model: an autoencoder of rows of `ratings`, on one device or several.
        ratings: the ratings.
        users: the users to recommend to, as in `ratings.users`; `None` for all.
        by: what the model's rows are, `"item"` or `"user"`. It can't be checked if there are as
            many users as items.
        count: the largest number of items for a user.
        batch_size: how many rows to predict together; only these are in memory.
        verbose: 1 for a progress bar, 0 for silence.

    Returns:
        For each user the items, the best first, each with the expected rating; fewer than `count`
        if the user has rated almost all items.

    Raises:
        ValueError: if a user is unknown, a number is not a positive integer, or the model's rows
            are of another length.

    Example:
        >>> import scipy.sparse
        >>> from keras_multigpu.zoo.autorec import autorec
        >>> matrix = scipy.sparse.csr_matrix(np.array([[1, 0, 0], [0, 1, 0.5]], "float32"))
        >>> ratings = Ratings(matrix, np.array(["ann", "bob"]), np.array([10, 20, 30]), 5.0)
        >>> found = recommend(autorec(ratings), ratings, count=2)
        >>> [item for item, rating in found["ann"]], [item for item, rating in found["bob"]]
        ([20, 30], [10])
    """
    check_predicts(model)
    check_ratings("ratings", ratings)
    count = positive_integer("count", count)
    if isinstance(users, str) or not (users is None or isinstance(users, Iterable)):
        raise ValueError(
            f"`users` must be a list of users, or None for all. Received: users={users!r}. "
            f"Give `[{users!r}]`."
        )
    wanted = ratings.users.tolist() if users is None else list(users)
    rows = _find_rows(ratings, wanted)
    best = BestItems(len(rows), count)
    for block in predict_blocks(model, ratings, rows, by, batch_size, verbose):
        best.add(block)
    found = {}
    for user, places, scores in zip(wanted, best.items, best.scores):
        is_new = scores > -np.inf
        expected = np.clip(scores[is_new] * ratings.highest, ratings.lowest, ratings.highest)
        found[user] = list(zip(ratings.items[places[is_new]].tolist(), expected.tolist()))
    return found


class Block(NamedTuple):
    """Predictions for some users and some items; -inf for what is rated."""

    users: np.ndarray
    items: np.ndarray
    scores: np.ndarray


class BestItems:
    """The best items so far of each user; of equal ones, the first."""

    def __init__(self, users: int, count: int):
        self.scores = np.full((users, count), -np.inf)
        self.items = np.zeros((users, count), "int64")

    def add(self, block: Block) -> None:
        """Compares with the predictions of a block."""
        scores = np.concatenate([self.scores[block.users], block.scores], axis=1)
        items = np.broadcast_to(block.items, block.scores.shape)
        items = np.concatenate([self.items[block.users], items], axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")[:, : self.scores.shape[1]]
        self.scores[block.users] = np.take_along_axis(scores, order, axis=1)
        self.items[block.users] = np.take_along_axis(items, order, axis=1)


def predict_blocks(
    model: keras.Model, ratings: Ratings, users: np.ndarray, by: str, size: int, verbose: int = 0
) -> Iterator[Block]:
    """Predictions for some users, a block of rows at a time; `users` of a block count from 0."""
    check_choice("by", by, "item", "user")
    size = positive_integer("batch_size", size)
    rows = ratings.rows(by)
    _check_width(model, rows.shape[1], by)
    wanted = users if by == "user" else np.arange(rows.shape[0])
    bar = keras.utils.Progbar(max(len(wanted), 1), verbose=verbose, unit_name=by)
    size = min(size, len(wanted))
    for first in range(0, len(wanted), max(size, 1)):
        chosen = rows[wanted[first : first + size]]
        batch = np.zeros((size, rows.shape[1]), "float32")  # of one size: traced once
        batch[: chosen.shape[0]] = chosen.toarray()
        scores = np.array(model.predict_on_batch(batch), "float64")[: chosen.shape[0]]
        scores[chosen.nonzero()] = -np.inf
        mine = np.arange(first, first + len(scores))
        if by == "user":
            yield Block(mine, np.arange(scores.shape[1]), scores)
        else:
            yield Block(np.arange(len(users)), mine, scores[:, users].T)
        bar.add(len(scores))


def check_predicts(model: Any) -> None:
    """Refuses what is no model; of one that is not Keras's, `predict_on_batch` is enough."""
    if not hasattr(model, "predict_on_batch"):
        check_model(model)


def _check_width(model: keras.Model, width: int, by: str) -> None:
    """Models without a known input are left to Keras."""
    inputs = getattr(model, "inputs", None)
    if inputs and inputs[0].shape[-1] not in (None, width):
        other = "user" if by == "item" else "item"
        raise ValueError(
            f"With `by={by!r}` the model's rows must have {width} numbers. Received: a model of "
            f"rows of {inputs[0].shape[-1]}. Was it made with `by={other!r}`, or for other ratings?"
        )


def _find_rows(ratings: Ratings, users: Sequence[Any]) -> np.ndarray:
    """The rows of some users."""
    rows = {user: row for row, user in enumerate(ratings.users.tolist())}
    unknown = [user for user in users if user not in rows]
    if unknown:
        raise ValueError(
            f"`users` must be among the {len(rows):,} of `ratings.users`. Received: "
            f"{unknown[0]!r}, which is not."
        )
    return np.array([rows[user] for user in users], dtype="int64")
