"""What a model's steps tell the other processes of themselves, to be compared."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.extend import core

from keras_multigpu.engines.cluster.calls import Call
from keras_multigpu.engines.cluster.group import Group
from keras_multigpu.engines.cluster.listing import Listing, digest_of
from keras_multigpu.engines.jax.cluster.joint import is_whole

_SETTINGS = (
    "default_dtype_bits", "default_matmul_precision", "default_prng_impl",
    "disable_jit", "enable_x64", "numpy_dtype_promotion", "random_seed_offset",
    "threefry_partitionable", "use_shardy_partitioner",
)  # fmt: skip

_PLAIN = (bool, int, float, complex, str, type(None), np.dtype, np.generic)


def settings() -> str:
    """Settings of JAX that change what a step computes, or what crosses in it."""
    found = {name: getattr(jax.config, f"jax_{name}", None) for name in _SETTINGS}
    return ", ".join(f"{name}={value}" for name, value in found.items())


def compare_weights(group: Group, variables: Sequence[keras.Variable], parts: Listing) -> None:
    """Raises a `ClusterError` if another process has other values, or has assigned other `parts`.

    `parts` is what was assigned to variables of which each process has a part.
    """
    # A loop that has donated an array and given none back leaves a deleted one.
    values = [(one.path, one._value) for one in variables if one._value is not None]
    own = [(path, one) for path, one in values if not one.is_deleted() and is_whole(one)]
    group.compare("weights", Listing.of_all([Listing.of_values(own), parts]), "new weights")


EVERY = 8
"""After so many steps of a loop, weights are sampled; after each single one."""
_TAKEN = 256  # elements of a weight at a time; each time others


class Samples:
    """Decides when weights are sampled: alike in all processes, as their steps are."""

    def __init__(self) -> None:
        self._latest: tuple[Call | None, int] = (None, 0)

    def take(self, weights: list[Any], call: Call) -> int:
        """A checksum of weights that each device has whole; 0 if it is not their turn."""
        latest, steps = self._latest
        if latest is not call:
            steps = 0
        every = EVERY if call.is_loop else 1
        due = call.steps - steps >= every
        self._latest = call, call.steps if due else steps
        if not due:
            return 0
        whole = [one for one in weights if isinstance(one, jax.Array) and one.is_fully_replicated]
        some = _some([one.addressable_data(0) for one in whole], np.int32(call.steps // every))
        return digest_of(some, sys.maxsize)


@jax.jit
def _some(weights: list[jax.Array], turn: Any) -> list[jax.Array]:
    """Some elements of each weight."""
    some = []
    for weight in weights:
        count, step = min(weight.size, _TAKEN), max(1, weight.size // _TAKEN)
        places = (turn + np.arange(count) * step) % max(1, weight.size)
        some.append(weight.reshape(-1)[places])
    return some


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
