"""Data mode on a mesh of devices on JAX: rows over one axis, large layers over the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_multigpu.engines.jax.placement import placement_on
from keras_multigpu.engines.jax.runners import RowsRunner
from keras_multigpu.engines.jax.state.shards import WideLayers
from keras_multigpu.engines.runners import DataRunner
from keras_multigpu.engines.values import Request
from keras_multigpu.engines.wide import adapt_mesh, check_mesh, names_of


class MeshRunner(WideLayers, RowsRunner):
    """Calls the template on the whole batch; the compiler spreads rows, and large layers.

    `make` gives a `RowsRunner` where no layer is to be spread.
    """

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

    def for_part(self, part: keras.Layer) -> RowsRunner | None:
        return MeshRunner(part, self._devices, model_devices=self.where.width)

    @property
    def placement(self) -> dict[str, tuple[int, ...]]:
        names, parts = names_of(self._template), {}
        for one in self._template.variables:
            share = self.where.width if names[id(one)] in self._axes else 1
            parts[one.path] = (math.prod(one.shape) // share,) * len(self._devices)
        return parts
