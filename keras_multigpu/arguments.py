"""The checks of arguments: what was expected, what was received, how to fix it.

NumPy's numbers count as the Python numbers that they stand for; booleans are no numbers.
"""

from __future__ import annotations

import difflib
import inspect
import math
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import keras
import numpy as np


def short(value: Any) -> str:
    """What a value looks like, in an error: arrays' shapes, of others not more than a line."""
    if _is_array(value):
        return f"an array of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)) and any(map(_is_array, value)):
        return f"{type(value).__name__} of {', '.join(map(short, value[:4]))}"
    text = repr(value)
    return text if len(text) <= _LINE else f"{text[:_LINE]}..."


def _is_array(value: Any) -> bool:
    is_sized = hasattr(value, "shape") and hasattr(value, "dtype")  # a mesh of devices is not
    return is_sized and not isinstance(value, type) and len(value.shape) > 0


_LINE = 200  # characters


def number_of(number: int, noun: str) -> str:
    """A number of things in words: "1 device", "2 processes"."""
    return (
        f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' * noun.endswith('s') or 's'}"
    )


def as_integer(value: Any) -> int | None:
    """The Python integer that a value stands for; `None` if it is no integer."""
    try:
        return None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        return None


def as_number(value: Any) -> int | None:
    """The integer that a number or a text stands for; `None` if it is none."""
    if isinstance(value, str):
        return int(value) if value.isdecimal() else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return as_integer(value)


def positive_integer(name: str, value: Any, hint: str = "", *, expected: str = "") -> int:
    """A positive integer; `expected` says what else is allowed, `hint` how to fix it."""
    number = as_integer(value)
    if number is None or number < 1:
        kind = "" if type(value) is int else f" (of type {type(value).__name__})"
        meant = None if type(value) is int else as_number(value)
        hint = hint or (f"Write `{name}={meant}`." if meant and meant > 0 else "")
        raise ValueError(
            f"`{name}` must be a positive integer{expected}. Received: {name}={short(value)}{kind}."
            + (f" {hint}" if hint else "")
        )
    return number


def non_negative_integer(name: str, value: Any) -> int:
    """The Python integer that an argument stands for, 0 or more."""
    return 0 if as_integer(value) == 0 else positive_integer(name, value, expected=", or 0")


def integer_or_none(name: str, value: Any, meaning: str) -> int | None:
    """An integer, whose `meaning` the error names, or `None`."""
    number = as_integer(value)
    if number is None and value is not None:
        raise ValueError(
            f"`{name}` must be an integer, {meaning}, or None. Received: {name}={short(value)}."
        )
    return number


def positive_integers(name: str, values: Any) -> list[int]:
    """A list of positive integers, such as the units of layers; it may be empty."""
    try:
        if isinstance(values, (str, bytes)):
            raise TypeError("a text is no list")
        return [positive_integer(name, value) for value in values]
    except (TypeError, ValueError):
        raise ValueError(
            f"`{name}` must be a list of positive integers. Received: {name}={short(values)}."
        ) from None


def device_counts(name: str, values: Any) -> tuple[int, ...]:
    """Different numbers of devices."""
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    counts = [as_integer(one) or 0 for one in values] if is_list else []
    if not counts or min(counts) < 1 or len(set(counts)) < len(counts):
        meant = as_integer(values) or 0
        example = f"(1, {meant})" if meant > 1 else "(1, 2, 4)"
        raise ValueError(
            f"`{name}` must be a sequence of different positive integers, each a number of "
            f"devices. Received: {name}={short(values)}. Give {example}, for example."
        )
    return tuple(counts)


def finite_number(
    name: str, value: Any, expected: str, is_allowed: Callable[[Any], bool], hint: str = ""
) -> Any:
    """A finite number for which `is_allowed` is true; `expected` says which numbers these are."""
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not is_allowed(value):
        raise ValueError(
            f"`{name}` must be {expected}. Received: {name}={short(value)}."
            + (f" {hint}" if hint else "")
        )
    return value.item() if hasattr(value, "item") else value


def quantity(name: str, value: Any, *, zero: bool = False) -> float:
    """A finite number above zero, or zero with `zero`, that has a unit."""
    expected = f"a finite number, {'0 or more' if zero else 'above 0'}"
    hint = "Check its unit."
    return float(finite_number(name, value, expected, lambda x: x > 0 or (zero and x == 0), hint))


def check_flag(name: str, value: Any, or_none: str = "") -> None:
    """Refuses what is neither True nor False; `or_none` says what `None` means, if allowed."""
    if not (isinstance(value, bool) or (or_none and value is None)):
        expected = f"True, False, or None ({or_none})" if or_none else "True or False"
        raise ValueError(f"`{name}` must be {expected}. Received: {name}={short(value)}.")


def check_choice(name: str, value: Any, *choices: str | None) -> None:
    """Refuses what is none of the choices."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        words = ["None" if choice is None else f'"{choice}"' for choice in choices]
        expected = " or ".join([", ".join(words[:-1]), words[-1]])
        meant = getattr(value, "name", getattr(value, "__name__", value))
        meant = _OTHER_NAMES.get(meant, meant) if isinstance(meant, str) else None
        meant = choices[-1] if value is True else meant
        hint = f" Write `{name}={meant!r}`." if meant is not None and meant in choices else ""
        hint = hint or did_you_mean(value, choices)
        raise ValueError(f"`{name}` must be {expected}. Received: {name}={short(value)}.{hint}")


_OTHER_NAMES = {
    **{"bf16": "bfloat16", "fp16": "float16", "half": "float16"},
    **{"zero1": "optimizer", "zero2": "optimizer", "zero3": "weights", "fsdp": "weights"},
    **{"all": "weights", "full": "weights"},
}
"""What other libraries call a choice: {name there: name here}."""


def did_you_mean(value: Any, choices: Iterable[Any]) -> str:
    """A question, if a text is much like one of the choices."""
    texts = [one for one in choices if isinstance(one, str)]
    alike = difflib.get_close_matches(value, texts, 1, 0.75) if isinstance(value, str) else []
    alike += [one for one in texts if isinstance(value, str) and value and one.startswith(value)]
    return f" Did you mean {alike[0]!r}?" if alike else ""


def check_model(model: Any, hint: str = "") -> None:
    """Refuses what is not a Keras model; `hint` says how to fix it, if that is known."""
    if not isinstance(model, keras.Model):
        if inspect.isclass(model):
            hint = " Create the model first: pass `YourModel()`."
        elif isinstance(model, (str, os.PathLike)):
            hint = " Load it first: `keras.saving.load_model(path)`."
        elif model is None:
            hint = " If a function makes the model: does it `return` it?"
        elif as_integer(model) is not None:
            hint = f" The model comes first: `make_parallel(model, {model})`."
        elif isinstance(model, (list, tuple)) and all(isinstance(x, keras.Model) for x in model):
            hint = " Make each model parallel."
        elif isinstance(model, (list, tuple)) and all(isinstance(x, keras.Layer) for x in model):
            hint = " Make a model of the layers: `keras.Sequential(layers)`."
        elif isinstance(model, keras.Layer):
            hint = " Make a model of the layer: `keras.Sequential([layer])`."
        raise ValueError(
            "`model` must be a Keras 3 model, an instance of `keras.Model`. "
            f"Received: model={short(model)} (of type {type(model).__module__}."
            f"{type(model).__name__}).{hint}"
        )
