"""The differences of two results, and the differences that rounding alone causes."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np

# The effect of the order of sums in a few well-conditioned steps: relative, and for zeros.
CLOSE = {"float64": 1e-9, "float32": 1e-4}
TINY = {"float64": 1e-13, "float32": 1e-6}


@dataclasses.dataclass(frozen=True)
class Gap:
    """An array in which two results differ."""

    place: str
    size: float
    scale: float

    def __str__(self):
        return f"{self.place}: {self.size:.3g} of {self.scale:.3g}"


def arrays(result: dict[str, Any]) -> dict[str, np.ndarray]:
    """All numbers of a result, by their place in it; float32 and wider."""
    found = {}
    for name, part in result.items():
        for place, leaf in _leaves(part, name):
            array = np.asarray(leaf)
            found[place] = array if array.dtype == "float32" else array.astype("float64")
    return found


def _leaves(part: Any, place: str) -> list[tuple[str, Any]]:
    if isinstance(part, dict):
        return [pair for key in sorted(part) for pair in _leaves(part[key], f"{place}.{key}")]
    if isinstance(part, (list, tuple)):
        return [pair for k, one in enumerate(part) for pair in _leaves(one, f"{place}[{k}]")]
    return [(place, part)]


def gaps(first: dict[str, Any], second: dict[str, Any]) -> list[Gap]:
    """The arrays in which two results differ by more than rounding."""
    one, other = arrays(first), arrays(second)
    if set(one) != set(other):
        return [Gap(f"names {sorted(set(one) ^ set(other))}", np.inf, 1.0)]
    return [gap for place in one if (gap := _gap(place, one[place], other[place])) is not None]


def _gap(place: str, one: np.ndarray, other: np.ndarray) -> Gap | None:
    if one.shape != other.shape:
        return Gap(f"{place} {one.shape} {other.shape}", np.inf, 1.0)
    if (np.isnan(one) != np.isnan(other)).any() or (np.isinf(one) != np.isinf(other)).any():
        return Gap(place, np.inf, 1.0)
    one, other = (np.nan_to_num(array, posinf=0.0, neginf=0.0) for array in (one, other))
    size = float(np.abs(one - other).max(initial=0.0))
    scale = float(np.abs(one).max(initial=0.0))
    close = CLOSE[keras.config.floatx()] * scale + TINY[keras.config.floatx()]
    if one.dtype == "float32":  # of a state, say, in a model of float64: a sum's order shows
        close = max(close, 4 * float(np.finfo("float32").eps) * scale)
    return Gap(place, size, scale) if size > close else None


def is_finite(result: dict[str, Any]) -> bool:
    """Whether it has no NaN and no infinity."""
    return all(np.isfinite(array).all() for array in arrays(result).values())


def noise(first: dict[str, Any], disturbed: list[dict[str, Any]]) -> dict[str, float]:
    """How far each array moves if rounding changes the model or its data."""
    one, others = arrays(first), [arrays(result) for result in disturbed]
    moved = {}
    for place, array in one.items():
        gaps = [np.nan_to_num(np.abs(array - other[place]), nan=np.inf) for other in others]
        moved[place] = max(float(gap.max(initial=0.0)) for gap in gaps)
    return moved


def explained(found: list[Gap], moved: dict[str, float]) -> bool:
    """Whether rounding alone moves all these arrays about as far."""
    return all(gap.size <= 30 * moved.get(gap.place, 0.0) for gap in found)
