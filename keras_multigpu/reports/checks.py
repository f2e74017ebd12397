"""What reports refuse, in one form of words."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import keras


def check_counts(name: str, values: Any) -> tuple[int, ...]:
    """Several numbers of devices, each given once.

    Raises:
        ValueError: if they are anything else.
    """
    counts = tuple(values) if isinstance(values, Sequence) and not isinstance(values, str) else ()
    if not counts or len(set(counts)) < len(counts) or not all(map(_is_positive_integer, counts)):
        raise ValueError(
            f"`{name}` must be a sequence of different positive integers, each a number of "
            f"devices. Received: {name}={values!r}. Give (1, 2, 4), say."
        )
    return counts


def check_count(name: str, value: Any, least: int = 1) -> int:
    """A whole number.

    Raises:
        ValueError: if it is none, or below `least`.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(
            f"`{name}` must be an integer, {least} or more. Received: {name}={value!r}. "
            f"Give {least}, say."
        )
    return int(value)


def check_quantity(name: str, value: Any, *, zero: bool = False) -> float:
    """A finite number above zero.

    Args:
        name: the argument's.
        value: what was given for it.
        zero: whether zero will do.

    Raises:
        ValueError: if it is none.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not (0 < value < float("inf") or (zero and value == 0)):
        raise ValueError(
            f"`{name}` must be a finite number, {'0 or more' if zero else 'above 0'}. "
            f"Received: {name}={value!r}. Check its unit."
        )
    return float(value)


def check_built(model: Any) -> None:
    """Refuses what has no weights.

    Raises:
        ValueError: if it is no Keras model, or one that is not built.
    """
    if not isinstance(model, keras.Model):
        raise ValueError(
            "`model` must be a Keras 3 model, an instance of `keras.Model`. Received: "
            f"model={model!r} (of type {type(model).__name__}). Create the model first."
        )
    if not model.built:
        raise ValueError(
            f"`model` must be built, so that it has weights. Received: model={model.name!r}, "
            "which is not. Call it on a batch, or give it an input shape."
        )


def _is_positive_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) > 0
