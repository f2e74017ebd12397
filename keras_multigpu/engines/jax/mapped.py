"""A function on each device's part of some arrays: in one program, or one device after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from keras_multigpu.engines.jax.devices import is_traced
from keras_multigpu.engines.jax.placement import Placement


def map_devices(
    function: Callable[[Any, Any, Any], Any], place: Placement, own: Any, *common: Any
) -> Any:
    """Calls a function on each device, and joins the results along their first axis.

    A step that is not compiled calls it with values, as JAX would without devices: layers that are
    not for compiled steps (`RandomCrop`), and users who debug, read them.

    Args:
        function: gets the device's part of `own`, and `common`.
        place: the devices.
        own: arrays that are cut along their first axis.
        *common: arrays that each device gets whole.
    """
    if place.group is not None or not _is_eager((own, common)):
        mapped = jax.shard_map(
            function,
            mesh=place.mesh,
            in_specs=(place.sharded.spec, *(PartitionSpec() for _ in common)),
            out_specs=place.sharded.spec,
            check_vma=False,  # loops in a model start from constants, equal on all devices
        )
        return mapped(own, *common)
    results, first = [], place.mesh.devices.flat[0]
    common = jax.tree.map(lambda value: _at_home(value, first), common)
    for number, device in enumerate(place.mesh.devices.flat):
        part = jax.tree.map(lambda value, n=number: _part(value, n, place.count), own)
        # One by one: with a value that is being differentiated, the others would be, too.
        given = jax.tree.map(lambda value, to=device: jax.device_put(value, to), (part, *common))
        results.append(jax.device_put(function(*given), place.replicated))
    joined = jax.tree.map(lambda *parts: jax.numpy.concatenate(parts), *results)
    return jax.device_put(joined, place.sharded)


def _at_home(value: Any, device: Any) -> Any:
    """A value whose gradients, of all devices, come to one; NumPy's values have no device."""
    return jax.device_put(value, device) if is_traced(value) else value


def _part(value: Any, number: int, count: int) -> Any:
    length = value.shape[0] // count
    return value[number * length : (number + 1) * length]


def _is_eager(values: Any) -> bool:
    """Whether all values are known; those that are being differentiated may be."""
    return not any(
        isinstance(jax.lax.stop_gradient(leaf), jax.core.Tracer) for leaf in jax.tree.leaves(values)
    )
