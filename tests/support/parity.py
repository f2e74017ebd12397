"""How far two models are apart."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np


def difference(first: Any, second: Any) -> float:
    """The largest absolute difference between two equal structures of arrays."""
    keras.tree.assert_same_structure(first, second)
    pairs = zip(keras.tree.flatten(first), keras.tree.flatten(second))
    gaps = [_gap(np.asarray(one, "float64"), np.asarray(other, "float64")) for one, other in pairs]
    return max(gaps, default=0.0)


def _gap(first: np.ndarray, second: np.ndarray) -> float:
    assert first.shape == second.shape, (first.shape, second.shape)
    assert np.isfinite(first).all()
    assert np.isfinite(second).all()
    return float(np.abs(first - second).max(initial=0.0))


def plainly(**settings: Any) -> dict[str, Any]:
    """The settings of `compile` for a small model of one device, which takes a few steps.

    On TensorFlow it runs eagerly: to trace the steps, and to compile them, takes longer. XLA draws
    other random numbers, so what draws some with `jit_compile=True` has no use for it.
    """
    if keras.backend.backend() != "tensorflow":
        return settings
    return {**settings, "run_eagerly": True, "jit_compile": False}


def variables(model: keras.Model) -> list[np.ndarray]:
    """All that training changes: weights, and the optimizer's slots."""
    return [np.asarray(v) for v in [*model.weights, *model.optimizer.variables]]


def take(structure: Any, rows: int) -> Any:
    """The first rows of arrays or sparse matrices."""
    return keras.tree.map_structure(lambda array: array[:rows], structure)
