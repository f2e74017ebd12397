"""How much the outputs of replicas differ."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

_ROUNDING = 1e-6  # of the largest output: devices may round differently


def spread(*parts: np.ndarray) -> np.ndarray:
    """The spread of one output, an array of each replica: a number for each row.

    The standard deviation, or for values that are not numbers the share that differs.
    """
    if not _are_numbers(parts[0]):
        differs = np.stack(parts) != parts[0]
        return differs.mean(axis=0).reshape(len(parts[0]), -1).mean(axis=1)
    variance = np.var(np.stack(parts).astype("float64"), axis=0)
    return np.sqrt(variance.reshape(len(variance), -1).mean(axis=1))


def warn_of_one_replica() -> None:
    """Warns that a single replica can't disagree."""
    warnings.warn(
        "The disagreement of a single replica is zero by construction: there is no other one. "
        "Received: 1 replica. Give `make_parallel` more devices, or `num_replicas`: several "
        "replicas can be on one device.",
        stacklevel=3,
    )


def warn_if_zero(spreads: Any, outputs: Sequence[Any], training: bool) -> None:
    """Warns if shared replicas do not differ: they can't, unless they draw random numbers."""
    pairs = zip(keras.tree.flatten(spreads), keras.tree.flatten(outputs[0]))
    if all(one.max(initial=0.0) <= _least(output) for one, output in pairs):
        warnings.warn(
            "The disagreement of shared replicas that draw no random numbers is zero by "
            "construction: they have the same weights. Received: "
            f"replicas='shared', training={training}. Use `training=True` with a model that has "
            "random layers, such as `Dropout`, or make a committee with "
            "`replicas='independent'`.",
            stacklevel=3,
        )


def _least(output: np.ndarray) -> float:
    return _ROUNDING * float(np.abs(output).max(initial=0)) if _are_numbers(output) else 0.0


def _are_numbers(array: np.ndarray) -> bool:
    return array.dtype.kind in "biufc"
