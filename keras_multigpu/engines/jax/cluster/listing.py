"""The operations of a traced step, as joined processes compare them."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
from jax.extend import core

from keras_multigpu.engines.cluster.listing import Listing, digest_of

_PLAIN = (bool, int, float, complex, str, type(None), np.dtype, np.generic)


def listing_of(traced: core.ClosedJaxpr) -> Listing:
    """What a traced step computes."""
    listing = Listing()
    _list(traced.jaxpr, [_value(one) for one in traced.consts], listing)
    return listing


def _list(jaxpr: Any, constants: list[Any], listing: Listing) -> None:
    """Adds the operations of a traced function, and of those that it calls."""
    places = {one: k for k, one in enumerate([*jaxpr.constvars, *jaxpr.invars])}
    forms = [str(one.aval) for one in places]
    listing.add((forms, constants), f"the inputs, of {', '.join(forms)}")

    def name(operand: Any) -> Any:
        return _value(operand.val) if isinstance(operand, core.Literal) else places[operand]

    for equation in _with_results(jaxpr):
        kind, inputs = equation.primitive.name, list(map(name, equation.invars))
        for one in equation.outvars:
            places[one] = len(places)
        results = [str(one.aval) for one in equation.outvars]
        literals = [str(one.val) for one in equation.invars if isinstance(one, core.Literal)]
        params = [
            (key, _form(one, listing))
            for key, one in sorted(equation.params.items())
            if key != "name"
        ]
        text = " with ".join([f"{kind} of {', '.join(results)}", *literals])
        listing.add((kind, inputs, params, results), text)
    outputs = list(map(name, jaxpr.outvars))
    listing.add(outputs, f"the results {outputs}")


def _with_results(jaxpr: Any) -> list[Any]:
    """The operations on which the outputs depend; prints are a process's own."""
    needed, found = set(_variables(jaxpr.outvars)), []
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed.update(_variables(equation.invars))
            found.append(equation)
    return found[::-1]


def _variables(operands: Any) -> list[Any]:
    return [one for one in operands if not isinstance(one, core.Literal)]


def _form(param: Any, listing: Listing) -> Any:
    """A setting of an operation; the functions that it calls are listed before it."""
    if isinstance(param, core.ClosedJaxpr):
        return _list(param.jaxpr, [_value(one) for one in param.consts], listing)
    if isinstance(param, core.Jaxpr):
        return _list(param, [], listing)
    if isinstance(param, (tuple, list)):
        return [_form(one, listing) for one in param]
    if isinstance(param, np.ndarray):
        return _value(param)
    return repr(param) if isinstance(param, _PLAIN) else type(param).__name__


def _value(value: Any) -> Any:
    """A constant, by its value if this process has all of it."""
    if isinstance(value, jax.core.Tracer) or not getattr(value, "is_fully_addressable", True):
        return str(jax.typeof(value))
    if jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():  # within the step that is being traced
            return f"key {digest_of([jax.random.key_data(value)], sys.maxsize)}"
    return digest_of([value], sys.maxsize)
