"""AutoRec: an autoencoder of users' ratings, and what it recommends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu.arguments import positive_integer, positive_integers
from keras_multigpu.zoo.ratings import Ratings

_LEARNING_RATE = 0.03


@keras.saving.register_keras_serializable(package="keras_multigpu")
class ObservedError(keras.losses.Loss):
    """The squared errors of the observed ratings: a 0 in the targets is an item without a rating.

    A user's loss is the sum over the user's ratings (equation 2 of Sedhain et al., 2015).

    Args:
        name: the loss's name.
        **kwargs: passed to `keras.losses.Loss`.

    Targets and predictions are of shape `(rows, items)`.

    Example:
        >>> loss = ObservedError()
        >>> round(float(loss(np.array([[0.0, 0.5]]), np.array([[0.9, 0.7]]))), 4)
        0.04
    """

    def __init__(self, name: str = "observed_error", **kwargs: Any):
        super().__init__(name=name, **kwargs)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """The loss of each row, of shape `(rows,)`."""
        y_true = keras.ops.cast(y_true, y_pred.dtype)
        errors = keras.ops.where(y_true > 0, y_pred - y_true, 0.0)
        return keras.ops.sum(keras.ops.square(errors), axis=-1)


def autorec(
    items: int,
    *,
    hidden: Sequence[int] = (10, 5, 10),
    activation: str = "sigmoid",
    loss: Any = "observed",
    optimizer: Any = None,
    metrics: Any = None,
    l2: float = 0.0,
) -> keras.Model:
    """A compiled autoencoder of users' rows of ratings.

    Sedhain, Menon, Sanner and Xie, "AutoRec: autoencoders meet collaborative filtering" (WWW
    2015), has one hidden layer (`hidden=(500,), l2=...`) and the loss of the observed ratings. The
    default layers and optimizer, sigmoid layers of 10, 5 and 10 units and RMSprop at 0.03, are
    from a published experiment on several GPUs; its times are the example of
    `reports.ScalingReport.from_figures`. Its loss was `"mse"`, the mean squared error of all
    items, where a missing rating counts as 0. Such a model learns which items were rated, and
    recommends the wrong ones: use it only to compare times.

    Args:
        items: how many items there are.
        hidden: the units of the layers between a user's ratings and their reconstruction.
        activation: the activation of all layers, the last one included: ratings are in [0, 1].
        loss: `"observed"` (`ObservedError`), or a loss for `compile`.
        optimizer: as for `compile`; `None` for `RMSprop(0.03)`.
        metrics: as for `compile`.
        l2: the penalty on the squares of the kernels.

    Returns:
        A model from `(rows, items)` to `(rows, items)`, both in [0, 1]. Train it on
        `ratings.batches()`.

    Raises:
        ValueError: if an argument is invalid.

    Example:
        >>> import scipy.sparse
        >>> matrix = scipy.sparse.random(30, 12, density=0.3, format="csr", random_state=0)
        >>> ratings = Ratings(matrix, np.arange(30), np.arange(12), highest=5.0)
        >>> model = autorec(items=12)
        >>> history = model.fit(ratings.batches(batch_size=10), epochs=2, verbose=0)
        >>> [layer.units for layer in model.layers]
        [10, 5, 10, 12]
        >>> [len(found) for found in recommend(model, ratings, users=[3, 4], count=2).values()]
        [2, 2]
    """
    items = positive_integer("items", items)
    sizes = positive_integers("hidden", hidden if isinstance(hidden, Sequence) else [hidden])
    penalty = keras.regularizers.L2(l2) if l2 else None
    layers = [
        keras.layers.Dense(size, activation, kernel_regularizer=penalty) for size in [*sizes, items]
    ]
    model = keras.Sequential([keras.Input((items,)), *layers], name="autorec")
    if isinstance(loss, str) and loss == "observed":
        loss = ObservedError()
    model.compile(optimizer or keras.optimizers.RMSprop(_LEARNING_RATE), loss, metrics=metrics)
    return model


def recommend(
    model: keras.Model,
    ratings: Ratings,
    users: Sequence[Any] | None = None,
    *,
    count: int = 10,
    batch_size: int = 250,
    verbose: int = 0,
) -> dict[Any, list[tuple[Any, float]]]:
    """The items without a rating that a model expects a user to rate highest.

    Args:
        model: an autoencoder of rows of `ratings`, on one device or several.
        ratings: the ratings.
        users: the users to recommend to, as in `ratings.users`; `None` for all.
        count: the largest number of items for a user.
        batch_size: how many users to predict together; only their rows are in memory.
        verbose: 1 for a progress bar, 0 for silence.

    Returns:
        For each user the items, the best first, each with the model's output in [0, 1]; fewer than
        `count` if the user has rated almost all items.

    Raises:
        ValueError: if a user is unknown, or a number is not a positive integer.

    Example:
        >>> import scipy.sparse
        >>> matrix = scipy.sparse.csr_matrix(np.array([[1, 0, 0], [0, 1, 0.5]], "float32"))
        >>> ratings = Ratings(matrix, np.array(["ann", "bob"]), np.array([10, 20, 30]), 5.0)
        >>> found = recommend(autorec(items=3), ratings, count=2)
        >>> sorted(item for item, score in found["ann"]), [item for item, score in found["bob"]]
        ([20, 30], [10])
    """
    batch_size = positive_integer("batch_size", batch_size)
    count = positive_integer("count", count)
    wanted = ratings.users.tolist() if users is None else list(users)
    rows = _find_rows(ratings, wanted)
    bar = keras.utils.Progbar(max(len(rows), 1), verbose=verbose, unit_name="user")
    found = {}
    for first in range(0, len(rows), batch_size):
        chosen = ratings.matrix[rows[first : first + batch_size]]
        scores = np.array(model.predict_on_batch(chosen.toarray()), "float64")
        scores[chosen.nonzero()] = -np.inf  # rated
        best = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        for row, places in enumerate(best):
            left = [place for place in places if scores[row, place] > -np.inf]
            names = ratings.items[left].tolist()
            found[wanted[first + row]] = list(zip(names, scores[row, left].tolist()))
        bar.add(len(best))
    return found


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
