"""What is known of the variables of a loop, or of the results of branches."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_multigpu.engines.tensorflow.partition.forms import Forms, NeedsOthers
from keras_multigpu.engines.tensorflow.partition.layouts import (
    SUM,
    WHOLE,
    Elements,
    Kept,
    Layout,
    Partial,
    Sharded,
    Split,
    Value,
)
from keras_multigpu.engines.tensorflow.partition.sizes import symbols_of


@dataclasses.dataclass(frozen=True)
class State:
    """What is known of a variable of a loop, in every iteration."""

    layout: Layout
    dims: tuple[Any, ...] | None
    const: tuple[Any, ...] | None
    elements: Elements | None


def state_of(planner: Forms, value: Value) -> State:
    """A value's state; sizes that only the planner's program knows are unknown outside."""
    own = planner.own_symbols
    # The largest of all, say, is found within: other branches have no addend that changes nothing.
    is_kept = isinstance(value.layout, (Split, Sharded)) or value.layout == SUM
    layout = value.layout if is_kept and not is_of_own_rows(value, own) else WHOLE
    dims = _sizes_outside(value.dims, own)
    const = None if value.const is None else tuple(value.const.flat)
    if const is not None and symbols_of(const) & own:
        const = None
    elements = None if value.elements is None else _known_outside(value.elements, own)
    return State(layout, dims, const, elements)


def is_of_own_rows(value: Value, own: set[str]) -> bool:
    """Whether a value is split by rows that nobody outside can count."""
    return bool(
        value.dims and value.axis is not None and symbols_of([value.dims[value.axis]]) & own
    )


def _known_outside(elements: Elements, own: set[str]) -> Elements:
    dims = _sizes_outside(elements.dims, own)
    count = None if symbols_of([elements.count]) & own else elements.count
    of = None if elements.of is None else _known_outside(elements.of, own)
    kept = elements.kept
    if kept is not None:
        kept = tuple((branch, _kept_outside(one, own)) for branch, one in kept)
    return dataclasses.replace(elements, dims=dims, count=count, of=of, kept=kept)


def _kept_outside(kept: Kept, own: set[str]) -> Kept:
    dims = _sizes_outside(kept.dims, own)
    const = None if symbols_of(kept.const or ()) & own else kept.const
    of = None if kept.of is None else _known_outside(kept.of, own)
    return Kept(dims, kept.axis, const, of)


def _sizes_outside(dims: tuple[Any, ...] | None, own: set[str]) -> tuple[Any, ...] | None:
    """Dimensions, without those that only a program within knows."""
    if dims is None:
        return None
    return tuple(None if symbols_of([dim]) & own else dim for dim in dims)


def joined(a: State, b: State, planner: Forms, *, gathers: bool = False) -> State:
    """The state that both have; `gathers`: a whole tensor, where their rows are others."""
    dims = _joined_dims(a.dims, b.dims)
    layout = max(a.layout, b.layout, key=_rank)
    elements = joined_elements(a.elements, b.elements)
    if isinstance(layout, Split) and not (elements is not None and elements.are_optionals):
        of = dims if elements is None else elements.tensor_dims
        if of is None or len(of) <= layout.axis or planner.unit_of(of[layout.axis]) is None:
            if elements is not None or not gathers:
                raise NeedsOthers  # the rows of one are not the rows of the other
            layout = WHOLE
    return State(layout, dims, a.const if a.const == b.const else None, elements)


def _rank(layout: Layout) -> int:
    """Of two layouts, that of the higher rank is the one which both are brought to."""
    return 2 if isinstance(layout, (Split, Partial)) else int(isinstance(layout, Sharded))


def joined_elements(a: Elements | None, b: Elements | None) -> Elements | None:
    """What is known of the elements of both lists."""
    if a is None or b is None or a == b:
        return a
    count = a.count if a.count == b.count else None
    if a.dims is None and a.is_constant:
        return dataclasses.replace(b, count=count)
    if b.dims is None and b.is_constant:
        return dataclasses.replace(a, count=count)
    dims = _joined_dims(a.dims, b.dims)
    is_same = a.const is not None and a.const == b.const
    row_of = a.row_of if a.row_of == b.row_of else None
    of = joined_elements(a.of, b.of)
    kept = _joined_kept(a.kept, b.kept)
    return Elements(dims, a.const if is_same else None, is_same, count, row_of, of, kept)


def _joined_dims(a: Any, b: Any) -> tuple[Any, ...] | None:
    """What both dimensions are."""
    if a is None or b is None or len(a) != len(b):
        return None
    return tuple(p if p == q else None for p, q in zip(a, b))


def _joined_kept(a: Any, b: Any) -> Any:
    """What the optionals hold, for each branch."""
    if a is None or b is None:
        return None
    found = dict(a)
    for branch, one in b:
        known = found.setdefault(branch, one)
        if known.axis != one.axis:
            raise NeedsOthers  # slices of one are not slices of the other
        const = known.const if known.const == one.const else None
        of = joined_elements(known.of, one.of)
        found[branch] = Kept(_joined_dims(known.dims, one.dims), one.axis, const, of)
    return tuple(found.items())
