"""Arguments that a user's own step can't take on JAX, or can't read, in errors that name them."""

from __future__ import annotations

import functools
import inspect
import numbers
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np


def with_arguments_told(step: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """What runs a step, with errors that name the arguments at fault.

    Raises:
        TypeError: if one is no array or number, or if the step reads the value of a Python number.
    """

    @functools.wraps(step)
    def told(*args: Any, **kwargs: Any) -> Any:
        if not all(map(_is_taken, keras.tree.flatten((args, kwargs)))):
            name, leaf = next(one for one in _named(step, args, kwargs) if not _is_taken(one[1]))
            raise TypeError(
                f"On JAX a step takes arrays and numbers. Received: {name}, {_describe(leaf)}. "
                f"{_cure(name, leaf)}"
            )
        try:
            return run(*args, **kwargs)
        except (TypeError, IndexError) as error:
            # Of JAX, to which a number is an array of which no value is known.
            known = [name for name, leaf in _named(step, args, kwargs) if type(leaf) in (bool, int)]
            if told_of := re.search(r"values? of the arguments? (.+)\.", str(error)):
                known = [name for name in known if name in told_of[1]]
            if not known or not re.search(r"[Tt]race[dr]", str(error)):
                raise
            raise TypeError(
                "On JAX a step can't read the values of its arguments, in an `if`, or for a length "
                f"or the end of a slice. Received: {', '.join(known)}, and an error of JAX's: "
                f"{str(error).splitlines()[0].rstrip('.')}. {_bind(known[0])}"
            ) from error

    return told


def _is_taken(leaf: Any) -> bool:
    """Whether JAX takes a value: an array of numbers, a number, or a structure of these."""
    if isinstance(leaf, (jax.Array, keras.Variable)):
        return True
    if isinstance(leaf, Iterator):
        return False
    if hasattr(leaf, "shape") and hasattr(leaf, "__array__"):
        return np.asarray(leaf).dtype.kind not in "OSUMm"  # objects, texts, times
    return all(
        isinstance(one, numbers.Number) or hasattr(one, "shape") or hasattr(one, "__jax_array__")
        for one in jax.tree.leaves(leaf)
    )


def _named(step: Callable[..., Any], args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """The arguments' leaves with their names: `batch['words']`, say."""
    try:
        arguments = inspect.signature(step).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # of no function of Python's, or not its arguments
        arguments = {**{f"argument {n}": one for n, one in enumerate(args)}, **kwargs}
    return [
        (f"{name}{''.join(f'[{part!r}]' for part in path)}", leaf)
        for name, value in arguments.items()
        for path, leaf in keras.tree.flatten_with_path(value)
    ]


def _describe(leaf: Any) -> str:
    """What a value is that JAX does not take."""
    if isinstance(leaf, (str, bytes)):
        return f"the text {leaf!r}"
    dtype = f" of {np.asarray(leaf).dtype}" if hasattr(leaf, "shape") else ""
    return f"of type {type(leaf).__name__}{dtype}"


def _cure(name: str, leaf: Any) -> str:
    if isinstance(leaf, (str, bytes)) and name.isidentifier():
        return _bind(name)
    if isinstance(leaf, Iterator):
        return "Give what it yields: `next(iterator)`."
    return "Encode it as numbers before, or leave it out of what you give to the step."


def _bind(name: str) -> str:
    name = name if name.isidentifier() else "name"
    return f"Bind it before: `parallel.function(functools.partial(step, {name}=...))`."
