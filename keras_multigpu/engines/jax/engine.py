"""Devices and tensors of JAX."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
from jax.experimental import sparse

from keras_multigpu.engines.base import Engine
from keras_multigpu.engines.cluster.remote import Remote
from keras_multigpu.engines.jax import devices, rows
from keras_multigpu.engines.jax.checks import check_no_distribution
from keras_multigpu.engines.jax.cluster import joint, processes
from keras_multigpu.engines.jax.counting.memory import find_memory
from keras_multigpu.engines.jax.counting.transfers import count_collectives, count_inputs
from keras_multigpu.engines.jax.joint_placement import placement_on
from keras_multigpu.engines.jax.joint_steps import steps_of
from keras_multigpu.engines.jax.mesh import MeshRunner
from keras_multigpu.engines.jax.placement import on_host
from keras_multigpu.engines.jax.replicas import CommitteeRunner
from keras_multigpu.engines.jax.stages import ShardsRunner
from keras_multigpu.engines.jax.state.parted import kept_in_place
from keras_multigpu.engines.jax.threads import in_fresh_thread
from keras_multigpu.engines.runners import TrainedModel
from keras_multigpu.engines.shared import split_tensors
from keras_multigpu.engines.templates import built_in
from keras_multigpu.engines.values import Call, Holding, Request, Tensor, Transfer

_NAME = re.compile(r"/?(?:device:)?(cpu|gpu|cuda):(\d+)")
# Older trainers pin a step's state to the devices on which the variables were made.
_LEAST_KERAS = (3, 12)


class JaxEngine(Engine):
    """Keras on JAX, as the modes see it.

    Raises:
        RuntimeError: if Keras is too old for a step on several devices, or JAX may not use the
            processor.
    """

    name = "jax"
    title = "JAX"
    partitions = True
    shares_memory = False
    remote = Remote("jax")
    processes = processes.PROCESSES
    data_runner = MeshRunner
    tower_runner = CommitteeRunner
    model_runner = ShardsRunner
    steps = staticmethod(steps_of)

    def __init__(self) -> None:
        version = tuple(int(part) for part in keras.__version__.split(".")[:2])
        if version < _LEAST_KERAS:
            raise RuntimeError(
                "keras_multigpu needs Keras 3.12 or later on the Keras backend 'jax'. Received: "
                f"keras.__version__={keras.__version__!r}. Install it: `pip install -U keras`."
            )
        devices.check_platforms()

    def divides(self, devices: Sequence[str], rows: int, together: int = 1) -> bool:
        return placement_on(devices, width=together).divides(rows)

    def list_devices(self, kind: str) -> tuple[str, ...]:
        return tuple(f"{kind}:{number}" for number in range(devices.count(kind)))

    def find_device(self, name: str) -> str | None:
        local = _NAME.fullmatch(name.lower())
        if not local:
            return None
        kind = "cpu" if local[1] == "cpu" else "gpu"
        short = f"{kind}:{int(local[2])}"
        return short if short in self.list_devices(kind) else None

    def name_of(self, device: Any) -> str | None:
        return devices.name_of(device) if isinstance(device, jax.Device) else None

    @property
    def no_gpu_support(self) -> str:
        return devices.no_gpu_support()

    def describe_device(self, name: str) -> str:
        return "CPU" if name.startswith("cpu") else devices.find(name).device_kind

    def use_virtual_devices(self, count: int) -> None:
        devices.make_virtual(count)

    def host_of(self, name: str) -> str:
        group = processes.current()
        if group is None:
            return ""
        owner = devices.find(name).process_index
        return "" if owner == group.number else group.names[owner]

    def check(self, request: Request) -> None:
        joint.check_devices(request.devices, request.mode)
        check_no_distribution()

    def take_rows(self, tensor: Tensor, start: Tensor, size: Tensor) -> Tensor:
        if isinstance(tensor, sparse.BCOO):
            begin = (start, *(0 for _ in tensor.shape[1:]))
            end = (start + size, *tensor.shape[1:])
            return sparse.bcoo_slice(tensor, start_indices=begin, limit_indices=end)
        return tensor[start : start + size]

    def join_rows(self, tensors: Sequence[Tensor]) -> Tensor:
        if isinstance(tensors[0], sparse.BCOO):
            return sparse.bcoo_concatenate(tensors, dimension=0)
        return jax.numpy.concatenate(tensors, axis=0)

    def check_equal(self, counts: Sequence[Tensor]) -> Tensor:
        first, *others = counts
        if any(count != first for count in others):
            raise ValueError(
                "All tensors must have the same number of rows, the length of their first axis. "
                f"Received: tensors of {', '.join(map(str, counts))} rows."
            )
        return first

    def on_host(self) -> contextlib.AbstractContextManager[Any]:
        return on_host()

    def on_device(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return jax.default_device(devices.find(name))

    def copy(self, tensor: Tensor, name: str) -> Tensor:
        # JAX may otherwise return an alias if devices share memory.
        copied = jax.device_put(tensor, devices.find(name), may_alias=False)
        return copied.block_until_ready()

    def relay(self, names: Sequence[str]) -> Callable[[Tensor], Tensor]:
        return lambda tensor: functools.reduce(self.copy, names, tensor)

    def sum_rows(
        self, table: Any, indices: Tensor, weights: Any, dtype: str | None, sparse_gradient: bool
    ) -> Tensor:
        value = keras.ops.cast(table, dtype or table.dtype)
        return rows.sum_rows(value, indices, weights)

    def stream_batches(self, epoch: Callable[[], Iterator[Any]], example: Any, batches: int) -> Any:
        raise RuntimeError(
            "A `tf.data.Dataset` needs the Keras backend 'tensorflow'. Received: "
            f"keras.backend.backend()={self.name!r}. Give the dataset itself to `fit`."
        )

    def build(
        self, function: Callable[..., Any], call: Call, models: Sequence[keras.Layer]
    ) -> None:
        arrays, restore = split_tensors(call)

        def trace(given: list[Tensor]) -> None:
            args, kwargs = restore(given)
            function(*args, **kwargs)

        def build() -> None:
            # Variables created in a stateless scope get their values when it ends.
            with keras.StatelessScope():
                jax.eval_shape(trace, arrays)

        with built_in(jax.ensure_compile_time_eval, models):
            in_fresh_thread(build)

    def in_fresh_thread(self, function: Callable[[], Any]) -> None:
        in_fresh_thread(function)

    def places_kept(self, model: keras.Model) -> contextlib.AbstractContextManager[Any]:
        return kept_in_place(model.variables)

    def weights_whole(self, model: keras.Model) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()  # to JAX an array is whole on however many devices

    def count_transfers(self, model: TrainedModel, batch: Any, training: bool) -> list[Transfer]:
        step = model._parallel_steps.compile_step(batch, training)
        return count_inputs(step.data) + count_collectives(step.program.as_text(), model.devices)

    def find_memory(self, model: keras.Model, batch: Any, training: bool) -> list[Holding]:
        return find_memory(model, batch, training)
