"""Spreads operations that XLA does not partition, so that each device computes its rows.

XLA's partitioner spreads most operations over the devices. For the others it gathers the whole
batch on every device: grouped convolutions, Fourier transforms, matrix factorizations, loops over
the rows. Here a step is traced once, and these operations are wrapped in `jax.shard_map`. Their
result for a row depends on that row only, whatever the array means to the model, so this is exact.
A gradient that sums over the rows is summed over the devices.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import PartitionSpec

from keras_multigpu.engines.jax.devices import is_traced
from keras_multigpu.engines.jax.jaxprs import changed_inner, mapped_equation
from keras_multigpu.engines.jax.lookups import Lookups
from keras_multigpu.engines.jax.placement import Placement
from keras_multigpu.engines.jax.sums import are_few, find_scattered, sums_rows
from keras_multigpu.engines.shared import having

_is_changed: contextvars.ContextVar[bool] = contextvars.ContextVar("is_changed", default=False)

# How many of the last axes an operation uses; the other axes are independent problems.
_LAST_AXES = {
    **dict.fromkeys("cholesky eigh eig geqrf geqp3 householder_product lu qr svd".split(), 2),
    **{"lu_pivots_to_permutation": 1, "triangular_solve": 2},
}


def spread(
    step: Callable[[Any, Any], Any],
    place: Placement,
    scatters: bool = False,
    look: Callable[[Any, int], None] = lambda traced, rows: None,
) -> Callable[[Any, Any], Any]:
    """Keras's step, with the operations spread that XLA would not; unchanged if not compiled.

    With `scatters`, for a state that is spread, too, sums over the rows stay in parts where only
    parts are needed. `look` sees what is traced, and its number of rows.
    """

    def spread_step(state: Any, batch: Any) -> Any:
        rows = place.spread_rows(batch)
        is_needed = scatters or rows > 0
        is_looked_at = is_needed or place.group is not None
        if not is_looked_at or not is_traced((state, batch)):
            return step(state, batch)

        def change(traced: Any) -> Any:
            look(traced, rows)
            return _spread(traced, place, rows, scatters) if is_needed else traced

        return _changed(step, change)(state, batch)

    return spread_step


def spread_function(
    function: Callable[..., Any], place: Placement, rows: int, scatters: bool
) -> Callable[..., Any]:
    """A traced function of a batch of so many rows, with the operations spread."""
    if not rows and not scatters:
        return function
    return _changed(function, lambda traced: _spread(traced, place, rows, scatters))


def _spread(traced: Any, place: Placement, rows: int, scatters: bool) -> Any:
    # If only the state is spread, XLA must not divide convolutions as its parts are.
    spreader = _Spreader(place, rows, scatters) if rows else _Whole(place, 0, False)
    spreader.shapes = {one.aval.shape for one in traced.jaxpr.invars}
    jaxpr = Lookups(place, rows).change(traced.jaxpr) if scatters else traced.jaxpr
    return traced.replace(jaxpr=spreader.spread(jaxpr))


def _changed(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function that is traced, and then changed; JAX's errors name its arguments."""

    @functools.wraps(function)
    def trace(*args: Any, **kwargs: Any) -> Any:
        with having(_is_changed, True):
            return function(*args, **kwargs)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        traced, results = jax.make_jaxpr(trace, return_shape=True)(*args, **kwargs)
        made = core.jaxpr_as_fun(change(traced))(*jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(jax.tree.structure(results), made)

    return run


def is_changed() -> bool:
    """Whether what is being traced will have its operations spread."""
    return _is_changed.get()


class _Spreader:
    """Wraps operations of a traced step in `shard_map`.

    `rows` is the batch's number of rows, a multiple of the number of devices; 0 if each gets all.
    `shapes` are those of the arguments, weights among them.
    """

    shapes: Collection[tuple[int, ...]] = ()

    def __init__(self, place: Placement, rows: int, scatters: bool):
        self._place = place
        self._scatters = scatters
        self._rows = rows

    def spread(self, jaxpr: Any) -> Any:
        """The same computation, with these operations spread."""
        scattered = find_scattered(jaxpr) if self._scatters else {}
        return jaxpr.replace(
            eqns=[
                self._summed(equation, scattered[place])
                if place in scattered
                else self._equation(equation)
                for place, equation in enumerate(jaxpr.eqns)
            ]
        )

    def _equation(self, equation: Any) -> Any:
        name, params = equation.primitive.name, equation.params
        if name == "conv_general_dilated":
            return self._convolution(equation)
        if name == "scan" and not params["num_carry"] and params["length"] == self._rows:
            return self._loop(equation)
        if name == "fft":
            return self._batched(equation, len(params["fft_lengths"]))
        if name in _LAST_AXES:
            return self._batched(equation, _LAST_AXES[name])
        if name == "scatter-add" and self._is_of_table(equation):
            return self._mapped(equation, [None] * 3, [None])
        if name == "shard_map":
            return equation
        if "window_dimensions" in params and self._is_over_rows(equation):
            # XLA loses gradients of maxima over neighbouring rows.
            parts = equation.invars, equation.outvars
            return self._mapped(equation, *([None] * len(some) for some in parts))
        inner = {key: changed_inner(part, self.spread) for key, part in params.items()}
        return equation.replace(params=inner)

    def _is_over_rows(self, equation: Any) -> bool:
        """Whether windows hold several rows, of the first axis."""
        windows, shape = equation.params["window_dimensions"], equation.invars[0].aval.shape
        return bool(windows) and windows[0] > 1 and self._counts_rows(shape[0])

    def _convolution(self, equation: Any) -> Any:
        params = equation.params
        lhs, rhs, out = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        groups = params["feature_group_count"], params["batch_group_count"]
        if groups == (1, 1) and not self._place.is_mesh:
            return equation
        if groups[1] == 1 and self._counts_rows(shape[lhs[0]]):
            return self._mapped(equation, [lhs[0], None], [out[0]])
        # The gradient of kernels, which sums over the rows.
        if groups[0] == 1 and self._counts_rows(shape[lhs[1]]):
            return self._mapped(equation, [lhs[1], rhs[1]], [None], is_sum=True)
        return self._mapped(equation, [None, None], [None]) if self._place.is_mesh else equation

    def _summed(self, equation: Any, axis: int) -> Any:
        """A sum over the rows of which each device needs a part of an axis, and gets only that.

        XLA for CPUs would send the whole sum to every device.
        """
        params, shapes = equation.params, [part.aval.shape for part in equation.invars]
        name = equation.primitive.name
        if name == "dot_general":
            (contracted, _) = params["dimension_numbers"]
            for left, right in zip(*contracted):
                if self._counts_rows(shapes[0][left]):
                    return self._mapped(equation, [left, right], [axis], scatter=axis)
        elif name == "conv_general_dilated":
            lhs, rhs, _ = params["dimension_numbers"]
            is_grouped = max(params["feature_group_count"], params["batch_group_count"]) > 1
            if not is_grouped and self._counts_rows(shapes[0][lhs[1]]):
                return self._mapped(equation, [lhs[1], rhs[1]], [axis], scatter=axis)
        elif sums_rows(equation) and not are_few(equation) and self._counts_rows(shapes[1][0]):
            return self._mapped(equation, [None, 0, 0], [axis], scatter=axis)
        return self._equation(equation)

    def _is_of_table(self, equation: Any) -> bool:
        """Whether it is the gradient of a whole table, which takes few rows of those that it has.

        Each device then gets these from the others. XLA would send the sum, as large as the table.
        """
        if self._scatters or self._place.is_mesh or not sums_rows(equation):
            return False
        table, indices, _ = (one.aval.shape for one in equation.invars)
        is_weights = table in self.shapes and table[:1] not in ((), (self._rows,))
        return is_weights and are_few(equation) and self._counts_rows(indices[0])

    def _loop(self, equation: Any) -> Any:
        """A loop over the rows, without state: each device loops over its rows."""
        params = equation.params
        own = [None] * params["num_consts"]
        axes = own + [0] * (len(equation.invars) - len(own))
        length = params["length"] // self._place.count
        results = [0] * len(equation.outvars)
        return self._mapped(equation, axes, results, length=length)

    def _batched(self, equation: Any, last_axes: int) -> Any:
        """An operation on the last axes of each operand."""
        shapes = [part.aval.shape for part in (*equation.invars, *equation.outvars)]
        is_batched = all(len(shape) > 1 and self._counts_rows(shape[0]) for shape in shapes)
        if not is_batched or len(shapes[0]) <= last_axes:
            return equation
        return self._mapped(equation, [0] * len(equation.invars), [0] * len(equation.outvars))

    def _counts_rows(self, length: int) -> bool:
        """Whether an axis may hold the batch's rows, or several parts of each row."""
        return self._rows > 0 and length > 0 and length % self._rows == 0

    def _mapped(
        self,
        equation: Any,
        axes: Sequence[int | None],
        results: Sequence[int | None],
        *,
        is_sum: bool = False,
        scatter: int | None = None,
        **changed: Any,
    ) -> Any:
        """The same operation, on each device's part of some axes.

        `axes` has the axis of each operand to spread, `None` for whole operands; `results` the
        same for results. With `is_sum`, the results are summed over the devices; with `scatter`,
        an axis, each device gets its part of the sum. `changed` are the operation's parameters
        that differ on a device.
        """
        params = {**equation.params, **changed}

        def on_each_device(*parts: Any) -> list[Any]:
            made = equation.primitive.bind(*parts, **params)
            made = made if equation.primitive.multiple_results else [made]
            if scatter is not None:
                return [self._place.sum_part(part, scatter) for part in made]
            return [jax.lax.psum(part, self._place.axes) for part in made] if is_sum else list(made)

        given, made = tuple(map(self._spec, axes)), list(map(self._spec, results))
        return mapped_equation(equation, on_each_device, self._place.mesh, given, made)

    def _spec(self, axis: int | None) -> PartitionSpec:
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, self._place.axes)


class _Whole(_Spreader):
    """Wraps convolutions, and their gradients, so that each device computes all of them.

    XLA's partitioner would divide them as layers before or after them are, by channels or places,
    and ends the process, or gets wrong numbers.
    """

    def _convolution(self, equation: Any) -> Any:
        return self._mapped(equation, [None, None], [None])
