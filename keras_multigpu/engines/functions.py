"""Which arguments of a user's own step have the batch's rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras


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
            "Name the arguments that are cut by rows: `parallel.function(step, rows=(0, 1))`, or "
            "`rows=('x', 'y')`.",
        )
        return keras.tree.map_structure(lambda _: True, (args, kwargs))
    names = _Names(step)
    positions = [names.of_position(number) for number in range(len(args))]
    keywords = {name: names.of_keyword(name) for name in kwargs}
    known = set[int | str]().union(names.all, *positions, *keywords.values())
    if len(rows) == 0 or not known.issuperset(rows):
        received = f"a call with {len(args)} positional arguments"
        received += f" and {', '.join(kwargs)}" if kwargs else ""
        raise ValueError(
            "`rows` must name or number arguments of the step that have the batch's rows. The name "
            "of `*args` or `**kwargs` stands for all that come through it. Received: "
            f"rows={rows!r}, for a step of ({names.text}), and {received}. Leave `rows` out if "
            "only these have the batch's length as their first axis."
        )
    chosen = set(rows)

    def mark(names: set[int | str], value: Any) -> Any:
        return keras.tree.map_structure(lambda _: not chosen.isdisjoint(names), value)

    marks = (
        tuple(mark(*pair) for pair in zip(positions, args)),
        {name: mark(keywords[name], value) for name, value in kwargs.items()},
    )
    pairs = zip(keras.tree.flatten((args, kwargs)), keras.tree.flatten(marks))
    _check_rows(
        [one for one, has_rows in pairs if has_rows],
        f"The arguments that rows={rows!r} names must have the same number of rows, the length of "
        "their first axis",
        "Give batches of equal length, or leave out of `rows` what is no batch.",
    )
    return marks


def _check_rows(leaves: Sequence[Any], expected: str, cure: str) -> None:
    """Raises a `ValueError` if first axes differ."""
    shapes = [one.shape for one in leaves if hasattr(one, "shape")]
    known = [shape for shape in shapes if getattr(shape, "rank", 0) is not None]  # TensorFlow's
    sizes = {shape[0] for shape in map(tuple, known) if shape} - {None}
    if len(sizes) > 1:
        received = ", ".join(sorted(map(str, sizes)))
        raise ValueError(f"{expected}. Received: first axes of {received}. {cure}")


class _Names:
    """The numbers and names by which the arguments of a step are known.

    Attributes:
        all: those that any call has.
        text: the step's parameters.
    """

    def __init__(self, step: Callable[..., Any]):
        parameters = inspect.signature(step).parameters.values()
        self._positional = [p.name for p in parameters if p.kind in (0, 1)]
        self._named = {p.name for p in parameters}
        self._star = {p.name for p in parameters if p.kind is p.VAR_POSITIONAL}
        self._more = {p.name for p in parameters if p.kind is p.VAR_KEYWORD}
        self.all: set[int | str] = {*self._named, *range(len(self._positional))}
        self.text = ", ".join(str(p).partition("=")[0].partition(":")[0] for p in parameters)

    def of_position(self, number: int) -> set[int | str]:
        return {number, *(self._positional[number : number + 1] or self._star)}

    def of_keyword(self, name: str) -> set[int | str]:
        if name in self._positional:
            return {name, self._positional.index(name)}
        return {name} if name in self._named - self._more else {name, *self._more}
