"""Variables whose values are spread over the devices of several processes.

No process can read such a value by itself: JAX would wait for the others for ever. So Keras's
variables become `SpreadVariable`s. A step gets their values; any other use raises an error, unless
all processes read them together (`readings.py`).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import NamedSharding

from keras_multigpu.engines.cluster.listing import digest_of
from keras_multigpu.engines.jax.cluster import joint
from keras_multigpu.engines.shared import active_scope, having

_BYTES = 2**26
"""How many bytes of a value a device gets at a time, when the processes read it."""
# Set while all processes make a call of a parallel model, whose steps take values.
_meet: contextvars.ContextVar[Callable[[], None] | None]
_meet = contextvars.ContextVar("_meet", default=None)


def lending(meet: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Scope of a call of a parallel model on devices of several processes.

    `meet` waits until all processes are about to assign a value. Until then they take part in
    readings: a process that went on alone would give others its part of a newer value.
    """
    return having(_meet, meet)


class Lent:
    """A spread variable's value on its way to a step; any other use raises an error.

    Attributes:
        array: the value.
        shape, dtype: those of the array.
    """

    def __init__(self, variable: keras.Variable):
        self.array: jax.Array = variable._value
        self.shape, self.dtype = self.array.shape, self.array.dtype
        self._path = variable.path

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise _not_readable(self._path, self.shape)

    @property  # `hasattr` raises too: JAX's own error would not say why
    def __jax_array__(self) -> Any:
        raise _not_readable(self._path, self.shape)

    def astype(self, dtype: Any) -> Any:
        """Raises, as any other use does."""
        raise _not_readable(self._path, self.shape)


class SpreadVariable(keras.Variable):
    """A variable of which each process has its devices' parts.

    Not made, but adopted: Keras has made the variable. What is assigned is cut at once, and each
    process puts its parts on its devices.

    Attributes:
        layout: how it is spread.
        digest: a checksum of the whole value that was assigned last, until the processes have
            compared it.
        whole: the whole value, while the processes read it.
    """

    _value: Any
    layout: NamedSharding
    digest: int | None = None
    whole: np.ndarray | None = None

    @property
    def value(self) -> Any:
        """The value in Keras's scopes; otherwise what a step takes, or the whole value.

        Raises:
            RuntimeError: if neither is there.
        """
        if self.whole is not None:
            return self.whole
        if self._value is None or active_scope() is not None:
            return super().value
        if _meet.get() is None:
            raise _not_readable(self.path, self.shape)
        return Lent(self)

    def assign(self, value: Any) -> Any:
        """Assigns a whole value, the same in all processes, or one that is spread already."""
        if active_scope() is None:
            self._meet_others(value)
            if isinstance(value, SpreadVariable):
                value = value._value
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            assigned = super().assign(value)
        self.settle()
        return assigned

    def _meet_others(self, value: Any) -> None:
        """Waits for the other processes, unless the value is a step's result."""
        meet = _meet.get()
        is_result = isinstance(value, jax.Array) and (
            isinstance(value, jax.core.Tracer) or not value.is_fully_addressable
        )
        if meet is not None and not is_result:
            meet()

    def settle(self) -> None:
        """Spreads the value, unless it is spread, or there is none."""
        value = self._value
        if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
            return
        if value.is_deleted() or value.sharding.is_equivalent_to(self.layout, value.ndim):
            return
        if value.is_fully_addressable:
            host = np.asarray(value)
            self.digest = digest_of([host], sys.maxsize)
            self._value = joint.put(host, self.layout)
        else:
            self._value = jax.device_put(value, self.layout)

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return np.asarray(self.value, dtype)  # older NumPy's own `__array__` takes no `None`

    def __repr__(self) -> str:
        return (
            f"<Variable path={self.path}, shape={self.shape}, dtype={self.dtype}, spread over the "
            "devices of several processes>"
        )


def check_spread(variable: keras.Variable, layout: NamedSharding) -> None:
    """Raises a `ValueError` for a variable that is spread over other devices already."""
    if not isinstance(variable, SpreadVariable):
        return
    if variable.layout.device_set != layout.device_set:
        raise ValueError(
            "A model's weights are spread over one set of devices of several processes. "
            f"Received: {variable.path!r}, which another parallel model has spread over "
            f"{len(variable.layout.device_set)} devices, and {len(layout.device_set)} other "
            "ones. Make a new model, and give it the weights: "
            "`new.set_weights(parallel.get_weights())`."
        )


def adopt(variable: keras.Variable, layout: NamedSharding) -> None:
    """Spreads a variable, now and whenever it is assigned.

    Raises:
        ValueError: if it is spread over other devices already.
    """
    check_spread(variable, layout)
    become(variable, SpreadVariable)
    variable.layout = layout
    variable.settle()


def become(variable: Any, kind: type[keras.Variable]) -> None:
    """Gives a variable that Keras has made the methods of another kind of variable."""
    if not isinstance(variable, kind):
        classes: Any = kind, type(variable)
        variable.__class__ = _adopted_class(*classes)


@functools.cache
def _adopted_class(kind: Any, cls: Any) -> Any:
    return type(cls.__name__, (kind, cls), {})


def arrays_of(state: Any) -> Any:
    """A step's state with the arrays of variables in place of what `value` lent."""
    return jax.tree.map(lambda one: one.array if isinstance(one, Lent) else one, state)


def take_digests(variables: Iterable[keras.Variable]) -> list[tuple[int, int]]:
    """What variables were assigned since the processes compared them: their numbers and digests."""
    taken = []
    for number, variable in enumerate(variables):
        if isinstance(variable, SpreadVariable) and variable.digest is not None:
            taken.append((number, variable.digest))
            variable.digest = None
    return taken


def gather(value: jax.Array, layout: NamedSharding, group: Any, wanted: bool) -> np.ndarray | None:
    """The whole value in host memory, where it is wanted; all processes call it together.

    Every device gets a piece of each part at a time, so that none needs room for the whole.
    """
    shape, count = layout.shard_shape(value.shape), layout.mesh.size
    part = int(np.prod(shape))
    size = min(part, max(1, _BYTES // (count * value.dtype.itemsize)))
    parts = np.empty((count, part), value.dtype) if wanted else None
    for start in range(0, part, size):
        start = min(start, part - size)
        pieces = _pieces(layout, size)(value, np.int32(start))
        group.wait(pieces)
        if parts is not None:
            parts[:, start : start + size] = np.asarray(pieces)
    if parts is None:
        return None
    whole = np.empty(value.shape, value.dtype)
    places = layout.devices_indices_map(value.shape)
    for number, device in enumerate(layout.mesh.devices.flat):
        whole[places[device]] = parts[number].reshape(shape)
    return whole


@functools.cache
def _pieces(layout: NamedSharding, size: int) -> Any:
    """A function that copies some elements of each device's part to all devices."""
    names = layout.mesh.axis_names

    def on_each_device(part: jax.Array, start: jax.Array) -> jax.Array:
        piece = jax.lax.dynamic_slice(part.reshape(-1), (start,), (size,))
        return jax.lax.all_gather(piece, names)

    none = jax.sharding.PartitionSpec()
    return jax.jit(
        jax.shard_map(
            on_each_device,
            mesh=layout.mesh,
            in_specs=(layout.spec, none),
            out_specs=none,
            check_vma=False,  # gathered, so equal on all devices
        )
    )


def _not_readable(path: str, shape: Any) -> RuntimeError:
    return RuntimeError(
        "With `shard` or `model_devices` over several processes no process can read a weight, or "
        f"a slot of the optimizer, by itself: each has a part. Received: {path!r} of shape "
        f"{tuple(shape)}, used outside of the parallel model's own calls. "
        "Call `parallel.get_weights()`, "
        "`save_weights`, `predict` or `evaluate` in all processes. For a model that one process "
        "uses alone: `new.set_weights(parallel.get_weights())`."
    )
