"""Data mode's state in parts: weights, and the optimizer's slots, spread over the devices.

Each device keeps a part and updates it. A step gathers the weights that it computes with, and sums
the gradients of each part on the part's device (Rajbhandari et al., "ZeRO: Memory optimizations
toward training trillion parameter models", 2020). The compiler inserts the communication.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from keras_multigpu.engines.jax.cluster.spread_variables import check_spread
from keras_multigpu.engines.jax.counting.transfers import GATHERED
from keras_multigpu.engines.jax.devices import is_traced
from keras_multigpu.engines.jax.joint_placement import placement_on
from keras_multigpu.engines.jax.placement import Placement, prime_factors
from keras_multigpu.engines.jax.state.parted import put, release
from keras_multigpu.engines.templates import metrics_variables
from keras_multigpu.engines.values import Tensor
from keras_multigpu.engines.wide import wide_variables

# Variables with fewer elements stay whole: sending them costs more than keeping them.
_LEAST = 1024
# Variables with as many elements are named if they can't be spread evenly.
_LARGE = 2**20
# The smaller ones, too, if this share of what spreading would save is not saved.
_LOST = 0.25


class StateShards:
    """Where the state of a data-parallel model is kept.

    Args:
        names: the names of the devices.
        shard: what is spread: `"optimizer"` (slots), `"weights"` (weights and slots).
        width: how many devices have large layers together: see `widen`.
    """

    def __init__(self, names: Sequence[str], shard: str, width: int = 1):
        self._place = place = placement_on(names, width=width)
        self._factors = place.factors
        self._group, self._mesh, self._whole = place.group, place.mesh, place.replicated
        self.of_weights = shard == "weights"
        self._axes: dict[tuple[int, ...], int] = {}
        self._wide: dict[int, NamedSharding] = {}
        self._gather = functools.cache(self._gathering)

    def widen(self, template: keras.Model) -> None:
        """Has large layers of a model computed in parts, which other devices divide again."""
        wide = wide_variables(template, self._place.width)
        self._wide = {id(one): self._place.of_wide(axis) for one, axis in wide}
        for one, axis in wide:
            # Slots are known by their shapes: equal ones are spread alike.
            self._axes.setdefault(tuple(one.shape), axis)

    def sharding(self, shape: Sequence[int]) -> NamedSharding:
        """How a variable of a shape is spread: as `sharding_on` says."""
        return sharding_on(self._place, shape, self._axes.get(tuple(shape)))

    def share(self, shape: Sequence[int]) -> tuple[int, ...]:
        """How many elements of a variable of a shape each device keeps."""
        return (math.prod(self.sharding(shape).shard_shape(tuple(shape))),) * self._mesh.size

    def gathered(
        self, values: Sequence[Tensor], variables: Sequence[keras.Variable], are_spread: bool
    ) -> list[Any]:
        """Weights for computing in a traced step: whole, or a group's; their gradients are spread.

        `are_spread` tells whether the rows of the batch are, too. Tables of which a step adds up
        rows stay spread by rows: `sum_rows` asks for `is_by_rows`.
        """
        return [
            self._gather(are_spread, self._computed(variable))(value)
            if is_traced(value)
            and not (hasattr(variable, "names_rows_once") and self.is_by_rows(variable.shape))
            else value
            for value, variable in zip(values, variables, strict=True)
        ]

    def _computed(self, variable: keras.Variable) -> NamedSharding:
        """How the devices have a weight that they compute with."""
        return self._wide.get(id(variable), self._whole)

    def is_by_rows(self, shape: Sequence[int]) -> bool:
        """Whether tables of a shape stay spread along their first axis, evenly."""
        return not self._place.is_mesh and _is_by_rows(shape, self._factors)

    def kept(
        self, step: Callable[[Any, Any], Any], template: keras.Model
    ) -> Callable[[Any, Any], Any]:
        """A training step whose new state is spread as the old one is.

        A step that is not compiled gets whole copies, which each of its operations would otherwise
        have to gather.
        """

        @functools.wraps(step)
        def kept_step(state: Any, batch: Any) -> Any:
            is_compiled = is_traced(state)
            state = state if is_compiled else jax.device_put(state, self._whole)
            outputs, new = step(state, batch)
            if not isinstance(new, tuple) or len(new) < 3:  # of `predict`
                return outputs, new
            # Else XLA may spread a metric's state, too, which one of several processes can't read.
            metrics = jax.tree.map(lambda value: _constrain(value, self._whole), new[-1])
            # `evaluate` has no optimizer, and changes no weight.
            if len(new) != 4:
                return outputs, (*new[:-1], metrics)
            part = self._part_of if is_compiled else self._put_part
            if self.of_weights:
                return outputs, (*jax.tree.map(part, new[:3]), metrics)
            lists = template.trainable_variables, template.non_trainable_variables
            weights = [
                [gathered(one, self._computed(of)) for one, of in zip(*pair, strict=True)]
                for pair in zip(new, lists)
            ]
            return outputs, (*weights, jax.tree.map(part, new[2]), metrics)

        return kept_step

    def put(self, variables: Iterable[keras.Variable]) -> None:
        """Spreads variables that are not."""
        variables = list(variables)
        for variable in variables if self._group is not None else ():
            check_spread(variable, self.sharding(variable.shape))  # before any is spread
        for variable in variables:
            wanted = self.sharding(variable.shape)
            if wanted == self._whole:
                release([variable] if self._group is None else [], self._mesh)
            else:
                put(variable, wanted)

    def release(self, template: keras.Model) -> None:
        """Unties the template's own optimizer and metrics from devices other than the weights'."""
        optimizer = getattr(template, "optimizer", None)
        others = [*metrics_variables(template), *getattr(optimizer, "variables", ())]
        release(others, self._mesh)

    def _part_of(self, value: Tensor) -> Tensor:
        return _constrain(value, self.sharding(np.shape(value)))

    def why_whole(self, variables: Iterable[keras.Variable]) -> str:
        """As the function of this name."""
        return _why_whole(variables, lambda shape: self.share(shape)[0], self._mesh.size)

    def _gathering(self, are_spread: bool, computed: NamedSharding) -> Callable[[Tensor], Tensor]:
        """A function that makes a weight whole, and its gradient the devices' parts of it.

        Whole, or as it is `computed` with.
        """

        def backward(_: None, gradient: Tensor) -> tuple[Tensor]:
            # Whole before, if each device computes it anyway. Else XLA computes the convolutions
            # before it with parts, gets wrong numbers with transposed ones, and dies of depthwise
            # ones beside parts of which devices have copies.
            whole = gradient if are_spread else _constrain(gradient, computed)
            return (self._part_of(whole),)

        gather = jax.custom_vjp(lambda weight: gathered(weight, computed))
        gather.defvjp(lambda weight: (gathered(weight, computed), None), backward)
        return gather

    def _put_part(self, value: Tensor) -> Tensor:
        return jax.device_put(value, self.sharding(np.shape(value)))


def gathered(value: Tensor, computed: NamedSharding) -> Tensor:
    """A weight as the devices compute with it."""
    with jax.named_scope(GATHERED):
        return _constrain(value, computed)


def sharding_on(
    place: Placement, shape: Sequence[int], wide_axis: int | None = None
) -> NamedSharding:
    """How a variable of a shape is spread; a copy on each device if it can't be, or is small.

    Along the first axis that the number of devices divides; else along several axes, as far as
    they can be divided. `wide_axis`: that along which devices of a group have parts.
    """
    first = len(place.axes) if place.is_mesh else 0
    wide = {} if wide_axis is None else {wide_axis: [*range(first, len(place.factors))]}
    parts = _divide(shape, place.factors, wide)
    along = [
        tuple(place.mesh.axis_names[number] for number in parts.get(axis, ()))
        for axis in range(max(parts, default=-1) + 1)
    ]
    return NamedSharding(place.mesh, PartitionSpec(*along))


def kept_share(shapes: Sequence[Sequence[int]], count: int) -> float:
    """The share of variables of some shapes that each of `count` devices keeps."""
    factors = prime_factors(count)
    kept = sum(_kept(shape, factors) for shape in shapes)
    return kept / max(1, sum(map(math.prod, shapes)))


def _kept(shape: Sequence[int], factors: Sequence[int]) -> int:
    """How many elements of a variable each device keeps."""
    used = [number for parts in _divide(shape, factors).values() for number in parts]
    return math.prod(shape) // math.prod(factors[number] for number in used)


def why_whole(variables: Iterable[keras.Variable], count: int) -> str:
    """Names large variables of which a device keeps more than its part; all, if much is lost.

    Returns `""` if there are none.
    """
    factors = prime_factors(count)
    return _why_whole(variables, lambda shape: _kept(shape, factors), count)


def _why_whole(
    variables: Iterable[keras.Variable], kept_of: Callable[[Sequence[int]], int], count: int
) -> str:
    worth = [one for one in variables if math.prod(one.shape) >= _LEAST]
    kept = [kept_of(one.shape) for one in worth]
    whole = [math.prod(one.shape) for one in worth]
    least = _LARGE if sum(kept) * count < (1 + _LOST * (count - 1)) * sum(whole) else _LEAST
    uneven = [
        f"{one.path} {tuple(one.shape)}"
        for one, own, all_ in zip(worth, kept, whole)
        if own * count > all_ >= least
    ]
    if not uneven:
        return ""
    return (
        f"`shard` spreads a weight along axes that the number of devices, {count}, divides. Each "
        f"device keeps more than its part of: {', '.join(uneven)}. Choose lengths that it divides "
        "(a larger vocabulary, say), or another number of devices."
    )


def tables_by_rows(weights: Iterable[keras.Variable], count: int) -> list[keras.Variable]:
    """The tables whose rows `count` devices would add up where they are."""
    factors = prime_factors(count)
    return [one for one in weights if count > 1 and _is_table_by_rows(one, factors)]


def _is_table_by_rows(weight: keras.Variable, factors: Sequence[int]) -> bool:
    return hasattr(weight, "names_rows_once") and _is_by_rows(weight.shape, factors)


def _is_by_rows(shape: Sequence[int], factors: Sequence[int]) -> bool:
    return len(_divide(shape, factors).get(0, ())) == len(factors)


def _divide(
    shape: Sequence[int], factors: Sequence[int], known: Mapping[int, list[int]] | None = None
) -> dict[int, list[int]]:
    """Which of the factors of a number of devices divide which axis of a variable.

    By their numbers; `known` are those of which it is settled.
    """
    parts = {axis: [*numbers] for axis, numbers in (known or {}).items()}
    if not shape or math.prod(shape) < _LEAST:
        return parts
    left = list(shape)
    for axis, numbers in parts.items():
        left[axis] //= math.prod(factors[number] for number in numbers)
    settled = {number for numbers in parts.values() for number in numbers}
    rest = [number for number in range(len(factors)) if number not in settled]
    for axis, length in enumerate(left):
        if not length % math.prod(factors[number] for number in rest):
            parts.setdefault(axis, []).extend(rest)
            return parts
    for number in rest:
        factor = factors[number]
        axis = max(range(len(left)), key=lambda i: (not left[i] % factor, left[i]))
        if not left[axis] % factor:
            left[axis] //= factor
            parts.setdefault(axis, []).append(number)
    return parts


def _constrain(value: Tensor, sharding: NamedSharding) -> Tensor:
    return jax.lax.with_sharding_constraint(value, sharding) if is_traced(value) else value
