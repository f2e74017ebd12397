"""Gaussian replicas: their mixture, the loss that trains it, and a metric of its means.

A tensor of Gaussians has shape `(..., 2 d)`: d columns of means, then d columns of variances.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

import keras

from keras_multigpu.arguments import check_flag, finite_number, number_of
from keras_multigpu.layers.outputs import Mix, average, fit, mix_leaves

LEAST_VARIANCE = 1e-6
"""Added to a replica's own variance to bound the likelihood (as in deep ensembles)."""


@keras.saving.register_keras_serializable(package="keras_multigpu")
class GaussianMix(Mix):
    """The mean and the variance of a mixture of Gaussians, one per replica.

    For means `m_i` and variances `v_i`, the mixture has the mean `m = mean(m_i)` and, by the law of
    total variance, the variance `mean(v_i) + mean((m_i - m)^2)`: the replicas' own variance plus
    their disagreement (Lakshminarayanan, Pritzel and Blundell, "Simple and scalable predictive
    uncertainty estimation using deep ensembles", 2017; mixtures of experts: Jacobs, Jordan, Nowlan
    and Hinton, 1991). Train it with `GaussianNLL`.

    It averages the outputs as they are. Logits and probabilities give different results: see the
    example at the head of `keras_multigpu.layers.mixing`. In mixed precision, give the replicas'
    last layer `dtype="float32"`: the mixture has the dtype of its inputs, and float16 holds no
    square above 65504.

    Args:
        variance: the variance of replicas that don't output one, positive.
        own_variance: whether replicas output their variance. True: an output of shape `(..., 2 d)`
            has d means, then d raw values; the variances are `softplus(raw) + 1e-6`. False: all
            columns are means. None: True for outputs of two columns, False for others, with a
            warning unless `variance` is given.
        **kwargs: those of `keras.Layer`.

    Input: a list with one structure per replica, of tensors of shape `(..., d)` or `(..., 2 d)`;
        `(rows,)` counts as `(rows, 1)`.
    Output: one structure, of tensors of shape `(..., 2 d)`: the means, then the variances.
        A metric like `"mae"` would compare the targets with both: use `GaussianRMSE`.

    Raises:
        ValueError: if an argument or input is of another kind, or if the number of columns does
            not fit or is unknown.

    Warns:
        UserWarning: if neither argument is given and an output has not two columns, which are then
            means of variance 1.

    Example:
        >>> import numpy as np
        >>> means = [np.array([[1.0]]), np.array([[3.0]])]
        >>> print(np.array(GaussianMix(variance=0.5)(means)))
        [[2.  1.5]]
    """

    def __init__(self, variance: float = 1.0, own_variance: bool | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        expected = "a positive number, the variance of replicas that do not give their own"
        self.variance = finite_number("variance", variance, expected, lambda one: one > 0)
        check_flag("own_variance", own_variance, or_none="True for outputs of two columns")
        self.own_variance = own_variance
        self._is_told = False

    def call(self, outputs: list[Any]) -> Any:
        return mix_leaves(self._mix, outputs)

    def _mix(self, parts: list[Any]) -> Any:
        if len(parts[0].shape) == 1:
            parts = [keras.ops.expand_dims(part, 1) for part in parts]
        means, variances = zip(*(self._gaussian(part) for part in parts))
        mean = average(means)
        # `mean(m^2) - mean(m)^2` would lose its digits to cancellation.
        disagreement = average([keras.ops.square(part - mean) for part in means])
        return keras.ops.concatenate([mean, average(variances) + disagreement], axis=-1)

    def _gaussian(self, part: Any) -> tuple[Any, Any]:
        d = self._count_means(tuple(part.shape))
        if d == part.shape[-1]:
            return part, keras.ops.full_like(part, self.variance)
        return part[..., :d], keras.ops.softplus(part[..., d:]) + LEAST_VARIANCE

    def _count_means(self, shape: tuple[int | None, ...]) -> int:
        columns = shape[-1] if shape else None
        has_own = columns == 2 if self.own_variance is None else self.own_variance
        if columns is None or (has_own and (columns % 2 or not columns)):
            raise ValueError(
                "The outputs' last axis must have a known number of columns, and an even one where "
                f"replicas give their own variance. Received: an output of shape {shape}, with "
                f"own_variance={self.own_variance}. Give each mean a column for its variance, or "
                "set `own_variance=False`."
            )
        if self.own_variance is None and self.variance == 1.0 and columns != 2:
            self._tell(columns)
        return columns // 2 if has_own else columns

    def _tell(self, columns: int) -> None:
        """Warns, once, that nothing learns the noise of the targets."""
        if self._is_told:
            return
        self._is_told = True
        warnings.warn(
            "A `GaussianMix` takes other than two columns as means, and gives each replica the "
            "variance 1, which nothing learns. Received: outputs of "
            f"{number_of(columns, 'column')}. If the second half are raw variances, pass "
            "`mix=GaussianMix(own_variance=True)`; if all are means, `own_variance=False`.",
            stacklevel=2,
        )

    def compute_output_shape(self, outputs_shape: list[Any]) -> Any:
        def mixed(shape: Any) -> Any:
            if shape is None:
                return None
            shape = (*shape, 1) if len(shape) == 1 else tuple(shape)
            return (*shape[:-1], 2 * self._count_means(shape))

        return keras.tree.map_shape_structure(mixed, outputs_shape[0])

    def get_config(self) -> dict[str, Any]:
        own = {"variance": self.variance, "own_variance": self.own_variance}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable(package="keras_multigpu")
class GaussianNLL(keras.losses.Loss):
    """The negative log-likelihood of the targets under Gaussians, a proper scoring rule.

    `mean over d of 0.5 * (log(2 pi variance) + (y - mean)^2 / variance)`, per row (and per
    further axis); sample weights, masks and `reduction` as in all Keras losses. Source:
    Lakshminarayanan, Pritzel and Blundell, 2017, equation 1, there without `log(2 pi)`.

    Args:
        reduction: as for `keras.losses.Loss`.
        name: as for `keras.losses.Loss`.
        dtype: as for `keras.losses.Loss`.

    Called with `y_true` of shape `(..., d)`, or `(...)` if d is 1, and `y_pred` of shape
    `(..., 2 d)`, d means and then d positive variances, as `GaussianMix` returns them.

    Raises:
        ValueError: if the shapes do not fit.

    Example:
        >>> import numpy as np
        >>> loss = GaussianNLL()(np.array([[3.0]]), np.array([[2.0, 0.5]]))
        >>> print(np.round(loss, 4))  # 0.5 * (log(pi) + 2)
        1.5724
    """

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str = "gaussian_nll",
        dtype: Any = None,
    ):
        super().__init__(name=name, reduction=reduction, dtype=dtype)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        y_true, mean, variance = _fit_targets(y_true, y_pred)
        error = keras.ops.square(y_true - mean) / variance
        return 0.5 * keras.ops.mean(keras.ops.log(2 * math.pi * variance) + error, axis=-1)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "dtype": self.dtype}


def reads_gaussians(loss: Any) -> bool:
    """Whether a loss, in any form that `compile` takes, reads means and variances."""
    leaves = keras.tree.flatten(loss)
    return all(leaf is None or isinstance(leaf, GaussianNLL) for leaf in leaves)


def has_gaussians(loss: Any) -> bool:
    """Whether any of the losses reads means and variances."""
    return any(isinstance(leaf, GaussianNLL) for leaf in keras.tree.flatten(loss))


def find_of_all_columns(metrics: Iterable[keras.Metric]) -> list[str]:
    """The names of Keras's metrics that a model is compiled with: they read variances, too.

    `metrics` are a model's; those that it is compiled with are in one that has them.
    """
    wrapper, root = keras.metrics.MeanMetricWrapper, keras.metrics.RootMeanSquaredError
    leaves = [leaf for one in metrics for leaf in getattr(one, "metrics", ())]
    found = [leaf for leaf in leaves if isinstance(leaf, (wrapper, root))]
    own = [leaf for leaf in found if type(leaf).__module__.startswith("keras.")]
    return [leaf.name for leaf in own if type(leaf) is not wrapper]  # the type of users' functions


@keras.saving.register_keras_serializable(package="keras_multigpu")
class GaussianRMSE(keras.metrics.RootMeanSquaredError):
    """The root mean squared error of a Gaussian's means; ignores its variances.

    A metric like `"mae"` would compare the targets with the variances too.

    Args:
        name: as for `keras.metrics.Metric`.
        dtype: as for `keras.metrics.Metric`.

    Updated with `y_true` of shape `(..., d)`, or `(...)` if d is 1, and `y_pred` of shape
    `(..., 2 d)`, d means and then d variances, as `GaussianMix` returns them.

    Raises:
        ValueError: if the shapes do not fit.

    Example:
        >>> metric = GaussianRMSE()
        >>> metric.update_state([[3.0], [5.0]], [[2.0, 0.5], [4.0, 100.0]])
        >>> print(float(metric.result()))
        1.0
    """

    def __init__(self, name: str = "gaussian_rmse", dtype: Any = None):
        super().__init__(name=name, dtype=dtype)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        y_true = keras.ops.convert_to_tensor(y_true, self.dtype)
        y_pred = keras.ops.convert_to_tensor(y_pred, self.dtype)
        y_true, mean, _ = _fit_targets(y_true, y_pred)
        super().update_state(y_true, mean, sample_weight)


def _fit_targets(y_true: Any, y_pred: Any) -> tuple[Any, Any, Any]:
    """Targets, means and variances, all of shape `(..., d)`.

    Refuses shapes that would broadcast: a mean over all pairs of rows would train nothing.
    """
    columns = y_pred.shape[-1] if len(y_pred.shape) else None
    if columns is None or columns % 2 or not columns:
        raise ValueError(
            "`y_pred` must have an even number of columns, the means and then the variances. "
            f"Received: y_pred of shape {tuple(y_pred.shape)}. Let the model end with a "
            "`GaussianMix`, or concatenate both."
        )
    d = columns // 2
    mean, variance = y_pred[..., :d], y_pred[..., d:]
    shape, expected = tuple(y_true.shape), tuple(mean.shape)
    if d == 1 and len(shape) == len(expected) - 1:
        shape = (*shape, 1)
    if not fit(shape, expected):
        raise ValueError(
            f"`y_true` must have the shape of the means, {expected}: one column for each two of "
            f"the prediction. Received: y_true of shape {tuple(y_true.shape)} and y_pred of shape "
            f"{tuple(y_pred.shape)}. Reshape the targets, or change the columns that the model "
            "gives. Where replicas give several means, then as many raw variances, pass "
            "`mix=GaussianMix(own_variance=True)`."
        )
    return keras.ops.reshape(y_true, keras.ops.shape(mean)), mean, variance
