"""Tables whose update is most of a step: each device updates all their rows.

Optimizers on JAX get the gradient of a table as a whole array, and update all its rows, however few
a batch looks up. The rows of a batch are spread over the devices, the update of a weight is not.
For a table that is large beside the batch, more devices then save nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from keras_multigpu.arguments import number_of
from keras_multigpu.engines.jax.jaxprs import inner_jaxprs

_SUMS = ("dot_general", "conv_general_dilated", "scatter-add")
_LEAST = 2**16  # values; the update of a smaller table takes microseconds
# They move values, and compute none.
_MOVES = {
    *("broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice", "gather"),
    *("iota", "pad", "reshape", "sharding_constraint", "slice", "split", "squeeze", "transpose"),
}


class WholeTables:
    """Warns once if the update of tables is most of what each device computes in a step."""

    def __init__(self) -> None:
        self._is_over = False

    def look(self, jaxpr: Any, weights: Sequence[keras.Variable], count: int, rows: int) -> None:
        """Looks at the first traced step.

        Args:
            jaxpr: the step, on all rows of the batch.
            weights: the weights that it trains.
            count: the number of devices.
            rows: the number of rows of the batch.

        Warns:
            UserWarning: if the updates are more than half of a device's work.
        """
        if self._is_over:
            return
        self._is_over = True
        looked_up = set(_sums_by_index(jaxpr))
        large = [one for one in weights if math.prod(one.shape) >= _LEAST]
        tables = [one for one in large if tuple(one.shape) in looked_up]
        if not tables:
            return
        update, other = _work(jaxpr, {tuple(one.shape) for one in tables})
        share = update / (update + other / count)
        if share <= 0.5:
            return
        named = ", ".join(f"{one.path!r} of shape {tuple(one.shape)}" for one in tables[:3])
        warnings.warn(
            "Each device updates all rows of the tables in each step, as one device does; only the "
            f"rest of the step is spread. Received: {named}, whose update is about {share:.0%} of "
            f"what each of {count} devices computes for a batch of {number_of(rows, 'row')}. Give "
            "`make_parallel` the option `shard='optimizer'`, with which each device updates its "
            "part, or choose a larger batch.",
            stacklevel=2,
        )


def _sums_by_index(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """The shapes of sums by indices, as in the gradient of a lookup."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scatter-add":
            yield tuple(equation.outvars[0].aval.shape)
        for part in inner_jaxprs(equation):
            yield from _sums_by_index(part)


def _work(jaxpr: Any, tables: set[tuple[int, ...]]) -> tuple[float, float]:
    """About how many values a computation computes: elementwise for tables, and all others."""
    update = other = 0.0
    for equation in jaxpr.eqns:
        parts = [_work(part, tables) for part in inner_jaxprs(equation)]
        if parts:  # a loop's body; of a condition's branches the longest
            longest, times = max(parts, key=sum), equation.params.get("length", 1)
            update, other = update + times * longest[0], other + times * longest[1]
            continue
        work = _work_of_one(equation)
        if tuple(equation.outvars[0].aval.shape) in tables and equation.primitive.name not in _SUMS:
            update += work
        else:
            other += work
    return update, other


def _work_of_one(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    sizes = [math.prod(getattr(part.aval, "shape", ())) for part in equation.invars]
    size = math.prod(getattr(equation.outvars[0].aval, "shape", ()))
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * size * math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        features = equation.invars[1].aval.shape[params["dimension_numbers"].rhs_spec[0]]
        return 2 * size * sizes[1] / features
    if name == "scatter-add":
        return sizes[2]
    return 0 if name in _MOVES else max([size, *sizes])
