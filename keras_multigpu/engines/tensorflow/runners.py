"""The runners of data mode and tower mode on TensorFlow."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.engines import templates
from keras_multigpu.engines.attributes import get_attributes
from keras_multigpu.engines.cluster.errors import OF_ONE_PROCESS
from keras_multigpu.engines.optimizers import claim
from keras_multigpu.engines.runners import DataRunner, TowerRunner
from keras_multigpu.engines.shared import check_alike, in_fresh_thread, unique, value_of
from keras_multigpu.engines.templates import all_layers, built_in, forget_losses
from keras_multigpu.engines.tensorflow.acting import acting
from keras_multigpu.engines.tensorflow.checks import check_no_strategy
from keras_multigpu.engines.tensorflow.cluster.processes import (
    batches_of,
    by_process,
    current,
    peers_of,
)
from keras_multigpu.engines.tensorflow.cluster.remote import REMOTE
from keras_multigpu.engines.tensorflow.names import full_name
from keras_multigpu.engines.tensorflow.partitioned import Partition, Partitioned
from keras_multigpu.engines.tensorflow.placed import Placed
from keras_multigpu.engines.tensorflow.scope import ReplicaScope
from keras_multigpu.engines.tensorflow.tensors import tensors_of
from keras_multigpu.engines.tensorflow.weights.homes import (
    Homes,
    elements_of,
    fullest_home,
    tables_by_rows,
    wide_homes,
)
from keras_multigpu.engines.tensorflow.weights.placing import (
    FollowingRunner,
    add_uses,
    clip_by_member,
    place_updates,
)
from keras_multigpu.engines.tensorflow.weights.readings import others_of
from keras_multigpu.engines.values import Call, Request, Result, Tensor
from keras_multigpu.engines.wide import adapt_mesh, check_mesh, check_wide


class PartitionRunner(Partitioned, DataRunner):
    """Partitions whole steps, and calls of the template.

    Attributes:
        partition: what does it.
        peers, batches: of joined processes; `None` if there are none.
    """

    partitions_steps = True

    def __init__(
        self,
        template: keras.Model,
        devices: Sequence[str],
        *,
        wire_dtype: str | None = None,
        shard: str | None = None,
        model_devices: int = 1,
    ):
        self.template, self.models = template, (template,)
        self._names, devices = devices, by_process(devices)
        self.peers = peers_of(devices[::model_devices])  # the first of each group
        self.batches = None if self.peers is None else batches_of(self.peers)
        own = devices
        if self.peers is not None:
            groups = [devices[k:][:model_devices] for k in range(0, len(devices), model_devices)]
            own = [device for k in self.peers.own for device in groups[k]]
        self._devices = list(map(full_name, own))
        self._width = model_devices
        self._is_sharded = shard is not None and len(devices) > 1
        self.device = self._devices[0]
        self._all, self._others, homes = list(map(full_name, devices)), None, None
        if self._is_sharded:
            if self.peers is not None:
                self._others = others_of(current(), self.peers)
            homes = Homes.on(self._all, others=self._others)  # of a mesh `lay_out` chooses others
        self.partition = Partition(
            template, devices, self._devices, wire_dtype, homes, width=model_devices
        )

    def function(
        self, step: Callable[..., Any], jit_compile: bool | None, rows: Any
    ) -> Callable[..., Any]:
        if self.partition.is_one_device:
            return tf.function(step, jit_compile=jit_compile, reduce_retracing=True)
        if self.peers is not None:
            raise ValueError(OF_ONE_PROCESS)
        made = super().function(step, jit_compile, rows)

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            with REMOTE.explained():
                return made(*args, **kwargs)

        return run

    def explain(self) -> str:
        return self.partition.notices.explain()

    @classmethod
    def check(cls, request: Request) -> None:
        peers = peers_of(by_process(request.devices))
        check_mesh(request, () if peers is None else peers.owners)

    @classmethod
    def adapt(cls, request: Request) -> Request:
        return adapt_mesh(request)

    @classmethod
    def fullest(
        cls, template: keras.Model, count: int, shard: str
    ) -> tuple[float, float, Sequence[keras.Variable]]:
        share = fullest_home(template.weights, count)
        return share, share, tables_by_rows(template.weights, count)

    def lay_out(self) -> None:
        if self._width > 1:
            check_wide(self.template, self._width)
            # Without `shard` the first group has all, of each process.
            kept = self._all if self._is_sharded else self._devices[: self._width]
            columns = [kept[number :: self._width] for number in range(self._width)]
            options = {"cuts_all": self._is_sharded, "others": self._others}
            self.partition.homes = wide_homes(self.template, columns, **options)
        in_fresh_thread(self._place)

    @property
    def placement(self) -> dict[str, tuple[int, ...]]:
        if self.partition.homes is None:
            return {}
        names = list(map(full_name, self._names))
        if self.peers is not None and not self._is_sharded:  # each process has all
            firsts = map(self.peers.owners.index, set(self.peers.owners))
            groups = [self._all[k * self._width :][: self._width] for k in firsts]
            own = {name: own for group in groups for name, own in zip(group, self._devices)}
            names = [own.get(name, name) for name in names]
        return {one.path: elements_of(one, names) for one in self.template.weights}

    def run(self, call: Call) -> Result:
        if tf.distribute.has_strategy():
            check_no_strategy(self.template)
        if self.peers is not None:
            self._check_alone(call)
        return self.partition.call(call)

    def _check_alone(self, call: Call) -> None:
        """Refuses gradients of what a process computes alone: a call outside of steps.

        Nobody knows whether the others make the same call.
        """
        group = current()
        if (group is None or not group.is_in_step) and self.partition.order(call):
            raise ValueError(
                "A model over joined processes takes gradients within `fit` and `train_on_batch` "
                f"only, on TensorFlow. Received: a call of {self.template.name!r} under a tape "
                "outside of these. Write a `train_step`, or use devices of one process."
            )


class CommitteeRunner(FollowingRunner, TowerRunner):
    """Calls every model on its device.

    Replicas of one model run on the device of its weights if they run eagerly: the layers that
    Keras compiles take weights of their own device only.
    """

    def __init__(self, models: Sequence[keras.Model], devices: Sequence[str]):
        self.models = tuple(models)
        self._has_one_model = len(set(map(id, models))) == 1
        self.partition = Placed(list(map(full_name, devices)), has_one_home=self._has_one_model)

    @classmethod
    def check(cls, request: Request) -> None:
        templates.warn_of_direct_calls(request.template)

    def run(self, call: Call) -> list[Result]:
        self.partition.warn_if_compiled_around(self.models[0].name)
        results = self._run(call)
        if not (tf.executing_eagerly() and self._has_one_model and results[0].is_random):
            return results
        # Numbers were drawn; only the values tell whether the outputs depend on them.
        first, *others = (result.outputs for result in results)
        are_equal = all(_are_equal(first, other) for other in others)
        return [dataclasses.replace(result, is_random=not are_equal) for result in results]

    def _run(self, call: Call) -> list[Result]:
        counts = [len(model.variables) for model in self.models]
        check_alike([unique(model.variables) for model in self.models])
        with built_in(tf.init_scope, self.models):
            results = [self._call(number, call) for number in range(len(self.models))]
        # A call that builds layers is made again: in its scope, new variables are no variables yet.
        is_built = counts == [len(model.variables) for model in self.models]
        return results if is_built else self._run(call)

    def _call(self, number: int, call: Call) -> Result:
        args, kwargs = call
        model, is_own = self.models[number], not self._has_one_model
        metrics = dict(zip(map(id, self._metrics(model)), self._metrics(self.models[0])))
        values = [(one, value_of(one)) for one in unique(model.variables)]
        values += [(one, value_of(metrics[id(one)])) for one in self._metrics(model)]
        forget_losses(model)
        scope = ReplicaScope(values, number, is_own=is_own)
        with (
            self.partition.places.part(0 if tf.executing_eagerly() and not is_own else number),
            scope,
        ):
            outputs = model(*args, **kwargs)
            penalties = _penalties(model) if is_own else []
            assigned = [(one, scope.new_value(one)) for one in scope.assigned.values()]
        updates = [(metrics.get(id(one), one), value) for one, value in assigned]
        is_random = scope.draws_for(tensors_of(outputs))
        return Result(outputs, [*scope.losses, *penalties], updates, is_random)

    def _metrics(self, model: keras.Model) -> list[keras.Variable]:
        """The variables of the metrics in its layers: the first model's see all replicas."""
        layers = [one for one in all_layers(model) if not isinstance(one, keras.Model)]
        return unique([v for layer in layers for metric in layer.metrics for v in metric.variables])

    def place_updates(self, optimizer: keras.Optimizer, *, apart: bool) -> None:
        if self._has_one_model:
            if len(self.models) > 1:
                add_uses(optimizer, len(self.models))
            return
        place_updates(optimizer)
        if apart:
            clip_by_member(optimizer, self.models)
        else:
            claim(optimizer, ("clips all members", *map(id, self.models)))

    def acting(
        self, number: int, losses: Sequence[Tensor], *, keep: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        return acting(self.models[0], self.models[number], losses, keep=keep)


def _penalties(model: keras.Model) -> list[Any]:
    regularized = [one for one in model.trainable_weights if one.regularizer is not None]
    return [variable.regularizer(variable.value) for variable in regularized]


def _are_equal(first: Any, second: Any) -> bool:
    """Whether the values of two replicas' outputs are equal, and of what Keras attached to them."""
    values = [
        [tensors_of((leaf, get_attributes(leaf))) for leaf in keras.tree.flatten(outputs)]
        for outputs in (first, second)
    ]
    pairs = zip(tf.nest.flatten(values[0]), tf.nest.flatten(values[1]))
    return all(np.array_equal(one, other) for one, other in pairs)
