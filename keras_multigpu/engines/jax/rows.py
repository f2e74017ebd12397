"""Sums of rows of a table, and their gradient, computed column of indices by column.

XLA on processors writes the gathered rows, of shape `(rows, ones, units)`, to memory and reads them
again, which takes most of a step's time. Added column by column, they never leave the cache.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from keras_multigpu.engines.jax.devices import is_traced
from keras_multigpu.engines.jax.placement import Placement, current
from keras_multigpu.engines.shared import having
from keras_multigpu.engines.values import Tensor

_UNROLLED = 8  # columns added in one iteration of the loop
_is_spread: contextvars.ContextVar[Callable[[Sequence[int]], bool]] = contextvars.ContextVar(
    "_is_spread", default=lambda shape: False
)


def spreading(
    is_spread: Callable[[Sequence[int]], bool],
) -> contextlib.AbstractContextManager[None]:
    """Scope in which each device has its part of the rows of tables of some shapes."""
    return having(_is_spread, is_spread)


def sum_rows(table: Tensor, indices: Tensor, weights: Tensor | None) -> Tensor:
    """`sum_j weights[:, j] * table[indices[:, j]]`, of shape `(rows, units)`."""
    place = current()
    if place is None or not is_traced(indices) or place.of_rows(indices) != place.sharded:
        place = None
    if place is not None and _is_spread.get()(table.shape):
        return _sum_of_parts(table, indices, weights, place)
    if table.shape[1] == 1:
        return _sum_at_once(table, indices, weights)  # as fast: a row is a single number
    return _sum(table, indices, weights, place)


def _sum_of_parts(
    table: Tensor, indices: Tensor, weights: Tensor | None, place: Placement
) -> Tensor:
    """`sum_rows` of a table whose rows are spread.

    Each device adds the rows that it has, for the whole batch, and the devices' sums are added. So
    only indices and sums cross, however large the table, and its gradient stays where its rows are.
    """
    width = table.shape[0]

    def on_each_device(part: Tensor, *batch: Tensor) -> Tensor:
        numbers, *given = (jax.lax.all_gather(one, place.axes, tiled=True) for one in batch)
        if jnp.iinfo(numbers.dtype).bits < 32:  # which may not hold the width
            numbers = numbers.astype("int32")
        numbers = jnp.where(numbers < 0, numbers + width, numbers)
        is_valid = (numbers >= 0) & (numbers < width)
        own = numbers - jax.lax.axis_index(place.axes) * part.shape[0]
        is_here = (own >= 0) & (own < part.shape[0])
        used = is_here.astype(part.dtype) * (given[0] if given else 1)
        used = jnp.where(is_valid, used, jnp.nan)  # as `jnp.take` gives
        total = _sum(part.astype(_wide(part)), jnp.where(is_here, own, 0), used, None)
        return place.sum_part(total).astype(part.dtype)

    batch = (indices,) if weights is None else (indices, weights)
    rows = PartitionSpec(place.axes)
    return jax.shard_map(
        on_each_device,
        mesh=place.mesh,
        in_specs=(rows,) * (1 + len(batch)),
        out_specs=rows,
        check_vma=False,  # the loop starts from zeros, equal on all devices
    )(table, *batch)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _sum(table: Tensor, indices: Tensor, weights: Tensor | None, place: Placement | None) -> Tensor:
    return jax.lax.platform_dependent(
        table, indices, weights, cpu=_sum_by_columns, default=_sum_at_once
    )


def _forward(
    table: Tensor, indices: Tensor, weights: Tensor | None, place: Placement | None
) -> tuple[Tensor, Any]:
    return _sum(table, indices, weights, place), (table, indices, weights)


def _backward(place: Placement | None, kept: Any, upstream: Tensor) -> Any:
    parts = (*kept, upstream)
    by_table, by_weights = _gradients(*parts) if place is None else _on_devices(place, *parts)
    return by_table, None, by_weights


_sum.defvjp(_forward, _backward)


def _on_devices(place: Placement, *parts: Any) -> tuple[Tensor, Tensor | None]:
    """`_gradients` on each device's rows; XLA alone would all-reduce for every column."""

    def gradients(*parts: Any) -> tuple[Tensor, Tensor | None]:
        by_table, by_weights = _gradients(*parts)
        return jax.lax.psum(by_table, place.axes), by_weights

    everywhere, of_rows = place.replicated.spec, place.sharded.spec
    return jax.shard_map(
        gradients,
        mesh=place.mesh,
        in_specs=(everywhere, of_rows, of_rows, of_rows),
        out_specs=(everywhere, of_rows),
        check_vma=False,  # the loop starts from zeros, equal on all devices
    )(*parts)


def _gradients(
    table: Tensor, indices: Tensor, weights: Tensor | None, upstream: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the table and of the weights."""
    return jax.lax.platform_dependent(
        table, indices, weights, upstream, cpu=_gradients_by_columns, default=_gradients_at_once
    )


def _sum_at_once(table: Tensor, indices: Tensor, weights: Tensor | None) -> Tensor:
    taken = jnp.take(table, indices, axis=0)
    if weights is not None:
        taken = taken * weights[:, :, None]
    return taken.astype(_wide(table)).sum(axis=1).astype(table.dtype)


def _gradients_at_once(
    table: Tensor, indices: Tensor, weights: Tensor | None, upstream: Tensor
) -> tuple[Tensor, Tensor | None]:
    _, gradients = jax.vjp(lambda *parts: _sum_at_once(parts[0], indices, parts[1]), table, weights)
    return gradients(upstream)


def _sum_by_columns(table: Tensor, indices: Tensor, weights: Tensor | None) -> Tensor:
    def add(total: Tensor, column: Any) -> tuple[Tensor, None]:
        taken = jnp.take(table, column[0], axis=0)
        if column[1] is not None:
            taken = taken * column[1][:, None]
        return total + taken.astype(total.dtype), None

    nothing = jnp.zeros((indices.shape[0], table.shape[1]), _wide(table))
    total, _ = jax.lax.scan(add, nothing, _columns(indices, weights), unroll=_UNROLLED)
    return total.astype(table.dtype)


def _gradients_by_columns(
    table: Tensor, indices: Tensor, weights: Tensor | None, upstream: Tensor
) -> tuple[Tensor, Tensor | None]:
    upstream = upstream.astype(_wide(table))

    def add(total: Tensor, column: Any) -> tuple[Tensor, Tensor | None]:
        numbers, own = column
        if own is None:
            return total.at[numbers].add(upstream), None
        by_weight = (jnp.take(table, numbers, axis=0) * upstream).sum(axis=1)
        return total.at[numbers].add(own[:, None] * upstream), by_weight.astype(own.dtype)

    nothing = jnp.zeros(table.shape, upstream.dtype)
    by_table, by_weights = jax.lax.scan(add, nothing, _columns(indices, weights))
    return by_table.astype(table.dtype), None if by_weights is None else by_weights.T


def _columns(indices: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return indices.T, None if weights is None else weights.T


def _wide(table: Tensor) -> Any:
    """Sums use float32 at least, like matrix products."""
    return jnp.promote_types(table.dtype, jnp.float32)
