"""Replicas on TensorFlow: one traced function, called on every device in the step's graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.attributes import set_attributes
from keras_multigpu.engines.building import built_in
from keras_multigpu.engines.shared import SEED, check_alike, state_of_none, unique
from keras_multigpu.engines.structures import OpaqueError
from keras_multigpu.engines.tensorflow.cluster.peers import Peers
from keras_multigpu.engines.tensorflow.probing.planning import make_plan, signature, with_trace
from keras_multigpu.engines.tensorflow.results import LocalResult, split_call
from keras_multigpu.engines.tensorflow.running.calls import ReplicaCalls
from keras_multigpu.engines.tensorflow.tensors import (
    floats,
    gradient_order,
    is_watched,
    message_of,
    substitute,
)
from keras_multigpu.engines.tensorflow.tracing.scope import HiddenStateError
from keras_multigpu.engines.tensorflow.tracing.sync import batch_normalizations
from keras_multigpu.engines.tensorflow.tracing.trace import NotTracedError, Trace
from keras_multigpu.engines.tensorflow.weights.exchange import Exchange
from keras_multigpu.engines.tensorflow.weights.reading import source
from keras_multigpu.engines.tensorflow.weights.sums import LIKE
from keras_multigpu.engines.values import Call, Plan, Result, Tensor

_MOST_PLANS = 32  # of eager calls


class Replicas:
    """The template's call as one function, called once per replica.

    It takes the variables' values as arguments, so clones can run it with their own weights.

    Args:
        models: the model whose weights each replica uses; the template first.
        devices: TensorFlow's name of each replica's device.
        wire_dtype: the type in which trainable weights and their gradients are sent.
        synchronized: which `BatchNormalization` layers see the whole batch: `"none"`,
            `"marked"` (those with `synchronized=True`) or `"all"`.
        peers: joined processes with more replicas of the template; `None` if there are none.
    """

    def __init__(
        self,
        models: Sequence[keras.Model],
        devices: Sequence[str],
        wire_dtype: str | None = None,
        synchronized: str = "none",
        peers: Peers | None = None,
    ):
        self.models = tuple(models)
        self.template = self.models[0]
        self.devices = tuple(devices)
        self.wire_dtype = wire_dtype
        self.synchronized = synchronized
        self.peers = peers
        self._has_own_weights = any(model is not self.template for model in self.models)
        self.retrace()

    def retrace(self) -> None:
        """Drops the plans: the template's layers may have changed."""
        self._plans: dict[Any, tuple[Plan, dict[int, str]]] = {}
        self._checked: set[Any] = set()

    def plan(self, call: Call, *, compiled: bool) -> Plan:
        """Decides whether the batch of a call can be sliced, and how the results are merged."""
        if not tf.executing_eagerly():
            return self._plan(call, compiled)
        # Plans made without a tape have no gradient rules.
        key = signature(self.template, call), self.order(call) > 0
        if key not in self._plans:
            try:
                plan = self._plan(call, compiled)
            except Exception as error:  # anything: the code may run eagerly only
                plan = Plan(obstacle=f"it can't be traced ({message_of(error)})")
            rules = plan.trace.gradient_rules if plan.trace else {}
            if len(self._plans) == _MOST_PLANS:
                self._plans.pop(next(iter(self._plans)))
            # Without the trace, which has the call's arguments.
            self._plans[key] = dataclasses.replace(plan, trace=None, finish=Plan().finish), rules
        plan, rules = self._plans[key]
        trace = self._trace(call, compiled)
        trace.gradient_rules = rules
        return with_trace(plan, trace)

    def _plan(self, call: Call, compiled: bool) -> Plan:
        try:
            trace = self._trace(call, compiled)
            if trace.layers or not tf.executing_eagerly():
                trace = self._traced(call, compiled)
            return make_plan(trace)
        except (HiddenStateError, OpaqueError) as error:
            return Plan(obstacle=message_of(error))

    def run(
        self,
        calls: Sequence[Call],
        sizes: Sequence[Any],
        *,
        compiled: bool = False,
        plan: Plan | None = None,
    ) -> list[Result]:
        """Calls each replica: with a `plan` on a slice of one batch, else on a whole batch."""
        if not tf.executing_eagerly():
            trace = plan.trace if plan else self._traced(calls[0], compiled, for_slices=False)
            if plan is None:
                trace.check_gradients()
            return self._run(calls, sizes, trace, is_slice=plan is not None)
        if plan is None:
            self._check_gradients(calls[0])
        try:
            return self._run_eagerly(calls, sizes, plan, self._trace(calls[0], compiled))
        except NotTracedError:
            return self._run_eagerly(calls, sizes, plan, self._traced(calls[0], compiled))

    def _check_gradients(self, call: Call) -> None:
        """Traces eager calls, once for each kind, to look for gradients that would be lost."""
        if not self.order(call):
            return
        weights = unique(self.template.trainable_variables)
        key = signature(self.template, call), tuple(is_watched(source(v)) for v in weights)
        if key in self._checked:
            return
        if len(self._checked) == _MOST_PLANS:
            self._checked.clear()
        self._checked.add(key)
        try:
            trace = self._traced(call, compiled=False, for_slices=False)
        except Exception:  # anything: code that runs eagerly only can't be looked through
            return
        try:
            trace.check_gradients()
        except ValueError:
            self._checked.discard(key)
            raise

    def _run_eagerly(
        self, calls: Sequence[Call], sizes: Sequence[Any], plan: Plan | None, trace: Trace
    ) -> list[Result]:
        """Runs replicas by a trace of this call's own, since layers may have changed."""
        if plan:
            trace.gradient_rules = plan.trace.gradient_rules
            plan.trace = trace
        results = self._run(calls, sizes, trace, is_slice=plan is not None)
        if len(unique(self.template.variables)) == len(trace.variables):
            return results
        # This call has built layers, so run again with their variables.
        return self.run(calls, sizes, compiled=trace.compiled, plan=plan)

    def _run(
        self, calls: Sequence[Call], sizes: Sequence[Any], trace: Trace, is_slice: bool
    ) -> list[Result]:
        states = [unique(model.variables) for model in self.models]
        check_alike(states)
        rows = None if is_slice else LIKE
        exchange = Exchange(
            states,
            self.devices,
            self.wire_dtype,
            trace.gradient_rules,
            rows,
            self.peers,
            trace.tables.unsent,
        )
        arguments = [split_call(call)[0] for call in calls]
        replica_calls = ReplicaCalls(trace, exchange, arguments, sizes)
        gathered = replica_calls.run()
        raws = list(replica_calls.raws)
        if self.peers is not None:
            states = states[:1] * len(raws)  # all replicas are the template
        return [
            self._result(raw, gathered, state, trace, is_slice) for raw, state in zip(raws, states)
        ]

    def _trace(self, call: Call, compiled: bool, for_slices: bool = True) -> Trace:
        exact, apart = batch_normalizations(self.template, self.synchronized)
        return Trace(
            self.template,
            call,
            exact if len(self.devices) > 1 or self.peers else (),
            apart,
            compiled,
            self.order(call),
            with_penalties=self._has_own_weights,
            for_slices=for_slices,
            with_tables=for_slices and self.peers is None and not tf.executing_eagerly(),
        )

    def _traced(self, call: Call, compiled: bool, for_slices: bool = True) -> Trace:
        trace = self._trace(call, compiled, for_slices)
        with built_in(tf.init_scope, [self.template]):
            trace.forward  # noqa: B018  may build layers, and so add variables to the state
        is_whole = len(unique(self.template.variables)) == len(trace.variables)
        return trace if is_whole else self._traced(call, compiled, for_slices)

    def order(self, call: Call) -> int:
        """The highest derivative, by weights and inputs, that active tapes may take."""
        weights = [source(v) for v in unique(self.template.trainable_variables)]
        return gradient_order([*weights, *floats(split_call(call)[0])])

    def _result(
        self,
        raw: LocalResult,
        gathered: Iterator[Tensor],
        state: Sequence[keras.Variable],
        trace: Trace,
        is_slice: bool,
    ) -> Result:
        """One replica's results; outputs and losses are on the first device."""
        outputs, attributes, losses = substitute(raw.differentiable, gathered)
        with tf.device(self.devices[0]):
            outputs, attributes = tf.nest.map_structure(
                tf.identity, (outputs, attributes), expand_composites=True
            )
            tensors = [set_attributes(*pair) for pair in zip(outputs, attributes)]
            whole = trace.rebuild(tensors) if is_slice else trace.activate(tensors)
        # The traced function assigns the template's variables: map them to the replica's.
        own = dict(zip(map(id, trace.variables), state))
        updates = []
        for key, value in raw.updates.items():
            variable = trace.assigned[key]
            if self._has_own_weights and not self._may_share(variable, own):
                raise state_of_none(variable)
            updates.append((own.get(id(variable), variable), value))
        return Result(whole, losses, updates, is_slice or trace.is_random)

    def _may_share(self, variable: keras.Variable, own: dict[int, keras.Variable]) -> bool:
        """Whether each replica has its own version of a variable, or all may share it."""
        in_metrics = any(variable is one for one in self.template.metrics_variables)
        return id(variable) in own or in_metrics or variable.name == SEED
