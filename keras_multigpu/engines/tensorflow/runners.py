"""The runners of data mode and tower mode on TensorFlow."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
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
from keras_multigpu.engines.shared import in_fresh_thread
from keras_multigpu.engines.tensorflow.acting import acting
from keras_multigpu.engines.tensorflow.cluster.processes import batches_of, current, peers_of
from keras_multigpu.engines.tensorflow.cluster.remote import REMOTE
from keras_multigpu.engines.tensorflow.names import full_name, is_default
from keras_multigpu.engines.tensorflow.partitioned import Partition
from keras_multigpu.engines.tensorflow.placed import Placed, Replicas
from keras_multigpu.engines.tensorflow.tensors import tensors_of
from keras_multigpu.engines.tensorflow.weights.homes import (
    Homes,
    elements_of,
    fullest_home,
    make_whole,
    tables_by_rows,
    wide_homes,
)
from keras_multigpu.engines.tensorflow.weights.placing import (
    add_uses,
    clip_by_member,
    drop_functions,
    following,
    leave_to_one_device,
    place_updates,
)
from keras_multigpu.engines.values import Call, Request, Result, Tensor
from keras_multigpu.engines.wide import adapt_mesh, check_mesh, check_wide

_EACH_HAS_ALL = (
    "each of several processes has all weights, in parts on its own devices: all have the same "
    "number of devices, two or more."
)


def _have_all_parts(devices: Sequence[str]) -> bool:
    """Whether the devices of each process can have all weights, divided alike."""
    peers = peers_of(devices)
    if peers is None:
        return True
    counts = {peers.owners.count(one) for one in peers.owners}
    return len(counts) == 1 and counts != {1}


class PartitionRunner(DataRunner):
    """Partitions whole steps, and calls of the template.

    Attributes:
        partition: what does it.
        peers, batches: of joined processes; `None` if there are none.
        is_one_device: whether nothing has to be done.
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
        self.template = template
        self.is_one_device = len(devices) == 1 and is_default(devices[0])
        self.peers = peers_of(devices)
        self.batches = None if self.peers is None else batches_of(self.peers)
        own = devices if self.peers is None else self.peers.pick(devices)
        self._devices = list(map(full_name, own))
        self._width = model_devices
        is_sharded = shard is not None and len(own) > 1
        self._homes = Homes(tuple(self._devices)) if is_sharded else None
        self.partition = Partition(
            template, devices, self._devices, wire_dtype, self._homes, width=model_devices
        )

    def function(
        self, step: Callable[..., Any], jit_compile: bool | None, rows: Any
    ) -> Callable[..., Any]:
        if self.is_one_device:
            return tf.function(step, jit_compile=jit_compile, reduce_retracing=True)
        if self.peers is not None:
            raise ValueError(OF_ONE_PROCESS)
        made = following(
            lambda: self.partition.function(step, jit_compile, rows), step, [self.template]
        )

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            with REMOTE.explained():
                return made(*args, **kwargs)

        return run

    def explain(self) -> str:
        return self.partition.explain()

    @classmethod
    def check(cls, request: Request) -> None:
        check_mesh(request, peers_of(request.devices) is not None)
        if request.options.get("shard") and not _have_all_parts(request.devices):
            raise ValueError(
                f"With `shard`, {_EACH_HAS_ALL} Received: shard={request.options['shard']!r} and "
                f"devices={list(request.devices)!r}. Leave `shard` out, or give each process the "
                "same number of devices."
            )

    @classmethod
    def adapt(cls, request: Request) -> Request:
        request, shard = adapt_mesh(request), request.options.get("shard")
        if not shard or _have_all_parts(request.devices):
            return request
        warnings.warn(
            f"The model was saved with shard={shard!r}, and is loaded without: with it, "
            f"{_EACH_HAS_ALL} Received: devices={list(request.devices)!r}.",
            stacklevel=3,
        )
        return dataclasses.replace(request, options={**request.options, "shard": None})

    @classmethod
    def fullest(
        cls, template: keras.Model, count: int, shard: str
    ) -> tuple[float, float, Sequence[keras.Variable]]:
        share = fullest_home(template.weights, count)
        return share, share, tables_by_rows(template.weights, count)

    def lay_out(self) -> None:
        if self._width > 1:
            check_wide(self.template, self._width)
            self._homes = wide_homes(self.template, self._devices[: self._width])
            self.partition.homes = self._homes
        in_fresh_thread(self._place)

    def _place(self) -> None:
        if self._lay_out(self.template.weights):
            drop_functions(self.template)  # the parallel models' are dropped by their steps

    def place(self) -> None:
        self._place()
        leave_to_one_device(self.template)

    def place_updates(self, optimizer: keras.Optimizer) -> None:
        if isinstance(optimizer, keras.Optimizer):  # not in every `compile` of a user's
            self._lay_out(optimizer.variables)

    def _lay_out(self, variables: Sequence[keras.Variable]) -> bool:
        if self._homes is not None:
            return self._homes.lay_out(variables)
        return make_whole(variables, self._devices[0])

    @property
    def placement(self) -> dict[str, tuple[int, ...]]:
        if self._homes is None:
            return {}
        count = len(self._devices)
        return {one.path: elements_of(one, count) for one in self.template.weights}

    def call(self, call: Call) -> Result:
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

    def retrace(self) -> None:
        """Steps are traced anew whenever Keras makes a step function."""


class CommitteeRunner(TowerRunner):
    """Calls every model on its device."""

    def __init__(self, models: Sequence[keras.Model], devices: Sequence[str]):
        self._models = tuple(models)
        has_one_model = len(set(map(id, models))) == 1
        self.partition = Placed(list(map(full_name, devices)), has_one_home=has_one_model)
        self._replicas = Replicas(models, self.partition.places)

    @classmethod
    def check(cls, request: Request) -> None:
        templates.warn_of_direct_calls(request.template)

    def run(self, call: Call) -> list[Result]:
        results = self._replicas.run(call)
        has_one_model = len({id(model) for model in self._models}) == 1
        if not (tf.executing_eagerly() and has_one_model and results[0].is_random):
            return results
        # Numbers were drawn; only the values tell whether the outputs depend on them.
        first, *others = (result.outputs for result in results)
        are_equal = all(_are_equal(first, other) for other in others)
        return [dataclasses.replace(result, is_random=not are_equal) for result in results]

    def function(
        self, step: Callable[..., Any], jit_compile: bool | None, rows: Any
    ) -> Callable[..., Any]:
        return following(
            lambda: self.partition.function(step, bool(jit_compile)), step, self._models
        )

    def place_updates(self, optimizer: keras.Optimizer, *, apart: bool) -> None:
        if not self._replicas.have_own_weights:
            if len(self._models) > 1:
                add_uses(optimizer, len(self._models))
            return
        place_updates(optimizer)
        if apart:
            clip_by_member(optimizer, self._models)
        else:
            claim(optimizer, ("clips all members", *map(id, self._models)))

    def acting(
        self, number: int, losses: Sequence[Tensor], *, keep: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        return acting(self._models[0], self._models[number], losses, keep=keep)

    def retrace(self) -> None:
        """Steps are traced anew whenever Keras makes a step function."""


def _are_equal(first: Any, second: Any) -> bool:
    """Whether the values of two replicas' outputs are equal, and of what Keras attached to them."""
    values = [
        [tensors_of((leaf, get_attributes(leaf))) for leaf in keras.tree.flatten(outputs)]
        for outputs in (first, second)
    ]
    pairs = zip(tf.nest.flatten(values[0]), tf.nest.flatten(values[1]))
    return all(np.array_equal(one, other) for one, other in pairs)
