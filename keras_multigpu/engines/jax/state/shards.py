"""Tensor parallelism: the weights of large layers are spread over devices.

XLA then partitions the matrix products and inserts the communication.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import keras

from keras_multigpu.engines.jax.devices import is_traced
from keras_multigpu.engines.jax.placement import Placement
from keras_multigpu.engines.jax.state.parted import is_spread, make_whole, put, release
from keras_multigpu.engines.jax.state.slots import prepare
from keras_multigpu.engines.jax.threads import in_fresh_thread
from keras_multigpu.engines.templates import all_layers
from keras_multigpu.engines.wide import check_wide, find_wide, names_of


class WideLayers:
    """What runners have in common that spread the weights of large layers.

    Attributes:
        where: the placement, whose `wide_axes` have the layers.
    """

    where: Placement
    _template: keras.Model
    _axes: Mapping[str, int] = {}  # of each weight that is spread
    _is_warned = False
    spreads_state = True

    def lay_out(self) -> None:
        """Chooses what is spread, and spreads the weights."""
        check_wide(self._template, self.where.width)
        self._axes = find_wide(self._template, self.where.width)
        in_fresh_thread(self._spread_first)

    def _spread_first(self) -> None:
        self.spread(None)
        self.rest(None)

    def around(self, step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """A step on whole copies, if it is not compiled.

        XLA partitions a single operation wrongly if groups of devices have other rows, or parts of
        kernels: gradients of grouped convolutions are as many times too large as there are groups.
        """

        @functools.wraps(step)
        def whole_step(state: Any, batch: Any) -> Any:
            given = state, batch
            is_parted = self._axes or self.where.is_mesh
            if is_parted and not is_traced(given):
                self._warn_of_whole()
                given = jax.device_put(given, self.where.replicated)
            return step(*given)

        return whole_step

    def _warn_of_whole(self) -> None:
        if self._is_warned:
            return
        self._is_warned = True
        layers = [one.name for one in all_layers(self._template) if not one.supports_jit]
        why = f" (Keras compiles none with {', '.join(layers[:3])})" if layers else ""
        cure = "Compile with `jit_compile=True`, without `run_eagerly` and `jax_disable_jit`."
        if layers:
            cure = "Move such layers into the data pipeline, `tf.data` or a `PyDataset`."
        warnings.warn(
            f"The steps of {self._template.name!r} are not compiled{why}, and so each device "
            f"computes all of them, with whole weights. {cure}",
            stacklevel=2,
        )

    def place_updates(self, optimizer: keras.Optimizer) -> None:
        """Has an optimizer spread each slot as its variable is."""
        prepare(optimizer, shard_alike)

    def spread(self, optimizer: Any) -> None:
        """Spreads weights and slots again that were assigned since."""
        if not self._axes:
            return
        names = names_of(self._template)
        for variable in self._template.variables:
            axis = self._axes.get(names[id(variable)])
            if axis is None:
                whole = [variable] if self.where.group is None else []
                make_whole(whole)
                release(whole, self.where.mesh)
            else:
                put(variable, self.where.of_wide(axis))
        references = getattr(optimizer, "references", {})
        for slot in optimizer.variables if optimizer is not None else ():
            if id(slot) in references:
                shard_alike(slot, references[id(slot)])

    def rest(self, optimizer: Any) -> None:
        """Has all devices of a mesh keep parts: what others compute with these is right then."""
        slots = [] if optimizer is None else optimizer.variables
        if not self.where.is_mesh or self.where.group is not None:
            return  # no process computes alone with what several have
        for variable in [*self._template.variables, *slots]:
            if is_spread(variable):
                value = self.where.at_rest(variable._value)
                if value is not variable._value:
                    variable.assign(value)

    def kept(self, variables: list[keras.Variable], optimizer: Any) -> set[int]:
        """The `id`s of the variables that stay on the devices between two loops."""
        return spread_ids(variables, optimizer)


def shard_alike(slot: keras.Variable, reference: keras.Variable) -> None:
    """Spreads an optimizer's slot like its variable."""
    if is_spread(reference) and slot.shape == reference.shape:
        put(slot, reference._value.sharding)


def spread_ids(variables: list[keras.Variable], optimizer: Any) -> set[int]:
    """The `id`s of the variables that are spread, with arrays of their own."""
    spread = [variable for variable in variables if is_spread(variable)]
    # An optimizer may have set weights to its averages, and so share their arrays. Such weights
    # get separate arrays, because a step of the template may donate the memory of its arrays.
    shared = set() if optimizer is None else {id(slot._value) for slot in optimizer.variables}
    for variable in spread:
        if id(variable._value) in shared:
            variable.assign(jax.numpy.copy(variable._value))
    return set(map(id, spread))
