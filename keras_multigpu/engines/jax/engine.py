"""Devices and tensors of JAX."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
from jax.experimental.sparse import JAXSparse

from keras_multigpu.engines.attributes import get_mask, set_mask
from keras_multigpu.engines.base import Engine
from keras_multigpu.engines.jax import devices, rows, shards, tensors
from keras_multigpu.engines.jax.cluster import joint, processes
from keras_multigpu.engines.jax.placement import placement
from keras_multigpu.engines.jax.replicas import JaxReplicas
from keras_multigpu.engines.jax.slots import prepare
from keras_multigpu.engines.jax.steps import PlacedSteps, check_no_distribution
from keras_multigpu.engines.jax.transfers import compile_step, count_collectives, count_inputs
from keras_multigpu.engines.remote import Address, Remote
from keras_multigpu.engines.shared import in_fresh_thread, split_tensors
from keras_multigpu.engines.values import Call, Tensor, Transfer

_NAME = re.compile(r"/?(?:device:)?(cpu|gpu|cuda):(\d+)")
# Older trainers pin the state of a step to the devices that the variables were made on.
_LEAST_KERAS = (3, 12)


class JaxEngine(Engine):
    """Keras on JAX, as the modes see it.

    Raises:
        RuntimeError: if Keras is too old for a step on several devices.
    """

    name = "jax"
    title = "JAX"
    partitions = True
    mixins = (PlacedSteps,)
    remote = Remote("jax")

    def __init__(self) -> None:
        version = tuple(int(part) for part in keras.__version__.split(".")[:2])
        if version < _LEAST_KERAS:
            raise RuntimeError(
                "keras_multigpu needs Keras 3.12 or later on the Keras backend 'jax'. Received: "
                f"keras.__version__={keras.__version__!r}. Install it: "
                "`pip install -U 'keras-multigpu[jax]'`."
            )

    def list_devices(self, kind: str) -> tuple[str, ...]:
        return tuple(f"{kind}:{number}" for number in range(devices.count(kind)))

    def find_device(self, name: str) -> str | None:
        local = _NAME.fullmatch(name.lower())
        if not local:
            return None
        kind = "cpu" if local[1] == "cpu" else "gpu"
        short = f"{kind}:{int(local[2])}"
        return short if short in self.list_devices(kind) else None

    def describe_device(self, name: str) -> str:
        return "CPU" if name.startswith("cpu") else devices.find(name).device_kind

    def use_virtual_devices(self, count: int) -> None:
        devices.make_virtual(count)

    def join(
        self, address: Address, num_processes: int, process_id: int, timeout: float
    ) -> tuple[str, ...]:
        return processes.join(address, num_processes, process_id, timeout)

    @property
    def num_processes(self) -> int:
        group = processes.current()
        return 1 if group is None else len(group.names)

    def host_of(self, name: str) -> str:
        group = processes.current()
        if group is None:
            return ""
        owner = devices.find(name).process_index
        return "" if owner == group.number else group.names[owner]

    def check_process(self) -> None:
        check_no_distribution()

    def writing(self, model: keras.Model) -> contextlib.AbstractContextManager[bool]:
        return joint.writing(model)

    def check_devices(self, names: Sequence[str], mode: str) -> None:
        joint.check_devices(names, mode)

    def take_rows(self, tensor: Tensor, start: Tensor, size: Tensor) -> Tensor:
        return tensors.take_rows(tensor, start, size)

    def join_rows(self, parts: Sequence[Tensor]) -> Tensor:
        return tensors.join_rows(parts)

    def storage(self, tensor: Tensor) -> dict[str, bool]:
        return {"sparse": True} if isinstance(tensor, JAXSparse) else {}

    def check_equal(self, counts: Sequence[Tensor]) -> Tensor:
        raise NotImplementedError("Rows are known whenever JAX traces or runs.")

    def on_device(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return jax.default_device(devices.find(name))

    def copy(self, tensor: Tensor, name: str) -> Tensor:
        # Not an alias, which JAX may give between devices that share their memory.
        copied = jax.device_put(tensor, devices.find(name), may_alias=False)
        return copied.block_until_ready()

    @contextlib.contextmanager
    def shard_rows(self, parts: Sequence[Tensor], names: Sequence[str]) -> Iterator[list[Tensor]]:
        place = placement(tuple(names))
        with place.as_current():
            yield [set_mask(place.constrain(part), get_mask(part)) for part in parts]

    def sum_rows(
        self,
        table: Tensor,
        indices: Tensor,
        weights: Tensor | None = None,
        *,
        sparse_gradient: bool = False,
    ) -> Tensor:
        return rows.sum_rows(table, indices, weights)

    def build(self, function: Callable[..., Any], call: Call) -> None:
        arrays, restore = split_tensors(call)

        def trace(given: list[Tensor]) -> None:
            args, kwargs = restore(given)
            function(*args, **kwargs)

        def build() -> None:
            # Variables that a stateless scope meets first get their values when it ends.
            with keras.StatelessScope():
                jax.eval_shape(trace, arrays)

        in_fresh_thread(build)

    def make_replicas(
        self,
        models: Sequence[keras.Model],
        devices: Sequence[str],
        *,
        wire_dtype: str | None = None,
        synchronized: str = "none",
    ) -> JaxReplicas:
        return JaxReplicas(models, devices)

    def place_updates(
        self, optimizer: keras.Optimizer, model: keras.Model, *, apart: bool = False
    ) -> None:
        prepare(optimizer, are_stacked=not model._parallel_spreads_weights, apart=apart)

    def find_shards(self, model: keras.Model, count: int) -> dict[str, int]:
        return shards.find_shards(model, count)

    def shard(self, model: keras.Model, axes: dict[str, int], devices: Sequence[str]) -> None:
        shards.shard(model, axes, devices)

    def count_transfers(self, model: keras.Model, batch: Any, training: bool) -> list[Transfer]:
        text, parts = compile_step(model, batch, training)
        return count_inputs(parts) + count_collectives(text, model.devices)

    def step_scope(self, model: keras.Model, alone: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()
