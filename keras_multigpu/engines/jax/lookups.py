"""Lookups in tables of which each device has a part: rows cross, and not the table.

With `shard="weights"` a step gathers the weights that it computes with. Of a table that it only
looks rows up in, like an `Embedding`'s, each device takes what it has for the whole batch instead.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax import numpy as jnp
from jax.extend import core
from jax.lax import GatherScatterMode
from jax.sharding import PartitionSpec

from keras_multigpu.engines.jax.counting.transfers import GATHERED
from keras_multigpu.engines.jax.jaxprs import changed_inner, inner_jaxprs, mapped_equation
from keras_multigpu.engines.jax.placement import Placement
from keras_multigpu.engines.jax.state.state_shards import sharding_on

_CALLS = ("jit", "pjit", "closed_call", "checkpoint")


class Lookups:
    """Changes a traced step, so that it gathers no table of which it takes fewer numbers.

    Args:
        place: the devices.
        rows: the batch's number of rows, a multiple of that of the devices; 0 if each gets all.
    """

    def __init__(self, place: Placement, rows: int):
        self._place, self._rows = place, rows

    def change(self, jaxpr: Any) -> Any:
        """The same computation."""
        return self._changed(jaxpr, {})

    def _changed(self, jaxpr: Any, tables: dict[Any, int]) -> Any:
        """`tables` has the axis along which each is in parts."""
        made = []
        for equation in jaxpr.eqns:
            name, given = equation.primitive.name, equation.invars
            axis = tables.get(given[0]) if given and isinstance(given[0], core.Var) else None
            if (constraint := _gathering(equation)) is not None:
                axis = self._axis(jaxpr, equation)
                if axis is not None:
                    tables[equation.outvars[0]] = axis
                    equation = self._kept(equation, constraint)
            elif axis is not None and name == "gather":
                equation = self._looked_up(equation, axis)
            elif axis is not None and name == "convert_element_type":
                tables[equation.outvars[0]] = axis
            else:
                equation = self._inner(equation, tables)
            made.append(equation)
        return jaxpr.replace(eqns=made)

    def _inner(self, equation: Any, tables: dict[Any, int]) -> Any:
        """An operation that calls others."""
        axes = [tables.get(one) if isinstance(one, core.Var) else None for one in equation.invars]

        def change(inner: Any) -> Any:
            known = dict(zip(inner.invars, axes)) if equation.primitive.name in _CALLS else {}
            return self._changed(inner, {one: at for one, at in known.items() if at is not None})

        params = {key: changed_inner(part, change) for key, part in equation.params.items()}
        return equation.replace(params=params)

    def _axis(self, jaxpr: Any, equation: Any) -> int | None:
        """Along which axis a table is in parts; `None` if it is used whole, or is not large."""
        shape = equation.outvars[0].aval.shape
        looked_up = _count(jaxpr, equation.outvars[0])
        if looked_up is None or not 0 < looked_up < math.prod(shape):
            return None
        if not jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating):
            return None  # what such a table hasn't is no NaN
        used = [axis for axis, one in enumerate(self._spec(shape)) if one]
        is_even = len(used) == 1 and self._spec(shape)[used[0]] == self._place.axes
        return used[0] if is_even else None

    def _spec(self, shape: Any) -> PartitionSpec:
        return sharding_on(self._place, shape).spec

    def _kept(self, equation: Any, constraint: Any) -> Any:
        """The table as it is, in parts."""
        own = sharding_on(self._place, equation.outvars[0].aval.shape)
        params = {**constraint.params, "sharding": own}
        return constraint.replace(invars=equation.invars, outvars=equation.outvars, params=params)

    def _looked_up(self, equation: Any, axis: int) -> Any:
        """Takes rows, or of all rows the columns, where they are."""
        place, params = self._place, equation.params
        table, length = equation.invars[0].aval, equation.outvars[0].aval.shape[0]
        are_rows = self._rows > 0 and length % self._rows == 0
        last = len(equation.outvars[0].aval.shape) - table.ndim + axis

        def on_each_device(part: Any, indices: Any) -> Any:
            found = _take(part, indices, table.shape[0], params, place, axis)
            if not axis:
                return place.sum_part(found) if are_rows else jax.lax.psum(found, place.axes)
            if are_rows:
                return jax.lax.all_to_all(found, place.axes, 0, last, tiled=True)
            return jax.lax.all_gather(found, place.axes, axis=last, tiled=True)

        specs = (self._spec(table.shape), PartitionSpec())
        result = place.sharded.spec if are_rows else PartitionSpec()
        return mapped_equation(equation, on_each_device, place.mesh, specs, result)


def _take(part: Any, indices: Any, height: int, params: Any, place: Placement, axis: int) -> Any:
    """The rows that a device has, and zeros for others; of a table in columns, its columns."""
    numbers = indices[..., 0]
    if jnp.iinfo(numbers.dtype).bits < 32:  # which may not hold the height
        numbers = numbers.astype("int32")
    is_valid = (numbers >= 0) & (numbers < height)
    first = jax.lax.axis_index(place.axes) * part.shape[0] if not axis else 0
    if params["mode"] == GatherScatterMode.CLIP:
        numbers, is_valid = jnp.clip(numbers, 0, height - 1), jnp.ones_like(is_valid)
    own = numbers - first
    is_here = is_valid & (own >= 0) & (own < part.shape[0])
    # What the table hasn't is one device's to give, for a sum.
    missing = params.get("fill_value")
    missing = jnp.nan if missing is None else missing
    missing = jnp.where(first == 0, missing, 0).astype(part.dtype)
    others = jnp.where(is_valid, jnp.zeros_like(missing), missing)
    wide = (..., *[None] * (part.ndim - 1))
    found = jnp.take(part, jnp.where(is_here, own, 0), axis=0, mode="clip")
    return jnp.where(is_here[wide], found, others[wide])


def _gathering(equation: Any) -> Any:
    """The constraint that makes a weight whole; `None` if it is another operation."""
    inner = list(inner_jaxprs(equation))
    if equation.primitive.name.startswith("custom_vjp_call") and len(inner[0].eqns) == 1:
        (equation,) = inner[0].eqns
    is_named = GATHERED in str(equation.source_info.name_stack)
    return equation if equation.primitive.name == "sharding_constraint" and is_named else None


def _count(jaxpr: Any, table: Any) -> int | None:
    """How many numbers are looked up in a table; `None` if it is used otherwise."""
    if any(one is table for one in jaxpr.outvars):
        return None
    total = 0
    for equation in jaxpr.eqns:
        for place, one in enumerate(equation.invars):
            if one is table:
                found = _count_in(jaxpr, equation, place)
                if found is None:
                    return None
                total += found
    return total


def _count_in(jaxpr: Any, equation: Any, place: int) -> int | None:
    name = equation.primitive.name
    if name in _CALLS:
        (inner,) = inner_jaxprs(equation)
        return _count(inner, inner.invars[place])
    if name == "convert_element_type":
        return _count(jaxpr, equation.outvars[0])
    return math.prod(equation.outvars[0].aval.shape) if _takes_rows(equation, place) else None


def _takes_rows(equation: Any, place: int) -> bool:
    """Whether an operation takes rows of its first operand, behind the axes of indices."""
    if equation.primitive.name != "gather" or place:
        return False
    numbers, shape = equation.params["dimension_numbers"], equation.invars[0].aval.shape
    rank = len(equation.outvars[0].aval.shape)
    return (
        tuple(numbers.collapsed_slice_dims) == tuple(numbers.start_index_map) == (0,)
        and not numbers.operand_batching_dims
        and tuple(numbers.offset_dims) == tuple(range(rank - len(shape) + 1, rank))
        and tuple(equation.params["slice_sizes"]) == (1, *shape[1:])
    )
