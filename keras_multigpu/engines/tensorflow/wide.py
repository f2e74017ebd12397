"""Model mode on TensorFlow: large layers that are spread over all devices (tensor parallelism).

Each device has a part of a kernel. The partitioner computes with the parts where they are, and the
rows of a batch are not split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from keras_multigpu.engines.runners import ModelRunner
from keras_multigpu.engines.shared import in_fresh_thread
from keras_multigpu.engines.tensorflow.names import full_name
from keras_multigpu.engines.tensorflow.partitioned import Partition
from keras_multigpu.engines.tensorflow.weights.divided import division_of
from keras_multigpu.engines.tensorflow.weights.homes import Homes, wide_homes
from keras_multigpu.engines.tensorflow.weights.placing import (
    drop_functions,
    following,
    leave_to_one_device,
)
from keras_multigpu.engines.values import Call, Request, Result
from keras_multigpu.engines.wide import check_wide, names_of


class WideRunner(ModelRunner):
    """Calls the template as it is, with the weights of large layers spread over the devices."""

    def __init__(
        self,
        template: keras.Model,
        devices: Sequence[str],
        *,
        placement: Mapping[str, int] | str | None = None,
    ):
        self._template = template
        self._devices = tuple(map(full_name, devices))
        self.partition = Partition(
            template, devices, self._devices, None, Homes(self._devices, {}), splits_rows=False
        )

    @classmethod
    def check(cls, request: Request) -> None:
        if request.template.built and len(request.devices) > 1:
            check_wide(request.template, len(request.devices))

    def lay_out(self) -> None:
        if len(self._devices) > 1:
            check_wide(self._template, len(self._devices))
        self.partition.homes = wide_homes(self._template, self._devices)
        in_fresh_thread(self._place)

    def _place(self) -> None:
        assert self.partition.homes is not None
        if self.partition.homes.lay_out(self._template.variables):
            drop_functions(self._template)

    def place(self) -> None:
        self._place()
        leave_to_one_device(self._template)

    def place_updates(self, optimizer: keras.Optimizer) -> None:
        if isinstance(optimizer, keras.Optimizer):  # not in every `compile` of a user's
            assert self.partition.homes is not None
            self.partition.homes.lay_out(optimizer.variables)

    def run(self, call: Call) -> Result:
        return self.partition.call(call)

    def function(
        self, step: Callable[..., Any], jit_compile: bool | None, rows: Any
    ) -> Callable[..., Any]:
        return following(
            lambda: self.partition.function(step, jit_compile, rows), step, [self._template]
        )

    @property
    def placement(self) -> dict[str, int]:
        names = names_of(self._template)
        found = {names[id(one)]: division_of(one) for one in self._template.variables}
        return {name: one.axis for name, one in found.items() if one is not None}

    @property
    def stages(self) -> None:
        return None

    def least_bytes(self, rows: int) -> int | None:
        return None  # what crosses depends on the order of the layers' axes

    def retrace(self) -> None:
        """Steps are traced anew whenever Keras makes a step function."""
