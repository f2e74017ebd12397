"""Operations of traced steps: the computations that they call, and what takes their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """The computations that an operation calls: a loop's body, a condition's branches."""
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, (core.ClosedJaxpr, core.Jaxpr)):
                yield getattr(part, "jaxpr", part)


def changed_inner(part: Any, change: Callable[[Any], Any]) -> Any:
    """A parameter of an operation, with the computations changed that it has."""
    if isinstance(part, core.Jaxpr):
        return change(part)
    if isinstance(part, core.ClosedJaxpr):
        return part.replace(jaxpr=change(part.jaxpr))
    if isinstance(part, tuple) and any(isinstance(one, core.ClosedJaxpr) for one in part):
        parts = [changed_inner(one, change) for one in part]
        return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)
    return part


def mapped_equation(
    equation: Any, function: Callable[..., Any], mesh: Mesh, given: Any, made: Any
) -> Any:
    """What a function makes of each device's parts of the operands, in an operation's place.

    `given` and `made` have the specifications of the operands' and the results' parts.
    """
    mapped = jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=made, check_vma=False)
    operands = [jax.ShapeDtypeStruct(one.aval.shape, one.aval.dtype) for one in equation.invars]
    (new,) = jax.make_jaxpr(mapped)(*operands).jaxpr.eqns
    return equation.replace(primitive=new.primitive, params=new.params, effects=new.effects)
