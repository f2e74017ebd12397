"""Argument checks that only reports need."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import keras


def check_counts(name: str, values: Any) -> tuple[int, ...]:
    """Different numbers of devices, as Python integers; a `ValueError` for anything else."""
    counts = tuple(values) if isinstance(values, Sequence) and not isinstance(values, str) else ()
    is_integer = [isinstance(one, numbers.Integral) and type(one) is not bool for one in counts]
    if not counts or not all(is_integer) or min(counts) < 1 or len(set(counts)) < len(counts):
        raise ValueError(
            f"`{name}` must be a sequence of different positive integers, each a number of "
            f"devices. Received: {name}={values!r}. Give (1, 2, 4), for example."
        )
    return tuple(map(int, counts))


def check_number(name: str, value: Any, *, zero: bool = False) -> float:
    """A finite number above zero (or zero, with `zero`); a `ValueError` for anything else."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not (0 < value < float("inf") or (zero and value == 0)):
        raise ValueError(
            f"`{name}` must be a finite number, {'0 or more' if zero else 'above 0'}. "
            f"Received: {name}={value!r}. Check its unit."
        )
    return float(value)


def check_built(model: Any) -> None:
    """Raises a `ValueError` for anything but a Keras model that has its weights."""
    if not isinstance(model, keras.Model):
        raise ValueError(
            "`model` must be a Keras 3 model, an instance of `keras.Model`. Received: "
            f"model={model!r} (of type {type(model).__name__}). Create the model first."
        )
    if not model.built:
        raise ValueError(
            f"`model` must be built, so that it has weights. Received: model={model.name!r}, "
            "which is not built. Call it on a batch, or give it an input shape."
        )
