"""The checks of arguments, which all say the same: what was expected, what came, what to do."""

from __future__ import annotations

import operator
from typing import Any


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


def check_choice(name: str, value: Any, *choices: str | None) -> None:
    """Refuses a value that is none of the choices."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        words = ["None" if choice is None else f'"{choice}"' for choice in choices]
        expected = " or ".join([", ".join(words[:-1]), words[-1]])
        raise ValueError(f"`{name}` must be {expected}. Received: {name}={value!r}.")
