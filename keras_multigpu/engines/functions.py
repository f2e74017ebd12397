"""What a user's own step names, and which of its arguments have the batch's rows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras


def named_in(step: Callable[..., Any]) -> dict[str, Any]:
    """What a step names that it does not make: globals, and variables of functions around it."""
    inner = inspect.unwrap(step)
    if not (inspect.isfunction(inner) or inspect.ismethod(inner)):
        return {}
    named = inspect.getclosurevars(inner)
    return {"self": getattr(step, "__self__", None), **named.globals, **named.nonlocals}


def calls(step: Callable[..., Any], name: str) -> bool:
    """Whether a step calls what it knows by a name, as far as its source is known."""
    try:
        text = inspect.getsource(inspect.unwrap(step))
    except (OSError, TypeError):
        return False
    return re.search(rf"\b{re.escape(name)}(\.(stateless_)?call)?\(", text) is not None


def have_rows(
    step: Callable[..., Any], rows: Collection[int | str] | None, args: Any, kwargs: Any
) -> Any:
    """For each leaf of `(args, kwargs)`, in their structure, whether its first axis is the batch.

    `rows` names arguments of `step`, by number or name; the name of `*args` or `**kwargs` stands
    for all that come through them. `None`: all tensors have rows.

    Raises:
        ValueError: if it names no argument, or the first axes of those with rows differ.
    """
    if rows is None:
        _check_rows(
            keras.tree.flatten((args, kwargs)),
            "All tensors that a step takes must have the same number of rows, the length of their "
            "first axis, or `rows` must name those that have",
            lambda: _name_rows(_alike(args, kwargs)),
        )
        return keras.tree.map_structure(lambda _: True, (args, kwargs))
    names, known, text = _names(step, len(args), kwargs)
    if len(rows) == 0 or not known.issuperset(rows):
        received = f"a call with {len(args)} positional arguments"
        received += f" and {', '.join(kwargs)}" if kwargs else ""
        raise ValueError(
            "`rows` must name or number arguments of the step that have the batch's rows. The name "
            "of `*args` or `**kwargs` stands for all that come through it. Received: "
            f"rows={rows!r}, for a step of ({text}), and {received}. Leave `rows` out if "
            "only these have the batch's length as their first axis."
        )
    chosen = set(rows)

    def mark(slot: int | str, value: Any) -> Any:
        return keras.tree.map_structure(lambda _: not chosen.isdisjoint(names[slot]), value)

    marks = (
        tuple(mark(*one) for one in enumerate(args)),
        {name: mark(name, value) for name, value in kwargs.items()},
    )
    pairs = zip(keras.tree.flatten((args, kwargs)), keras.tree.flatten(marks))
    _check_rows(
        [one for one, has_rows in pairs if has_rows],
        f"The arguments that rows={rows!r} names must have the same number of rows, the length of "
        "their first axis",
        lambda: "Give batches of equal length, or leave out of `rows` what is no batch.",
    )
    return marks


def _name_rows(rows: Sequence[int | str]) -> str:
    """How to name the arguments with rows, which may be these."""
    text = "Name the arguments that are cut by rows, by number or name"
    if not rows:
        return f"Give the batch's tensors as separate arguments. {text}, in `rows`."
    return f"{text}: `parallel.function(step, rows={tuple(rows)!r})`, say."


def _alike(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int | str]:
    """The most arguments with one first axis, the longest if as many have others."""
    slots: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
    found: dict[int, list[int | str]] = {}
    for slot, value in slots:
        shapes = [getattr(one, "shape", ()) for one in keras.tree.flatten(value)]
        sizes = {shape[0] for shape in shapes if shape} - {None}
        if len(sizes) == 1:
            found.setdefault(sizes.pop(), []).append(slot)
    return max(found.items(), key=lambda one: (len(one[1]), one[0]), default=(0, []))[1]


def _check_rows(leaves: Sequence[Any], expected: str, cure: Callable[[], str]) -> None:
    """Raises a `ValueError` if first axes differ."""
    shapes = [one.shape for one in leaves if hasattr(one, "shape")]
    known = [shape for shape in shapes if getattr(shape, "rank", 0) is not None]  # TensorFlow's
    sizes = {shape[0] for shape in map(tuple, known) if shape} - {None}
    if len(sizes) > 1:
        received = ", ".join(sorted(map(str, sizes)))
        raise ValueError(f"{expected}. Received: first axes of {received}. {cure()}")


def _names(
    step: Callable[..., Any], count: int, keywords: Collection[str]
) -> tuple[dict[int | str, set[int | str]], set[int | str], str]:
    """The numbers and names of each argument of a call; all that are known; the parameters."""
    signature = inspect.signature(step)
    parameters = signature.parameters.values()
    positional = [p.name for p in parameters if p.kind in (0, 1)]
    bound = signature.bind_partial(*range(count), **dict(zip(keywords, keywords))).arguments
    names: dict[int | str, set[int | str]] = {}
    for name, slots in bound.items():
        own = {name, *([positional.index(name)] if name in positional else [])}
        several = slots if isinstance(slots, (tuple, dict)) else [slots]
        names |= {slot: {slot, *own} for slot in several}
    known = set[int | str]().union(signature.parameters, range(len(positional)), *names.values())
    return names, known, ", ".join(str(p).partition("=")[0].partition(":")[0] for p in parameters)
