"""Data mode on JAX over a mesh: rows over some of its axes, large layers over the others."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras

from keras_multigpu.engines.jax.devices import is_traced
from keras_multigpu.engines.jax.joint_placement import placement_on
from keras_multigpu.engines.jax.runners import RowsRunner
from keras_multigpu.engines.jax.spreading import is_changed
from keras_multigpu.engines.jax.state.shards import WideLayers
from keras_multigpu.engines.runners import DataRunner
from keras_multigpu.engines.values import Request
from keras_multigpu.engines.wide import adapt_mesh, check_mesh, check_wide, names_of


class MeshRunner(WideLayers, RowsRunner):
    """Calls the template on the whole batch; the compiler spreads rows, and large layers.

    With `shard` the devices that have the same part of a large layer divide that again.

    `make` gives a `RowsRunner` where no layer is to be spread.
    """

    _is_told = False

    @classmethod
    def make(
        cls, template: keras.Model, devices: Sequence[str], options: Mapping[str, Any]
    ) -> DataRunner:
        kind = cls if options["model_devices"] > 1 else RowsRunner
        return kind(template, devices, **options)

    @classmethod
    def check(cls, request: Request) -> None:
        super().check(request)
        check_mesh(request, placement_on(request.devices).owners)

    @classmethod
    def adapt(cls, request: Request) -> Request:
        return adapt_mesh(super().adapt(request))

    def _marks_rows(self, given: Any, weights: Iterable[Any]) -> bool:
        """Marks them where convolutions are spread by `shard_map`, or no gradient is taken.

        XLA's gradients of grouped ones are wrong if groups of devices have other rows.
        """
        is_compiled = is_traced(given)
        is_trained = is_traced(list(weights))
        if is_changed() or not (is_compiled and is_trained):
            return True
        if not self._is_told:
            self._is_told = True
            warnings.warn(
                f"{self._template.name!r} is called in a function that `jax.jit` compiles, and "
                "so each group of its devices computes all rows. If it is a layer of another "
                "model, build that with `.template`, and make the whole parallel. If the step is "
                "yours, let `parallel.function(step)` compile it.",
                stacklevel=2,
            )
        return False

    def for_part(self, part: keras.Layer) -> RowsRunner | None:
        width = self.where.width
        return MeshRunner(part, self._devices, shard=self._shard, model_devices=width)

    def lay_out(self) -> None:
        if self._parts is not None:
            check_wide(self._template, self.where.width)
            self._parts.widen(self._template)
            self._warn_of_whole_parts(self._parts)
        super().lay_out()

    def around(self, step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        step = super().around(step)
        return step if self._parts is None else self._parts.kept(step, self._template)

    def spread(self, optimizer: Any) -> None:
        if self._shard != "weights":
            super().spread(optimizer if self._parts is None else None)
        if self._parts is not None:
            self._spread_parts(self._parts, optimizer)

    def place_updates(self, optimizer: keras.Optimizer) -> None:
        kind = WideLayers if self._parts is None else RowsRunner
        kind.place_updates(self, optimizer)

    @property
    def placement(self) -> dict[str, tuple[int, ...]]:
        if self._parts is not None:
            return super().placement
        names, parts = names_of(self._template), {}
        for one in self._template.variables:
            share = self.where.width if names[id(one)] in self._axes else 1
            parts[one.path] = (math.prod(one.shape) // share,) * len(self._devices)
        return parts
