"""The TensorFlow engine: devices, tensors and the modes' runners."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.base import Engine
from keras_multigpu.engines.runners import TrainedModel
from keras_multigpu.engines.shared import (
    batches_as_in_fit,
    in_fresh_thread,
    split_tensors,
    unchanged,
)
from keras_multigpu.engines.templates import built_in
from keras_multigpu.engines.tensorflow import names
from keras_multigpu.engines.tensorflow.checks import check_no_strategy
from keras_multigpu.engines.tensorflow.cluster import processes
from keras_multigpu.engines.tensorflow.cluster.remote import REMOTE
from keras_multigpu.engines.tensorflow.counting.memory import find_memory
from keras_multigpu.engines.tensorflow.counting.transfers import count_transfers
from keras_multigpu.engines.tensorflow.joint_steps import steps_of
from keras_multigpu.engines.tensorflow.names import full_name, local_name, remote_name
from keras_multigpu.engines.tensorflow.runners import CommitteeRunner, PartitionRunner
from keras_multigpu.engines.tensorflow.stages import StageRunner
from keras_multigpu.engines.tensorflow.tensors import for_any_rows, join_rows, take_rows
from keras_multigpu.engines.tensorflow.weights.divided import division_of
from keras_multigpu.engines.tensorflow.weights.lookups import look_up
from keras_multigpu.engines.tensorflow.weights.placing import move_variables
from keras_multigpu.engines.tensorflow.weights.rows import sum_rows
from keras_multigpu.engines.values import Call, Holding, Request, Tensor, Transfer


class TensorFlowEngine(Engine):
    """The engine for Keras on TensorFlow."""

    name = "tensorflow"
    title = "TensorFlow"
    partitions = False
    shares_memory = True
    remote = REMOTE
    processes = processes.PROCESSES
    data_runner = PartitionRunner
    tower_runner = CommitteeRunner
    model_runner = StageRunner
    steps = staticmethod(steps_of)

    def list_devices(self, kind: str) -> tuple[str, ...]:
        return names.list_devices(kind)

    def find_device(self, name: str) -> str | None:
        local = local_name(name)
        if local is not None:
            return local if local in self.list_devices(local.partition(":")[0]) else None
        remote = remote_name(name)
        return remote if remote in self.remote.list_devices() else None

    def name_of(self, device: Any) -> str | None:
        if isinstance(device, tf.config.PhysicalDevice):
            return names.name_of(device)
        if isinstance(device, tf.DeviceSpec):
            return local_name(device.to_string())
        return local_name(device.name) if isinstance(device, tf.config.LogicalDevice) else None

    def parts_of(self, thing: Any) -> tuple[str, ...]:
        if isinstance(thing, tf.config.PhysicalDevice):
            return names.parts_of(thing)
        if isinstance(thing, tf.DeviceSpec):
            kind = (thing.device_type or "").lower()
            is_whole = kind in ("cpu", "gpu") and thing.device_index is None
            return self.list_devices(kind) if is_whole else ()
        if not isinstance(thing, tf.distribute.Strategy):
            return ()
        if not tf.distribute.has_strategy() and thing is tf.distribute.get_strategy():
            return ()  # the one that stands for none
        found = [self.find_device(name) for name in getattr(thing.extended, "worker_devices", ())]
        return tuple(filter(None, found)) if None not in found else ()

    @property
    def no_gpu_support(self) -> str:
        if tf.test.is_built_with_gpu_support():
            return ""
        return (
            f"TensorFlow {tf.__version__} is built without CUDA: install the extra `tensorflow` "
            "in place of `tensorflow-cpu`"
        )

    def describe_device(self, name: str) -> str:
        kind, _, number = name.rpartition("/")[2].removeprefix("device:").lower().partition(":")
        if kind == "cpu":
            return "CPU"
        # A virtual GPU is a part of a physical one; the parts are numbered GPU by GPU.
        owners = [
            physical
            for physical in tf.config.list_physical_devices("GPU")
            for _ in tf.config.get_logical_device_configuration(physical) or (None,)
        ]
        if local_name(name) is None or int(number) >= len(owners):
            return "GPU"  # e.g. on another machine: its details are unknown here
        details = tf.config.experimental.get_device_details(owners[int(number)])
        return details.get("device_name", "GPU")

    def use_virtual_devices(self, count: int) -> None:
        if len(self.list_devices("cpu")) == count:
            return
        processor = tf.config.list_physical_devices("CPU")[0]
        parts = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
        tf.config.set_logical_device_configuration(processor, parts)

    def host_of(self, name: str) -> str:
        joined = processes.current()
        if joined is None:
            return name.rpartition("/")[0]
        owner, _ = names.find(name)
        return "" if owner == joined.number else joined.names[owner]

    def check(self, request: Request) -> None:
        check_no_strategy(request.template)
        processes.check_devices(request.devices, request.mode)

    def take_rows(self, tensor: Tensor, start: Tensor, size: Tensor) -> Tensor:
        return take_rows(tensor, start, size)

    def join_rows(self, tensors: Sequence[Tensor]) -> Tensor:
        return join_rows(tensors)

    def sum_rows(
        self, table: Any, indices: Tensor, weights: Any, dtype: str | None, sparse_gradient: bool
    ) -> Tensor:
        if isinstance(table, keras.Variable):
            found = look_up(table, indices, weights, dtype)
            if found is not None:
                return found
        value = keras.ops.cast(table, dtype or table.dtype)
        return sum_rows(value, indices, weights, sparse_gradient)

    def check_equal(self, counts: Sequence[Tensor]) -> Tensor:
        first, *others = counts
        message = (
            "All tensors must have the same number of rows, the length of their first axis. "
            "Repeat what belongs to all rows, or call the template: `model.template(...)`."
        )
        with tf.control_dependencies(
            [tf.debugging.assert_equal(other, first, message) for other in others]
        ):
            return tf.identity(first)

    def on_host(self) -> contextlib.AbstractContextManager[Any]:
        return tf.device(full_name(names.first("cpu")))

    def on_device(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return tf.device(full_name(name))

    def copy(self, tensor: Tensor, name: str) -> Tensor:
        with self.on_device(name):
            copied = tf.identity(tensor)
        tf.test.experimental.sync_devices()
        return copied

    def relay(self, names: Sequence[str]) -> Callable[[Tensor], Tensor]:
        @tf.function(autograph=False)
        def send(tensor: Tensor) -> Tensor:
            for name in names:
                with tf.device(full_name(name)):
                    tensor = tf.square(tensor)  # TensorFlow removes identities
            return tensor

        def run(tensor: Tensor) -> Tensor:
            sent = send(tensor)
            tf.test.experimental.sync_devices()
            return sent

        return run

    def build(
        self, function: Callable[..., Any], call: Call, models: Sequence[keras.Layer]
    ) -> None:
        arrays, restore = split_tensors(call)
        tensors = [part if tf.is_tensor(part) else tf.convert_to_tensor(part) for part in arrays]

        @tf.function(autograph=False, input_signature=[[for_any_rows(part) for part in tensors]])
        def trace(tensors: list[Tensor]) -> None:
            args, kwargs = restore(tensors)
            function(*args, **kwargs)

        with built_in(tf.init_scope, models):
            in_fresh_thread(trace.get_concrete_function)

    def stream_batches(
        self, epoch: Callable[[], Iterator[Any]], example: Any, batches: int
    ) -> tf.data.Dataset:
        signature = tf.nest.map_structure(
            lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), example
        )
        stream = tf.data.Dataset.from_generator(epoch, output_signature=signature)
        # Without a known length, Keras warns when the data end.
        return stream.apply(tf.data.experimental.assert_cardinality(batches))

    @contextlib.contextmanager
    def places_kept(self, model: keras.Model) -> Iterator[None]:
        homes = [(one, division_of(one) or one._value.device) for one in model.variables]
        try:
            yield
        finally:
            move_variables(homes, model)

    @contextlib.contextmanager
    def weights_whole(self, model: keras.Model) -> Iterator[None]:
        divided = [one for one in model.variables if division_of(one) is not None]
        with self.places_kept(model):
            move_variables([(one, names.first("cpu")) for one in divided], model)
            yield

    def count_transfers(self, model: TrainedModel, batch: Any, training: bool) -> list[Transfer]:
        with unchanged(model, "jit_compile", False):  # XLA hides shapes
            return count_transfers(lambda: _run_step(model, batch, training))

    def find_memory(self, model: keras.Model, batch: Any, training: bool) -> list[Holding]:
        with unchanged(model, "jit_compile", False):  # XLA hides shapes
            return find_memory(model, lambda: _run_step(model, batch, training), training)


def _run_step(model: Any, batch: Any, training: bool) -> None:
    """Runs a step that is traced anew."""
    if training:
        model.make_train_function(force=True)
        with batches_as_in_fit(model):
            model.train_on_batch(*batch)
    else:
        model.make_predict_function(force=True)
        model.predict_on_batch(batch[0])
