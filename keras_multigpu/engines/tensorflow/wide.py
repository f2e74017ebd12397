"""Model mode on TensorFlow: large layers that are spread over all devices (tensor parallelism).

Each device has a part of a kernel. The partitioner computes with the parts where they are, and the
rows of a batch are not split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras

from keras_multigpu.engines.runners import ModelRunner
from keras_multigpu.engines.shared import in_fresh_thread
from keras_multigpu.engines.templates import is_built
from keras_multigpu.engines.tensorflow.names import full_name
from keras_multigpu.engines.tensorflow.partitioned import Partition, Partitioned
from keras_multigpu.engines.tensorflow.weights.divided import division_of
from keras_multigpu.engines.tensorflow.weights.homes import Homes, wide_homes
from keras_multigpu.engines.values import Call, Request, Result
from keras_multigpu.engines.wide import check_wide, names_of


class WideRunner(Partitioned, ModelRunner):
    """Calls the template as it is, with the weights of large layers spread over the devices."""

    def __init__(
        self,
        template: keras.Model,
        devices: Sequence[str],
        *,
        placement: Mapping[str, int] | str | None = None,
    ):
        self.template, self.models = template, (template,)
        self._devices = tuple(map(full_name, devices))
        homes = Homes.on(self._devices, cuts_all=False)
        self.partition = Partition(template, devices, self._devices, None, homes, splits_rows=False)

    @classmethod
    def check(cls, request: Request) -> None:
        if is_built(request.template) and len(request.devices) > 1:
            check_wide(request.template, len(request.devices))

    def lay_out(self) -> None:
        if len(self._devices) > 1:
            check_wide(self.template, len(self._devices))
        self.partition.homes = wide_homes(self.template, [[one] for one in self._devices])
        in_fresh_thread(self._place)

    def run(self, call: Call) -> Result:
        return self.partition.call(call)

    @property
    def placement(self) -> dict[str, int]:
        names = names_of(self.template)
        found = {names[id(one)]: division_of(one) for one in self.template.variables}
        return {name: one.axis for name, one in found.items() if one is not None}
