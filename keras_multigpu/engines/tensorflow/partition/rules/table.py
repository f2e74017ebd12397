"""The table that rules enter themselves into, and what many of them ask."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.constants import numbers_of
from keras_multigpu.engines.tensorflow.partition.layouts import WHOLE, Joined, Split, Value
from keras_multigpu.engines.tensorflow.partition.sizes import BATCH, symbols_of

Rule = Callable[..., Any]


RULES: dict[str, Rule] = {}
"""{type of operation: rule}."""


# Rooms of rules that say which axes belong together. Others want slices of rows in their order.
_BY_AXES = (
    *("contractions", "diagonals", "elementwise", "gathers", "matrices", "parts", "random"),
    *("reductions", "rows", "shapes"),
)


def rule(*types: str, needs_ranks: bool = True, is_by_axes: bool = False) -> Callable[[Rule], Rule]:
    """Enters a rule for types; without the ranks of all inputs it says nothing.

    `is_by_axes`: whether it is as those of the rooms `_BY_AXES`.
    """

    def enter(function: Rule) -> Rule:
        takes_joined = is_by_axes or function.__module__.endswith(_BY_AXES)

        @functools.wraps(function)
        def checked(planner: Any, op: Any, values: Any) -> Any:
            if needs_ranks and any(value.dims is None for value in values):
                return None
            for value in () if takes_joined else values:
                planner.cut_anew(value)
            return function(planner, op, values)

        for one in types:
            assert one not in RULES, one
            RULES[one] = checked
        return function

    return enter


def listed(texts: Mapping[Any, str]) -> dict[str, Any]:
    """{type of operation: key} of texts that list types."""
    return {one: key for key, text in texts.items() for one in text.split()}


def split_again(planner: Any, op: tf.Operation, values: list[Value], dims: Any) -> Any:
    """An operation of one device, whose result has `dims`; what follows is spread.

    `None` if its rows are no multiple of the batch's.
    """
    if planner.unit_of(dims[0]) is None:
        return None
    made, _ = planner.fallback(op, values, [dims])
    made[0].layout = Split(0)
    return made, "gathered"


def axes_of(value: Value, rank: int) -> list[int] | None:
    """Constant axes, sorted, as numbers from 0; `None` if they aren't known."""
    numbers = numbers_of(value.const)
    return None if numbers is None else sorted({one % rank if rank else 0 for one in numbers})


def broadcast_labels(dims: Any, shapes: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
    """Labels of what shapes are broadcast to, and of each: of axes that all have, or one entry."""
    aligned = [(1,) * (len(dims) - len(shape)) + tuple(shape) for shape in shapes]
    labels = [
        axis if dim != 1 and all(one[axis] in (1, dim) for one in aligned) else None
        for axis, dim in enumerate(dims)
    ]
    inputs = [
        [one if size == dim else None for one, size, dim in zip(labels, shape, dims)]
        for shape in aligned
    ]
    return labels, [one[len(dims) - len(shape) :] for one, shape in zip(inputs, shapes)]


def no_axis(value: Value) -> tuple[None, ...]:
    """Labels of an input that can't be split."""
    return (None,) * value.rank


def join(planner: Any, *places: tuple[Value, int]) -> None:
    """Notes that axes have one size: for an unknown one that is known, or of rows, or the first.

    Where the devices' slices of the one are not those of the other, they are cut anew.
    """
    sizes: list[Any] = [value.dims[axis] for value, axis in places if value.dims]
    kinds = {one: (_is_unknown(one), planner.multiple_of(one) is None) for one in sizes}
    size: Any = min(sizes, key=lambda one: kinds[one], default=None)
    for value, axis in places:
        if not value.dims or value.dims[axis] == size or not _is_unknown(value.dims[axis]):
            continue
        are_even = _is_even(planner, size) and _is_even(planner, value.dims[axis])
        is_other = not are_even or isinstance(value.layout, Joined)
        if (value.is_free or value.rows_axis == axis) and is_other:
            value.forms, value.make = {WHOLE: planner.get(value, WHOLE)}, None
            value.layout = WHOLE
        value.dims = (*value.dims[:axis], size, *value.dims[axis:][1:])


def _is_unknown(dim: Any) -> bool:
    return bool(symbols_of([dim]) - {BATCH})


def _is_even(planner: Any, dim: Any) -> bool:
    """Whether devices' slices differ by one entry, at most: each row has one."""
    unit = planner.unit_of(dim)
    return unit is not None and unit.times == 1
