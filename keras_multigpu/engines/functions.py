"""Which arguments of a user's own step have the batch's rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import keras


def have_rows(
    step: Callable[..., Any], rows: Collection[int | str] | None, args: Any, kwargs: Any
) -> Any:
    """For each leaf of `(args, kwargs)`, in their structure, whether its first axis is the batch.

    `rows` names arguments of `step`, by number or name. `None`: all tensors have rows.

    Raises:
        ValueError: if `rows` is `None` and first axes differ, or if it names no argument.
    """
    if rows is None:
        leaves = keras.tree.flatten((args, kwargs))
        shapes = [tuple(one.shape) for one in leaves if hasattr(one, "shape")]
        sizes = {shape[0] for shape in shapes if shape}
        if len(sizes) > 1:
            raise ValueError(
                "All tensors that a step takes must have the same number of rows, the length of "
                "their first axis, or `rows` must name those that have. Received: first axes of "
                f"{', '.join(sorted(map(str, sizes)))}. Name the arguments that are cut by rows: "
                "`parallel.function(step, rows=(0, 1))`, or `rows=('x', 'y')`."
            )
        return keras.tree.map_structure(lambda _: True, (args, kwargs))
    names = list(inspect.signature(step).parameters)
    is_known = all(one in names or (isinstance(one, int) and one < len(names)) for one in rows)
    if not is_known:
        raise ValueError(
            f"`rows` must name arguments of the step ({', '.join(names)}), or number them. "
            f"Received: rows={rows!r}"
        )
    chosen = {names[one] if isinstance(one, int) else one for one in rows}
    positions = [names[min(number, len(names) - 1)] for number in range(len(args))]

    def mark(name: str, value: Any) -> Any:
        return keras.tree.map_structure(lambda _: name in chosen, value)

    marks = tuple(mark(name, value) for name, value in zip(positions, args))
    return marks, {name: mark(name, value) for name, value in kwargs.items()}
