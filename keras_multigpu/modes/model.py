"""Model mode: the weights of one model on different devices."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import number_of
from keras_multigpu.modes.base import ParallelModel


@keras.saving.register_keras_serializable(package="keras_multigpu")
class ModelParallel(ParallelModel):
    """One model whose layers, with their weights, are on different devices.

    On TensorFlow the graph is cut into stages, each on one device; only the outputs of stages, and
    their gradients, cross between devices. On JAX, of subclassed models, and with
    `placement="spread"`, large layers are spread over all devices: each has a part of the kernel.
    `make_parallel` has the option.
    """

    mode = "model"
    _parallel_names = ("placement", "stages")
    _parallel_hidden = ParallelModel._parallel_hidden | {"stages"}
    _parallel_runner: engines.ModelRunner

    def __init__(
        self,
        template: keras.Model,
        devices: Sequence[str],
        *,
        placement: Mapping[str, int] | str | None = None,
    ):
        if isinstance(placement, Mapping):
            placement = {name: int(number) for name, number in placement.items()}
        options = {"placement": placement}
        super().__init__(template, devices, options)
        self._parallel_run_on(engines.current().model_runner.make(template, devices, options))

    def _parallel_lay_out(self) -> None:
        """Also says that devices get no layer, where that can't be meant."""
        super()._parallel_lay_out()
        placement = self._parallel_options["placement"]
        count, used = len(self.devices), len(self.devices) - self._parallel_idle
        if 0 < used < count and isinstance(placement, Mapping):
            where = "one" if used == 1 else f"{used}"
            warnings.warn(
                f"All layers are on {where} of {count} devices. Received: "
                f"placement={placement!r}. Give some layers another number"
                f"{'' if used == 1 else f', or `n_gpus={used}`'}.",
                stacklevel=6,
            )
        elif 0 < used < count and placement is None:
            warnings.warn(
                f"{count - used} of {count} devices {_get(count - used)} no layer in mode 'model'. "
                f"Received: {self.template.name!r}, whose layers make "
                f"{number_of(used, 'stage')}. Give `n_gpus={used}`, or `mode='data'`; or, "
                "if it has large `Dense`, `EinsumDense`, `Embedding` or attention layers, "
                "`placement='spread'`, which divides them.",
                stacklevel=6,
            )

    @classmethod
    def _parallel_on_fewer(cls, options: Mapping[str, Any]) -> str:
        if options.get("placement") is None or options["placement"] == "spread":
            return "Its weights are divided among these."
        return "The layers of the other devices are on these."

    @classmethod
    def _parallel_adapt(cls, request: engines.Request) -> engines.Request:
        """On fewer devices, layers that follow each other stay on one or on neighbours."""
        placement, count = request.options.get("placement"), len(request.devices)
        if not isinstance(placement, Mapping):
            return request
        used = sorted({*placement.values()})
        if used[-1] < count:
            return request
        most = max(count, len(used))
        fewer = {name: used.index(number) * count // most for name, number in placement.items()}
        return dataclasses.replace(request, options={**request.options, "placement": fewer})

    @property
    def placement(self) -> dict[str, int]:
        """The number of each layer's device, by the layer's name, prefixed with its models' names.

        Of layers that are spread: the axis along which the devices have parts of a weight, by the
        weight's path.
        """
        return self._parallel_runner.placement

    @property
    def stages(self) -> Any:
        """The parts of the graph, each on one device; `None` for layers that are spread."""
        return self._parallel_runner.stages

    @property
    def _parallel_idle(self) -> int:
        """How many devices get no layer, as far as is known."""
        return len(self.devices) - len({*self.placement.values()}) if self.stages else 0

    def _parallel_describe(self) -> str:
        idle = self._parallel_idle
        told = f"; {idle} of them {_get(idle)} no layer" if idle else ""
        return super()._parallel_describe() + told

    def _parallel_least_bytes(self, rows: int) -> int | None:
        """As in all modes: the bytes that the default placement would send."""
        return self._parallel_runner.least_bytes(rows)

    def _parallel_check_change(self, method: str) -> None:
        raise ValueError(
            "The layers of a model are placed once, when it is made parallel. Received: a call of "
            f"`{method}`. Change the template's layers, and make it parallel again."
        )


def _get(devices: int) -> str:
    return "gets" if devices == 1 else "get"
