"""Sums over the rows in a traced step: those by indices, and those that are needed in parts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax.extend import core


def find_scattered(jaxpr: Any) -> dict[int, int]:
    """Sums whose result a sharding constraint spreads over all devices.

    Returns:
        The axis of the sum that is spread, by the number of the equation.
    """
    producers = {var: place for place, one in enumerate(jaxpr.eqns) for var in one.outvars}
    found: dict[int, int] = {}
    for constraint in jaxpr.eqns:
        if constraint.primitive.name != "sharding_constraint":
            continue
        axis = _spread_axis(constraint.params["sharding"])
        (source,) = constraint.invars
        while axis is not None and isinstance(source, core.Var) and source in producers:
            place = producers[source]
            equation = jaxpr.eqns[place]
            name = equation.primitive.name
            if name in ("dot_general", "conv_general_dilated") or (
                name == "scatter-add" and _is_zero(equation.invars[0], producers, jaxpr)
            ):
                found[place] = axis
            if name not in ("transpose", "convert_element_type"):
                break
            axis = equation.params["permutation"][axis] if name == "transpose" else axis
            source = equation.invars[0]
    return found


def _spread_axis(sharding: Any) -> int | None:
    """The axis that is spread over all devices; `None` if there is none."""
    for axis, names in enumerate(getattr(sharding, "spec", ())):
        used = names if isinstance(names, tuple) else (names,)
        if set(used) == set(sharding.mesh.axis_names):
            return axis
    return None


def _is_zero(source: Any, producers: dict[Any, int], jaxpr: Any) -> bool:
    """Whether a value is a constant of zeros."""
    if source not in producers:
        return False
    equation = jaxpr.eqns[producers[source]]
    if equation.primitive.name != "broadcast_in_dim":
        return False
    constant = equation.invars[0]
    return isinstance(constant, core.Literal) and not np.any(constant.val)


def sums_rows(equation: Any) -> bool:
    """Whether a sum by indices has an index for each row, or each of its parts."""
    numbers, updates = equation.params["dimension_numbers"], equation.invars[2].aval.shape
    is_batched = numbers.operand_batching_dims or 0 in numbers.update_window_dims
    return bool(updates) and not is_batched


def are_few(equation: Any) -> bool:
    """Whether fewer numbers are added than there are sums."""
    sums, _, added = (math.prod(one.aval.shape) for one in equation.invars)
    return added < sums
