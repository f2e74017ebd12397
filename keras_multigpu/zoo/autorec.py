"""AutoRec: an autoencoder of ratings, with biases; and the setting of an early experiment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu.arguments import check_choice, positive_integer, positive_integers, quantity
from keras_multigpu.zoo.rating_errors import ObservedError, RatingMAE, RatingRMSE
from keras_multigpu.zoo.ratings import Ratings, check_ratings

_SHRINK = 5.0  # a row's or a column's bias counts as if it had this many more ratings of the mean
_GAIN = 3.0
_HISTORIC_LAYERS = (10, 5, 10)
_HISTORIC_RATE = 0.03


@keras.saving.register_keras_serializable(package="keras_multigpu")
class RatingBiases(keras.layers.Layer):
    """What a rating is without the autoencoder, and the rest, which the autoencoder gets.

    The baseline of a rating is its column's bias, which is a weight, plus its row's bias, which is
    computed from the row: the mean of what the columns' biases leave, shrunk towards 0. So a row
    that was not trained on has its bias too. The rest is divided by its spread and by the root of
    the number of ratings, so that rows with many ratings and with few are of one size.

    Args:
        spread: the standard deviation of the rest, in the unit of the inputs.
        shrink: how many ratings equal to the baseline each row has in addition.
        **kwargs: passed to `keras.layers.Layer`.

    Input: rows of ratings, 0 where there is none. Outputs: the baselines and the scaled rest, both
    of the input's shape; the rest is 0 where there is no rating.

    Example:
        >>> layer = RatingBiases(shrink=0)
        >>> baseline, rest = layer(np.array([[0.4, 0.8, 0.0]]))
        >>> [round(float(one), 3) for one in baseline[0]]
        [0.6, 0.6, 0.6]
        >>> np.sign(np.array(rest)).tolist()
        [[-1.0, 1.0, 0.0]]
    """

    def __init__(self, spread: float = 0.2, shrink: float = _SHRINK, **kwargs: Any):
        super().__init__(**kwargs)
        self.spread = quantity("spread", spread)
        self.shrink = quantity("shrink", shrink, zero=True)

    def build(self, input_shape: Any) -> None:
        """Makes the columns' biases."""
        self.columns = self.add_weight(
            name="columns", shape=(input_shape[-1],), initializer="zeros"
        )

    def call(self, inputs: Any) -> tuple[Any, Any]:
        """The baselines and the scaled rest."""
        ops = keras.ops
        is_rated = inputs > 0
        counts = ops.sum(ops.cast(is_rated, inputs.dtype), axis=-1, keepdims=True) + self.shrink
        counts = ops.maximum(counts, 1.0)
        left = ops.where(is_rated, inputs - self.columns, 0.0)
        baseline = self.columns + ops.sum(left, axis=-1, keepdims=True) / counts
        rest = ops.where(is_rated, inputs - baseline, 0.0)
        return baseline, rest * (_GAIN / self.spread) / ops.sqrt(counts)

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, Any]:
        """The shapes of the outputs."""
        return input_shape, input_shape

    def get_config(self) -> dict[str, Any]:
        """The layer's arguments."""
        return {**super().get_config(), "spread": self.spread, "shrink": self.shrink}


def autorec(
    ratings: Ratings,
    *,
    by: str = "item",
    hidden: Sequence[int] = (500,),
    activation: str = "tanh",
    l2: float = 1.8,
    loss: Any = None,
    optimizer: Any = None,
    metrics: Any = None,
) -> keras.Model:
    """A compiled autoencoder of rows of ratings, with biases of users and items.

    Sedhain, Menon, Sanner and Xie, "AutoRec: autoencoders meet collaborative filtering" (WWW
    2015): a row is an item's ratings by all users (I-AutoRec) or a user's of all items (U-AutoRec);
    one hidden layer, the loss of the observed ratings, a penalty on the kernels. Here the layers
    get and give only what biases leave (`RatingBiases`), and `ratings.batches()` hides half of the
    inputs in training. `docs/zoo.md` has the errors on MovieLens 100K.

    Args:
        ratings: the ratings to train on. They give the model its width and the first values of its
            biases.
        by: what a row is, `"item"` or `"user"`; the same as in `ratings.batches` and `recommend`.
        hidden: the units of the layers between a row and its reconstruction.
        activation: the activation of these layers; the last layer is linear.
        l2: the penalty on the squares of the kernels, beside the sum of the squared errors of all
            rows.
        loss: as for `compile`; `None` for `ObservedError`.
        optimizer: as for `compile`; `None` for `Adam(0.001)`.
        metrics: as for `compile`; `None` for `RatingRMSE` and `RatingMAE`, in the unit of the
            ratings. In `fit` they also count what was hidden; `validation_data` shows the error of
            predictions.

    Returns:
        A model from rows to rows, both divided by `ratings.highest`. Train it for about 20 epochs
        of `ratings.batches(by=by)`.

    Raises:
        ValueError: if an argument is invalid.

    Example:
        >>> import scipy.sparse
        >>> matrix = scipy.sparse.random(30, 12, density=0.3, format="csr", random_state=0)
        >>> ratings = Ratings(matrix, np.arange(30), np.arange(12), highest=5.0)
        >>> train, test = ratings.split(0.2)
        >>> model = autorec(train, hidden=(8,))
        >>> unseen = train.batches(targets=test)
        >>> history = model.fit(train.batches(), validation_data=unseen, epochs=2, verbose=0)
        >>> sorted(history.history)
        ['loss', 'mae', 'rmse', 'val_loss', 'val_mae', 'val_rmse']
        >>> model.input_shape
        (None, 30)
    """
    hint = "For the model of sigmoid layers for a number of items, use `historic_autorec`."
    check_ratings("ratings", ratings, hint)
    check_choice("by", by, "item", "user")
    sizes = positive_integers("hidden", hidden if isinstance(hidden, Sequence) else [hidden])
    l2 = quantity("l2", l2, zero=True)
    rows = ratings.rows(by)
    columns, spread = _find_biases(rows)
    # Keras adds the penalty to the loss of every batch, which is a mean over rows.
    penalty = keras.regularizers.L2(l2 / rows.shape[0]) if l2 else None
    inputs = keras.Input((len(columns),))
    biases = RatingBiases(spread, name="biases")
    baseline, x = biases(inputs)
    for size in sizes:
        x = keras.layers.Dense(size, activation, kernel_regularizer=penalty)(x)
    x = keras.layers.Dense(len(columns), kernel_regularizer=penalty)(x)
    x = keras.layers.Rescaling(spread)(x)
    model = keras.Model(inputs, keras.layers.Add()([baseline, x]), name=f"autorec_by_{by}")
    biases.columns.assign(columns)
    if metrics is None:
        limits = ratings.highest, ratings.lowest
        metrics = [RatingRMSE(*limits), RatingMAE(*limits)]
    model.compile(
        optimizer or keras.optimizers.Adam(1e-3), loss or ObservedError(), metrics=metrics
    )
    return model


def _find_biases(matrix: Any, rounds: int = 10) -> tuple[np.ndarray, float]:
    """The mean plus each column's bias, fitted in turn with the rows'; the spread of the rest."""
    found = matrix.tocoo()
    if not found.nnz:
        raise ValueError("`ratings` must have at least one rating. Received: none.")
    mean = found.data.mean(dtype="float64")
    rows, columns = (np.zeros(size) for size in matrix.shape)
    for _ in range(rounds):
        for mine, other, at, facing in (
            (rows, columns, found.row, found.col),
            (columns, rows, found.col, found.row),
        ):
            sums = np.bincount(at, found.data - mean - other[facing], len(mine))
            mine[:] = sums / (np.bincount(at, minlength=len(mine)) + _SHRINK)
    rest = found.data - mean - rows[found.row] - columns[found.col]
    return mean + columns, max(float(rest.std()), 1e-3)


def historic_autorec(
    items: int,
    *,
    hidden: Sequence[int] = _HISTORIC_LAYERS,
    activation: str = "sigmoid",
    loss: Any = "mse",
    optimizer: Any = None,
    metrics: Any = None,
) -> keras.Model:
    """The autoencoder of a published experiment on several GPUs, to compare times with.

    Sigmoid layers of 10, 5 and 10 units, RMSprop at 0.03, and the mean squared error of all items.
    Since a missing rating counts as 0, it learns which items are rated. It can't predict ratings:
    on MovieLens 100K its root mean squared error is 2.7 stars, and what it recommends is what most
    users have rated. The experiment's times are the example of
    `reports.ScalingReport.from_figures`.

    Args:
        items: how many items there are.
        hidden: the units of the layers between a user's ratings and their reconstruction.
        activation: the activation of all layers, the last one included: ratings are in [0, 1].
        loss: as for `compile`.
        optimizer: as for `compile`; `None` for `RMSprop(0.03)`.
        metrics: as for `compile`.

    Returns:
        A model from `(rows, items)` to `(rows, items)`, both in [0, 1]. Train it on
        `ratings.batches(250, by="user", hide=0)`.

    Raises:
        ValueError: if an argument is invalid.

    Example:
        >>> [layer.units for layer in historic_autorec(items=12).layers]
        [10, 5, 10, 12]
    """
    items = positive_integer("items", items)
    sizes = positive_integers("hidden", hidden if isinstance(hidden, Sequence) else [hidden])
    layers = [keras.layers.Dense(size, activation) for size in [*sizes, items]]
    model = keras.Sequential([keras.Input((items,)), *layers], name="historic_autorec")
    model.compile(optimizer or keras.optimizers.RMSprop(_HISTORIC_RATE), loss, metrics=metrics)
    return model
