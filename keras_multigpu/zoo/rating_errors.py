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


class _RatingMetric(keras.metrics.Mean):
    """A mean over the observed ratings; abstract. Without a name it has that of its class."""

    short_name: str

    def __init__(self, highest: float, lowest: float = 0.0, name: str | None = None, **kwargs: Any):
        super().__init__(name=name or self.short_name, **kwargs)
        self.highest = quantity("highest", highest)
        self.lowest = quantity("lowest", lowest, zero=True)

    def _power(self, errors: Any) -> Any:
        raise NotImplementedError

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds the ratings of a batch; a row's weight counts for each of its ratings."""
        ops = keras.ops
        y_true, y_pred = ops.cast(y_true, self.dtype), ops.cast(y_pred, self.dtype)
        weights = ops.cast(y_true > 0, self.dtype)
        if sample_weight is not None:
            rows = ops.cast(sample_weight, self.dtype)
            weights = weights * (ops.expand_dims(rows, -1) if ops.ndim(rows) == 1 else rows)
        found = ops.clip(y_pred * self.highest, self.lowest, self.highest)
        errors = self._power(found - y_true * self.highest)
        # Flat: Keras would take the mean of each row first.
        super().update_state(*(ops.reshape(one, (-1,)) for one in (errors, weights)))

    def get_config(self) -> dict[str, Any]:
        """The metric's arguments."""
        return {**super().get_config(), "highest": self.highest, "lowest": self.lowest}


@keras.saving.register_keras_serializable(package="keras_multigpu")
class RatingRMSE(_RatingMetric):
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

    def _power(self, errors: Any) -> Any:
        return keras.ops.square(errors)

    def result(self) -> Any:
        """The root of the mean; 0 before the first rating."""
        return keras.ops.sqrt(super().result())


@keras.saving.register_keras_serializable(package="keras_multigpu")
class RatingMAE(_RatingMetric):
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

    def _power(self, errors: Any) -> Any:
        return keras.ops.absolute(errors)
