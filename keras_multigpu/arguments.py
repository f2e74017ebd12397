"""The checks of arguments, which all say the same: what was expected, what came, what to do."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex


def positive_integer(name: str, value: Any, hint: str = "", *, expected: str = "") -> int:
    """The Python integer that an argument stands for, which may be one of NumPy's.

    Args:
        name: the argument's name.
        value: what it was given.
        hint: how to put it right.
        expected: what it may be instead, to follow "must be a positive integer".

    Raises:
        ValueError: if it is not a positive integer; a bool is none.
    """
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        kind = "" if type(value) is int else f" (of type {type(value).__name__})"
        raise ValueError(
            f"`{name}` must be a positive integer{expected}. Received: {name}={value!r}{kind}."
            + (f" {hint}" if hint else "")
        )
    return number


def check_flag(name: str, value: Any) -> None:
    """Refuses a value that is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be True or False. Received: {name}={value!r}.")


def check_choice(name: str, value: Any, *choices: str) -> None:
    """Refuses a value that is none of the choices."""
    if not isinstance(value, str) or value not in choices:
        expected = " or ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"`{name}` must be {expected}. Received: {name}={value!r}.")


def non_negative_integer(name: str, value: Any) -> int:
    """The Python integer that an argument stands for, 0 or more."""
    is_zero = not isinstance(value, bool) and isinstance(value, SupportsIndex) and value == 0
    return 0 if is_zero else positive_integer(name, value, expected=", or 0")


def positive_integers(name: str, values: Any) -> list[int]:
    """A list of positive integers, such as the units of layers; it may be empty."""
    try:
        if isinstance(values, (str, bytes)):
            raise TypeError("a text is no list")
        return [positive_integer(name, value) for value in values]
    except (TypeError, ValueError):
        raise ValueError(
            f"`{name}` must be a list of positive integers. Received: {name}={values!r}."
        ) from None
