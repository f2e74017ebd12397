"""Committees whose members are trained apart, by one loss and one optimizer."""

from __future__ import annotations

import warnings
from typing import Any

import keras


@keras.ops.custom_gradient
def mean_of_apart(*losses: Any) -> Any:
    """The mean of losses of which each is minimised by itself: the gradient is that of the sum."""

    def backward(*args: Any, upstream: Any = None) -> tuple[Any, ...]:
        (upstream,) = args if upstream is None else (upstream,)  # as the backend hands it over
        return (upstream,) * len(losses)

    return sum(losses) / len(losses), backward


def check_loss_scale(optimizer: keras.Optimizer) -> None:
    """Warns of an optimizer that skips steps: it skips them for all members."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        warnings.warn(
            "Where gradients overflow, a `LossScaleOptimizer` skips the step. With "
            "`loss_of='replicas'` the replicas are trained apart but have one optimizer: an "
            "overflow in one of them skips the step of all. Received: "
            f"optimizer={optimizer.name!r}. Use the policy 'mixed_bfloat16', which needs no loss "
            "scale.",
            stacklevel=4,
        )
