"""Towers and stages on TensorFlow: a model's call on a device, with its gradients there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.attributes import set_attributes
from keras_multigpu.engines.building import built_in
from keras_multigpu.engines.shared import SEED, check_alike, state_of_none, unique
from keras_multigpu.engines.tensorflow.results import LocalResult, split_call
from keras_multigpu.engines.tensorflow.running.calls import ReplicaCalls
from keras_multigpu.engines.tensorflow.tensors import (
    floats,
    gradient_order,
    is_watched,
    substitute,
)
from keras_multigpu.engines.tensorflow.tracing.trace import Trace
from keras_multigpu.engines.tensorflow.weights.exchange import Exchange
from keras_multigpu.engines.tensorflow.weights.reading import source
from keras_multigpu.engines.values import Call, Result, Tensor

_MOST_CHECKED = 32  # kinds of eager calls


class Replicas:
    """The template's call as one function, called once per replica.

    It takes the variables' values as arguments, so clones can run it with their own weights.

    Args:
        models: the model whose weights each replica uses; the template first.
        devices: TensorFlow's name of each replica's device.
    """

    def __init__(self, models: Sequence[keras.Model], devices: Sequence[str]):
        self.models = tuple(models)
        self.template = self.models[0]
        self.devices = tuple(devices)
        self._has_own_weights = any(model is not self.template for model in self.models)
        self.retrace()

    def retrace(self) -> None:
        """Forgets what was checked: the template's layers may have changed."""
        self._checked: set[Any] = set()

    def run(self, call: Call, *, compiled: bool = False) -> list[Result]:
        """Calls each replica with the same arguments."""
        if not tf.executing_eagerly():
            trace = self._traced(call, compiled)
            trace.check_gradients()
            return self._run(call, trace)
        self._check_gradients(call)
        trace = self._trace(call, compiled)
        results = self._run(call, trace)
        if len(unique(self.template.variables)) == len(trace.variables):
            return results
        return self.run(call, compiled=compiled)  # this call has built layers

    def _check_gradients(self, call: Call) -> None:
        """Traces eager calls, once for each kind, to look for gradients that would be lost."""
        if not self._order(call):
            return
        weights = unique(self.template.trainable_variables)
        key = _signature(self.template, call), tuple(is_watched(source(v)) for v in weights)
        if key in self._checked:
            return
        if len(self._checked) == _MOST_CHECKED:
            self._checked.clear()
        self._checked.add(key)
        try:
            trace = self._traced(call, compiled=False)
        except Exception:  # anything: code that runs eagerly only can't be looked through
            return
        try:
            trace.check_gradients()
        except ValueError:
            self._checked.discard(key)
            raise

    def _run(self, call: Call, trace: Trace) -> list[Result]:
        states = [unique(model.variables) for model in self.models]
        check_alike(states)
        arguments = [split_call(call)[0]] * len(states)
        calls = ReplicaCalls(trace, Exchange(states, self.devices), arguments)
        gathered = calls.run()
        return [self._result(raw, gathered, state, trace) for raw, state in zip(calls.raws, states)]

    def _trace(self, call: Call, compiled: bool) -> Trace:
        order = self._order(call)
        return Trace(self.template, call, compiled, order, with_penalties=self._has_own_weights)

    def _traced(self, call: Call, compiled: bool) -> Trace:
        trace = self._trace(call, compiled)
        with built_in(tf.init_scope, [self.template]):
            trace.forward  # noqa: B018  may build layers, and so add variables to the state
        is_whole = len(unique(self.template.variables)) == len(trace.variables)
        return trace if is_whole else self._traced(call, compiled)

    def _order(self, call: Call) -> int:
        """The highest derivative, by weights and inputs, that active tapes may take."""
        weights = [source(v) for v in unique(self.template.trainable_variables)]
        return gradient_order([*weights, *floats(split_call(call)[0])])

    def _result(
        self,
        raw: LocalResult,
        gathered: Iterator[Tensor],
        state: Sequence[keras.Variable],
        trace: Trace,
    ) -> Result:
        """One replica's results; outputs and losses are on the first device."""
        outputs, attributes, losses = substitute(raw.differentiable, gathered)
        with tf.device(self.devices[0]):
            outputs, attributes = tf.nest.map_structure(
                tf.identity, (outputs, attributes), expand_composites=True
            )
            whole = trace.activate([set_attributes(*pair) for pair in zip(outputs, attributes)])
        # The traced function assigns the template's variables: map them to the replica's.
        own = dict(zip(map(id, trace.variables), state))
        updates = []
        for key, value in raw.updates.items():
            variable = trace.assigned[key]
            if self._has_own_weights and not self._may_share(variable, own):
                raise state_of_none(variable)
            updates.append((own.get(id(variable), variable), value))
        return Result(whole, losses, updates, trace.is_random)

    def _may_share(self, variable: keras.Variable, own: dict[int, keras.Variable]) -> bool:
        """Whether each replica has its own version of a variable, or all may share it."""
        in_metrics = any(variable is one for one in self.template.metrics_variables)
        return id(variable) in own or in_metrics or variable.name == SEED


def _signature(template: keras.Model, call: Call) -> Any:
    """What a traced call depends on: its structure, its tensors' types, and the layers' flags."""
    (args, kwargs), specs = call, []
    for leaf in tf.nest.flatten(call):
        specs.append(tf.type_spec_from_value(leaf) if tf.is_tensor(leaf) else repr(leaf))
    flags = tuple(layer.trainable for layer in template._flatten_layers())
    return len(args), tuple(sorted(kwargs)), tuple(map(repr, specs)), flags
