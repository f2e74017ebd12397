"""Data mode on a mesh of devices on JAX: rows over one axis, large layers over the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_multigpu.engines.jax.placement import placement_on
from keras_multigpu.engines.jax.runners import RowsRunner
from keras_multigpu.engines.jax.scopes import in_fresh_thread
from keras_multigpu.engines.jax.state.shards import shard, shard_alike, spread_ids
from keras_multigpu.engines.jax.state.slots import prepare, spread_slots
from keras_multigpu.engines.runners import DataRunner
from keras_multigpu.engines.values import Request
from keras_multigpu.engines.wide import adapt_mesh, check_mesh, find_wide, names_of


class MeshRunner(RowsRunner):
    """Calls the template on the whole batch; the compiler spreads rows, and large layers.

    `make` gives a `RowsRunner` where no layer is to be spread.
    """

    def __init__(
        self,
        template: keras.Model,
        devices: Sequence[str],
        *,
        wire_dtype: str | None = None,
        shard: str | None = None,
        model_devices: int = 1,
    ):
        super().__init__(template, devices, wire_dtype=wire_dtype, model_devices=model_devices)
        self._width = model_devices
        self._axes: dict[str, int] = {}

    @classmethod
    def make(
        cls, template: keras.Model, devices: Sequence[str], options: Mapping[str, Any]
    ) -> DataRunner:
        kind = cls if options["model_devices"] > 1 else RowsRunner
        return kind(template, devices, **options)

    @classmethod
    def check(cls, request: Request) -> None:
        super().check(request)
        check_mesh(request, placement_on(request.devices).group is not None)

    @classmethod
    def adapt(cls, request: Request) -> Request:
        return adapt_mesh(super().adapt(request))

    @property
    def spreads_state(self) -> bool:
        return True

    def for_part(self, part: keras.Layer) -> RowsRunner | None:
        return MeshRunner(part, self._devices, model_devices=self._width)

    def lay_out(self) -> None:
        self._axes = find_wide(self._template, self._width)
        in_fresh_thread(lambda: self.spread(None))

    def place_updates(self, optimizer: keras.Optimizer) -> None:
        prepare(optimizer, shard_alike)

    @property
    def placement(self) -> dict[str, tuple[int, ...]]:
        names, parts = names_of(self._template), {}
        for one in self._template.variables:
            share = self._width if names[id(one)] in self._axes else 1
            parts[one.path] = (math.prod(one.shape) // share,) * len(self._devices)
        return parts

    def spread(self, optimizer: Any) -> None:
        if self._axes:
            shard(self._template, self._axes, self.where)
            if optimizer is not None:
                spread_slots(optimizer)

    def kept(self, variables: list[keras.Variable], optimizer: Any) -> set[int]:
        return spread_ids(variables, optimizer)
