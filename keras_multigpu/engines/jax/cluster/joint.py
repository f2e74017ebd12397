"""What processes do together: compare batches and state, begin and end calls, write files."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_multigpu.engines.jax import devices
from keras_multigpu.engines.jax.cluster import processes
from keras_multigpu.engines.jax.cluster.group import Group

# How many elements of each array in a batch the processes compare.
_COMPARED = 1024
_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def check_devices(names: Sequence[str], mode: str) -> None:
    """Raises a `ValueError` for devices of other processes that a model can't use."""
    group = processes.current()
    if group is None:
        processes.check_not_joined_elsewhere()
        return
    owners = {devices.find(name).process_index for name in names}
    if owners == {group.number}:
        return
    absent = sorted(set(range(len(group.names))) - owners)
    if absent:
        raise ValueError(
            "A model uses devices of this process only, or at least one device of every "
            f"process that has joined. Received: devices={list(names)!r}, with none of "
            f"process {', '.join(map(str, absent))}. This is process {group.number}. Leave "
            "`n_gpus` and `devices` out to use all, or join fewer processes."
        )
    if mode != "data":
        raise ValueError(
            f"Only mode 'data' can use several processes. Received: mode={mode!r} and "
            f"devices={list(names)!r}, of {len(owners)} processes. Use mode 'data', or devices of "
            "this process only."
        )


def group_of(mesh: Mesh) -> Group | None:
    """The processes that share a mesh's devices; `None` if this process has them all."""
    group = processes.current()
    others = {device.process_index for device in mesh.devices.flat} - {jax.process_index()}
    return group if others else None


def put(value: Any, sharding: NamedSharding) -> jax.Array:
    """An array over devices of all processes, from the same value in each process."""
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def copy_to_all(tree: Any, mesh: Mesh) -> Any:
    """Copies arrays to every device; all processes call it together."""
    parted = [leaf for leaf in jax.tree.leaves(tree) if not _is_whole(leaf)]
    whole = iter(_replicate(mesh)(parted)) if parted else iter(())
    return jax.tree.map(lambda leaf: leaf if _is_whole(leaf) else next(whole), tree)


def compare(values: Any, what: str, mesh: Mesh, group: Group) -> None:
    """Raises a `ClusterError` if another process has other values of `what`: rows or weights."""
    each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    mine = np.full(1, _digest(values, _COMPARED if what == "rows" else sys.maxsize), "int32")
    known = _replicate(mesh)(
        jax.make_array_from_callback((mesh.devices.size,), each, lambda index: mine)
    )
    group.wait(known)
    owners = [device.process_index for device in mesh.devices.flat]
    digests = dict(zip(owners, np.asarray(known).tolist()))
    for number in sorted(digests):
        if digests[number] != digests[0]:
            raise group.differs(number, what)


def _digest(values: Any, count: int) -> int:
    """A 31-bit checksum of arrays: shapes, types, and about `count` values of each."""
    digest = 0
    for leaf in jax.tree.leaves(values):
        array = np.asarray(leaf)
        some = array.reshape(-1)[:: max(1, array.size // count)]
        digest = zlib.crc32(repr((array.shape, str(array.dtype))).encode(), digest)
        digest = zlib.crc32(some.tobytes(), digest)
    return digest >> 1


def describe(model: keras.Model) -> str:
    """A checksum of a model's layers, its optimizer and the shapes of its weights."""
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    known = (
        type(model).__qualname__,
        [_settings(layer) for layer in model._flatten_layers()],
        [(tuple(one.shape), str(one.dtype)) for one in variables],
        _settings(optimizer),
    )
    return f"{type(model).__name__} of checksum {zlib.crc32(repr(known).encode()):08x}"


def _settings(part: Any) -> tuple[str, list[tuple[str, Any]]]:
    """The class of a layer or optimizer, and its plain settings."""
    kept = []
    for name, value in sorted(vars(part).items()) if part is not None else ():
        if name.startswith("_") or name in ("name", "built"):
            continue
        if _is_plain(value):
            kept.append((name, repr(value)))
        elif callable(value) and hasattr(value, "__name__"):
            kept.append((name, value.__name__))
    return type(part).__qualname__, kept


def _is_plain(value: Any) -> bool:
    """Whether `repr` gives the same text in every process."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str))


def _is_whole(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.is_fully_replicated


@functools.cache
def _replicate(mesh: Mesh) -> Any:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))


def meet(steps: Any, call: str) -> None:
    """Begins a call (`"fit"`) together with the other processes."""
    group = steps.where.group
    if group is not None:
        facts = {"model": describe(steps.model), "devices": ", ".join(steps.model.devices)}
        group.begin(call, facts)


def part(steps: Any, error: BaseException | None = None) -> None:
    """Ends a call together with the other processes, or tells them why this one left it."""
    group = steps.where.group
    if group is not None and error is None:
        group.end()
    elif group is not None:
        steps.has_met = False
        group.fail(error)


def write_once(steps: Any, loop: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a loop (`fit`, ...); only process 0 keeps callbacks that write files."""
    group = steps.where.group
    if group is None or group.is_writer:
        return args, kwargs
    given = inspect.signature(loop).bind_partial(*args, **kwargs)
    for arguments in (given.arguments, given.kwargs):
        callbacks = arguments.get("callbacks")
        if callbacks is not None and not isinstance(callbacks, keras.callbacks.CallbackList):
            listed = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
            arguments["callbacks"] = [_in_place_of(one) for one in listed]
    return given.args, given.kwargs


def _in_place_of(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        return _Restore(callback)
    return keras.callbacks.Callback() if isinstance(callback, _WRITERS) else callback


class _Restore(keras.callbacks.Callback):
    """Restores, as `BackupAndRestore` does, and leaves the backups to process 0."""

    def __init__(self, callback: keras.callbacks.Callback):
        super().__init__()
        self._callback = callback

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self._callback.set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        self._callback.on_train_begin(logs)


@contextlib.contextmanager
def writing(steps: Any) -> Iterator[bool]:
    """Scope for writing a model file: yields True in process 0; the others wait.

    Within `fit` they don't wait here, but at the next step.
    """
    group = steps.where.group
    if group is None or steps.is_running:
        yield group is None or group.is_writer
        return
    try:
        meet(steps, "the writing of a file")
        yield group.is_writer
        part(steps)
    except BaseException as error:
        part(steps, error)
        raise
