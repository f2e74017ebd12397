"""Replicas on TensorFlow: one traced function, called on every device in the graph of the step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.shared import SEED, check_alike, get_mask, set_mask, state_of_none
from keras_multigpu.engines.tensorflow.links import Links
from keras_multigpu.engines.tensorflow.losses import find_sums
from keras_multigpu.engines.tensorflow.names import local_name, short_name
from keras_multigpu.engines.tensorflow.passes import Passes
from keras_multigpu.engines.tensorflow.raw import Raw
from keras_multigpu.engines.tensorflow.sync import batch_normalizations
from keras_multigpu.engines.tensorflow.template import TemplateFunction
from keras_multigpu.engines.tensorflow.tensors import map_tensors, substitute
from keras_multigpu.engines.values import Call, Replicas, Result, Tensor

_serials = itertools.count(1)


class TensorFlowReplicas(Replicas):
    """The call of the template as one function, called once per replica.

    It takes the values of the variables as arguments, so that models which are built alike run
    by it with values of their own.
    """

    def __init__(
        self,
        models: Sequence[keras.Model],
        devices: Sequence[str],
        wire_dtype: str | None,
        synchronized: str,
    ):
        self.models = tuple(models)
        self.template = self.models[0]
        self.devices = tuple(devices)
        self.wire_dtype = wire_dtype
        self.synchronized = synchronized
        self.retrace()

    def retrace(self) -> None:
        self._has_own_weights = any(model is not self.template for model in self.models)
        layers = self._batch_normalizations()
        self._function = TemplateFunction(
            self.template, layers, with_penalties=self._has_own_weights
        )
        self._sums: dict[Any, list[bool]] = {}

    def run(self, calls: Sequence[Call], sizes: Sequence[Any], *, compiled: bool) -> list[Result]:
        if not self._function.layers:
            self._function.layers = self._batch_normalizations()
        compiled = compiled and not self._function.layers  # XLA knows no collective operations
        serial = next(_serials) if self._function.layers else 0
        states = [_unique(model.variables) for model in self.models]
        check_alike(states)
        links = Links(states, self.devices, self.wire_dtype)
        masked = [(call, [get_mask(part) for part in tf.nest.flatten(call)]) for call in calls]
        passes = Passes(self._function, links, masked, sizes, serial, compiled)
        gathered = passes.run()
        if len(self._function.variables) != len(states[0]):
            self.retrace()  # layers were built in this call: now their variables are known
            return self.run(calls, sizes, compiled=compiled)
        return [self._result(raw, gathered, state) for raw, state in zip(list(passes.raws), states)]

    def _batch_normalizations(self) -> list[keras.Layer]:
        """Those that see all the replicas' rows: on devices of this process only."""
        layers = batch_normalizations(self.template, self.synchronized)
        away = [short_name(device) for device in self.devices if local_name(device) is None]
        if layers and away:
            raise ValueError(
                "A `BatchNormalization` that sees the whole batch exchanges its statistics by "
                "TensorFlow's collective operations, which end the servers of other machines. "
                f"Received: the layer {layers[0].name!r} on the device {away[0]!r}. Leave it to "
                "see the rows of its own device: no `sync_batch_norm`, no `synchronized=True`."
            )
        return layers

    def find_sums(self, call: Call, count: int) -> list[bool]:
        if not count or len(self.devices) == 1:
            return [False] * count
        if not tf.executing_eagerly():
            return find_sums(self.template, call, count)
        key = (count, call[1].get("training"))
        if key not in self._sums:
            self._sums[key] = find_sums(self.template, call, count)
        return self._sums[key]

    def _result(
        self, raw: Raw, gathered: Iterator[Tensor], state: Sequence[keras.Variable]
    ) -> Result:
        """One replica's results, the outputs and losses on the first device."""
        outputs, losses = substitute(raw.differentiable, gathered)
        with tf.device(self.devices[0]):
            outputs, masks = map_tensors(tf.identity, (outputs, raw.masks))
        for part, mask in zip(tf.nest.flatten(outputs), masks):
            set_mask(part, mask)
        # The traced function knows the template's variables; the replica has others in their place.
        own = dict(zip(map(id, self._function.variables), state))
        updates = []
        for key, value in raw.updates.items():
            variable = self._function.assigned[key]
            if self._has_own_weights and not self._may_share(variable, own):
                raise state_of_none(variable)
            updates.append((own.get(id(variable), variable), value))
        return Result(outputs, losses, updates, raw.shapes)

    def _may_share(self, variable: keras.Variable, own: dict[int, keras.Variable]) -> bool:
        """Whether it is in its place in all replicas, or replicas may have it in common."""
        in_metrics = any(variable is one for one in self.template.metrics_variables)
        return id(variable) in own or in_metrics or variable.name == SEED


def _unique(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    return list({id(variable): variable for variable in variables}.values())
