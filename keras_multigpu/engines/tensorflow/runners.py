"""The runners of data mode and tower mode on TensorFlow."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.engines import templates
from keras_multigpu.engines.attributes import get_attributes
from keras_multigpu.engines.optimizers import claim
from keras_multigpu.engines.runners import DataRunner, TowerRunner
from keras_multigpu.engines.shared import in_fresh_thread, split_tensors
from keras_multigpu.engines.tensorflow.cluster.processes import batches_of, current, peers_of
from keras_multigpu.engines.tensorflow.names import full_name, is_default, local_name
from keras_multigpu.engines.tensorflow.partitioned import Partition
from keras_multigpu.engines.tensorflow.replicas import Replicas
from keras_multigpu.engines.tensorflow.results import tensors_of
from keras_multigpu.engines.tensorflow.weights.following import follow_gradients
from keras_multigpu.engines.tensorflow.weights.homes import Homes, fullest_home, tables_by_rows
from keras_multigpu.engines.tensorflow.weights.placing import clip_by_member, place_updates
from keras_multigpu.engines.values import Call, Kept, Plan, Request, Result, Tensor

# The graph of a trace that is never run. Functions that it calls are traced in other graphs, and
# kept: in them batches are sliced.
_whole: contextvars.ContextVar[Any] = contextvars.ContextVar("_whole", default=None)


@contextlib.contextmanager
def running_whole() -> Iterator[None]:
    """Scope, within a trace that is never run, in which it slices no batch."""
    token = _whole.set(tf.compat.v1.get_default_graph())
    try:
        yield
    finally:
        _whole.reset(token)


class SliceRunner(DataRunner):
    """Partitions whole steps, or slices calls: see `partition`.

    Each slice runs on a replica, and a call that can't be sliced on the first device.

    Attributes:
        partition: what partitions steps; `None` where calls are sliced.
        peers, batches: of joined processes; `None` if there are none.
        is_one_device: whether nothing has to be done.
    """

    def __init__(
        self,
        template: keras.Model,
        devices: Sequence[str],
        *,
        wire_dtype: str | None = None,
        sync_batch_norm: bool = True,
        shard: str | None = None,
    ):
        self.template = template
        self._homes = Homes(devices) if shard is not None else None
        self._is_part = False
        self._noted: tuple[Any, str | None] = (None, None)  # an input, and why its rows are fixed
        self._options: dict[str, Any] = {
            "wire_dtype": wire_dtype,
            "sync_batch_norm": sync_batch_norm,
        }
        self.is_one_device = len(devices) == 1 and is_default(devices[0])
        self._names = list(devices)
        self.peers = peers_of(devices)
        self.batches = None if self.peers is None else batches_of(self.peers)
        self.partition: Partition | None = None
        if _is_partitioned(devices, {"shard": shard, "sync_batch_norm": sync_batch_norm}):
            self.partition = Partition(template, devices, wire_dtype)
        own = devices if self.peers is None else self.peers.pick(devices)
        self._devices = list(map(full_name, own))
        self._replicas = Replicas(
            [template] * len(own),
            self._devices,
            wire_dtype,
            "all" if sync_batch_norm else "marked",
            self.peers,
        )

    @property
    def partitions_steps(self) -> bool:  # type: ignore[override]
        """Whether Keras's steps are partitioned whole, and not only calls."""
        return self.partition is not None

    def function(
        self, step: Callable[..., Any], jit_compile: bool | None, rows: Any
    ) -> Callable[..., Any]:
        if self.is_one_device:
            return tf.function(step, jit_compile=jit_compile, reduce_retracing=True)
        if self.partition is None:
            have = "joined processes" if self.peers is not None else "devices of other machines"
            have = "`shard`" if self._homes is not None else have
            if not self._options["sync_batch_norm"]:
                have = "`sync_batch_norm=False`"
            raise ValueError(
                "On TensorFlow `parallel.function` needs whole weights, on devices of this "
                f"process. Received: a model with {have}. Write a `train_step` and call `fit`, or "
                "make the model parallel without it."
            )
        return self.partition.function(step, jit_compile, rows)

    def explain(self) -> str:
        if self.partition is None:
            return "Here calls of the model are sliced: a warning says what runs on one device."
        return self.partition.explain()

    @classmethod
    def check(cls, request: Request) -> None:
        is_partitioned = _is_partitioned(request.devices, request.options)
        if not is_partitioned and len(request.devices) > 1:
            templates.check_stateless(request.template)
            templates.check_any_batch_size(request.template)
        if peers_of(request.devices):
            request.check_alone("shard")

    @classmethod
    def adapt(cls, request: Request) -> Request:
        return request.alone("shard") if peers_of(request.devices) else request

    @classmethod
    def moves_weights(cls, devices: Sequence[str], options: Mapping[str, Any]) -> bool:
        return super().moves_weights(devices, options) and not peers_of(devices)

    @classmethod
    def fullest(cls, template: keras.Model, count: int, shard: str) -> Kept:
        share = fullest_home(template.weights, count)
        return Kept(share, share, tables_by_rows(template.weights, count))

    def lay_out(self) -> None:
        homes = self._homes
        if homes is not None:
            in_fresh_thread(lambda: homes.put(self.template))

    def place(self) -> None:
        if self._homes is not None:
            self._homes.put(self.template)
            if len(self._devices) > 1:
                # XLA compiles for one device, and finds no weights on others.
                self.template.jit_compile = False

    def place_updates(self, optimizer: keras.Optimizer) -> None:
        if self._homes is not None:
            place_updates(optimizer)
            follow_gradients(optimizer)

    @property
    def placement(self) -> dict[str, tuple[int, ...]]:
        return {} if self._homes is None else self._homes.placement

    def plan(self, call: Call, *, compiled: bool) -> Plan:
        tensors, _ = split_tensors(call, keras.ops.is_tensor)
        has_rows = any(len(tensor.shape) for tensor in tensors)
        is_never_run = _whole.get() is tf.compat.v1.get_default_graph()
        is_whole = self.partitions_steps or self.is_one_device or is_never_run
        if is_whole or not has_rows or self._is_alone(call):
            return Plan(is_whole=True)
        obstacle = self._obstacle_of_part(tensors) if self._is_part else None
        if obstacle:
            return Plan(is_whole=True, obstacle=obstacle)
        plan = self._replicas.plan(call, compiled=compiled)
        obstacle = plan.obstacle or _other_rows(tensors)
        return Plan(is_whole=True, obstacle=obstacle) if obstacle else plan

    def run(self, calls: Sequence[Call], sizes: Sequence[Any], plan: Plan) -> list[Result]:
        if not plan.is_whole:
            return self._replicas.run(calls, sizes, plan=plan)
        if plan.obstacle and self.peers is not None:
            raise ValueError(
                "Over joined processes every call must be sliced, on TensorFlow. Received: "
                f"{self.template.name!r}, which would run whole: {plan.obstacle}. Use devices of "
                "one process, or change what prevents slicing."
            )
        ((args, kwargs),) = calls
        if self.partition is not None:
            return [self.partition.call(calls[0])]
        first = tf.device(self._devices[0]) if plan.obstacle else contextlib.nullcontext()
        with first:
            return [Result(self.template(*args, **kwargs))]

    def _is_alone(self, call: Call) -> bool:
        """Whether a call of a model over joined processes is not made by all of them together.

        What a process calls outside `fit` and the like it computes alone: nobody knows whether the
        others make the same call.
        """
        group = current()
        if self.peers is None or (group is not None and group.is_in_step):
            return False
        if self._replicas.order(call):
            raise ValueError(
                "A model over joined processes takes gradients within `fit` and `train_on_batch` "
                f"only, on TensorFlow. Received: a call of {self.template.name!r} under a tape "
                "outside of these. Write a `train_step`, or use devices of one process."
            )
        return True

    def for_part(self, part: keras.Layer) -> SliceRunner | None:
        if self.is_one_device or self.partitions_steps:
            return None
        runner = SliceRunner(part, self._names, **self._options)
        runner._is_part, runner.partition = True, None
        return runner

    def retrace(self) -> None:
        self._replicas.retrace()

    def _obstacle_of_part(self, tensors: Sequence[Tensor]) -> str | None:
        """Why the arguments of a part can't be sliced, or `None`.

        A step calls parts with what it likes, also with tensors that are the same for all rows.
        """
        noted = templates.input_of_noted_rows(self.template)
        if noted is not self._noted[0]:
            self._noted = noted, templates.fixed_rows(self.template)
        if self._noted[1] is not None:
            return self._noted[1]
        counts = {tensor.shape[0] for tensor in tensors if len(tensor.shape)}
        if None in counts and len(counts) > 1:
            known = ", ".join(map(str, sorted(counts - {None})))
            return (
                f"one of its arguments has {known} rows, and another has a number that is known "
                "in the step only"
            )
        return _other_rows(tensors)


class CommitteeRunner(TowerRunner):
    """Runs the template's traced call once per model, with that model's weights."""

    def __init__(self, models: Sequence[keras.Model], devices: Sequence[str]):
        self._models = tuple(models)
        self._replicas = Replicas(models, list(map(full_name, devices)))

    @classmethod
    def check(cls, request: Request) -> None:
        templates.warn_of_direct_calls(request.template)

    def run(self, call: Call, *, compiled: bool) -> list[Result]:
        count = len(self._models)
        results = self._replicas.run([call] * count, [1] * count, compiled=compiled)
        has_one_model = len({id(model) for model in self._models}) == 1
        if not (tf.executing_eagerly() and has_one_model and results[0].is_random):
            return results
        # Numbers were drawn; only the values tell whether the outputs depend on them.
        first, *others = (result.outputs for result in results)
        are_equal = all(_are_equal(first, other) for other in others)
        return [dataclasses.replace(result, is_random=not are_equal) for result in results]

    def place_updates(self, optimizer: keras.Optimizer, *, apart: bool) -> None:
        place_updates(optimizer)
        if apart:
            clip_by_member(optimizer, self._models)
        else:
            claim(optimizer, ("clips all members", *map(id, self._models)))

    def retrace(self) -> None:
        self._replicas.retrace()


def _is_partitioned(devices: Sequence[str], options: Mapping[str, Any]) -> bool:
    """Whether whole steps are partitioned: on devices of this process, with whole weights."""
    are_here = all(local_name(one) is not None for one in devices) and not peers_of(devices)
    return are_here and not options.get("shard") and options.get("sync_batch_norm", True)


def _other_rows(tensors: Sequence[Tensor]) -> str | None:
    """Why arguments can't be sliced together (known row counts differ), or `None`."""
    counts = {tensor.shape[0] for tensor in tensors if len(tensor.shape)} - {None}
    if len(counts) < 2:
        return None
    return f"its arguments have different numbers of rows, {', '.join(map(str, sorted(counts)))}"


def _are_equal(first: Any, second: Any) -> bool:
    """Whether the values of two replicas' outputs are equal, and of what Keras attached to them."""
    values = [
        [tensors_of((leaf, get_attributes(leaf))) for leaf in keras.tree.flatten(outputs)]
        for outputs in (first, second)
    ]
    pairs = zip(tf.nest.flatten(values[0]), tf.nest.flatten(values[1]))
    return all(np.array_equal(one, other) for one, other in pairs)
