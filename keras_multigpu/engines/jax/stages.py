"""Model mode on JAX: one program, whose large weights the compiler spreads over all devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from keras_multigpu.arguments import did_you_mean
from keras_multigpu.engines.jax.joint_placement import placement_on
from keras_multigpu.engines.jax.pure import JaxRunner
from keras_multigpu.engines.jax.state.shards import WideLayers
from keras_multigpu.engines.runners import ModelRunner
from keras_multigpu.engines.templates import forget_losses, is_built
from keras_multigpu.engines.values import Call, Request, Result
from keras_multigpu.engines.wide import SPREAD, check_wide, usable


class ShardsRunner(WideLayers, JaxRunner, ModelRunner):
    """Calls the template as it is, with the weights of large layers spread over the devices."""

    def __init__(
        self,
        template: keras.Model,
        devices: Sequence[str],
        *,
        placement: Mapping[str, int] | str | None = None,
    ):
        assert placement in (None, SPREAD)
        self._template = template
        self._devices = tuple(devices)
        self.where = placement_on(self._devices, spread_rows=False)

    @classmethod
    def check(cls, request: Request) -> None:
        placement = request.options.get("placement")
        if placement not in (None, SPREAD):
            raise ValueError(
                "`placement` must be None or 'spread' on the Keras backend 'jax', which runs one "
                "program on all devices: a layer can't be on one of them, and large layers are "
                f"spread over all. Received: placement={placement!r}."
                f"{did_you_mean(placement, [SPREAD])} Leave it out, or use TensorFlow."
            )
        if is_built(request.template):
            check_wide(request.template, len(request.devices))

    @classmethod
    def adapt(cls, request: Request) -> Request:
        """Uses as many devices as the weights can be spread over."""
        return dataclasses.replace(request, devices=usable(request.template, request.devices))

    def run(self, call: Call) -> Result:
        args, kwargs = self.where.bring(call)
        return Result(self._template(*args, **kwargs))

    def stateless_call(self, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        forget_losses(self._template)
        return self._template.stateless_call(*args, **kwargs)

    @property
    def placement(self) -> dict[str, int]:
        return dict(self._axes)
