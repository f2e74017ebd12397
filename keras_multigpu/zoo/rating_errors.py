"""Errors of the ratings that exist: a loss, and metrics in the unit of the ratings."""

from __future__ import annotations

from typing import Any

import keras

from keras_multigpu.arguments import quantity


@keras.saving.register_keras_serializable(package="keras_multigpu")
class ObservedError(keras.losses.Loss):
    """The squared errors of the observed ratings: a 0 in the targets is an item without a rating.

    A row's loss is the sum over the row's ratings (equation 2 of Sedhain et al., 2015).

    Args:
        name: the loss's name.
        **kwargs: passed to `keras.losses.Loss`.

    Targets and predictions are of shape `(rows, columns)`.

    Example:
        >>> import numpy as np
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


class _OfRatings(keras.metrics.Metric):
    """Gives one of Keras's metrics the observed ratings in their own unit; mixed into it."""

    short_name: str

    def __init__(self, highest: float, lowest: float = 0.0, name: str | None = None, **kwargs: Any):
        super().__init__(name=name or self.short_name, **kwargs)
        self.highest = quantity("highest", highest)
        self.lowest = quantity("lowest", lowest, zero=True)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds the ratings of a batch; a row's weight counts for each of its ratings."""
        ops = keras.ops
        y_true, y_pred = ops.cast(y_true, self.dtype), ops.cast(y_pred, self.dtype)
        weights = ops.cast(y_true > 0, self.dtype)
        if sample_weight is not None:
            rows = ops.cast(sample_weight, self.dtype)
            weights = weights * (ops.expand_dims(rows, -1) if ops.ndim(rows) == 1 else rows)
        found = ops.clip(y_pred * self.highest, self.lowest, self.highest)
        # A rating in each row: Keras takes the mean of a row first.
        ratings = (ops.reshape(one, (-1, 1)) for one in (y_true * self.highest, found))
        super().update_state(*ratings, ops.reshape(weights, (-1,)))

    def get_config(self) -> dict[str, Any]:
        """The metric's arguments."""
        return {**super().get_config(), "highest": self.highest, "lowest": self.lowest}


@keras.saving.register_keras_serializable(package="keras_multigpu")
class RatingRMSE(_OfRatings, keras.metrics.RootMeanSquaredError):
    """The root of the mean squared error of the observed ratings, in the unit of the ratings.

    Items without a rating (0 in the targets) are ignored. All ratings count alike, whatever the
    sizes of the batches. Predictions are clipped to the range of the ratings.

    Args:
        highest: the rating that is 1 in the targets: `ratings.highest`.
        lowest: the lowest possible rating: `ratings.lowest`.
        name: the metric's name; `None` for `"rmse"`.
        **kwargs: passed to `keras.metrics.Metric`.

    Example:
        >>> import numpy as np
        >>> metric = RatingRMSE(highest=5)
        >>> metric.update_state(np.array([[0.0, 0.6, 0.8]]), np.array([[0.9, 0.8, 0.8]]))
        >>> round(float(metric.result()), 4)
        0.7071
    """

    short_name = "rmse"


@keras.saving.register_keras_serializable(package="keras_multigpu")
class RatingMAE(_OfRatings, keras.metrics.MeanAbsoluteError):
    """The mean absolute error of the observed ratings, in the unit of the ratings.

    The arguments are those of `RatingRMSE`, and the name is `"mae"` if none is given.

    Example:
        >>> import numpy as np
        >>> metric = RatingMAE(highest=5)
        >>> metric.update_state(np.array([[0.0, 0.6, 0.8]]), np.array([[0.9, 0.8, 0.8]]))
        >>> round(float(metric.result()), 4)
        0.5
    """

    short_name = "mae"
