"""What to write for the devices that were meant by a wrong argument."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from keras_multigpu import engines
from keras_multigpu.arguments import as_number


def name_of(device: Any) -> str | None:
    """The name of a device, or `None`; the backend's own objects for devices have one too."""
    return device if isinstance(device, str) else engines.current().name_of(device)


def is_object(value: Any) -> bool:
    """Whether a value stands for devices itself; TensorFlow's physical devices are tuples, too."""
    return name_of(value) is not None or bool(engines.current().parts_of(value))


def find_cure(name: str, meant: Any, pool: Sequence[str]) -> str:
    """What to write for the devices that the argument `name` meant; `""` if that can't be told.

    Numbers in a list are places in `pool`.
    """
    if isinstance(meant, str) and meant == "all":
        return f" Leave `{name}` out to use all."
    count = as_number(meant)
    if count:
        return f" Write `n_gpus={count}`." if count > 0 else ""
    names = _find_names(meant, pool)
    return f" Write `devices={names}{_width(meant)}`." if names else find_place_of_strategy(meant)


def find_place_of_strategy(value: Any) -> str:
    """What to write in place of a strategy, a distribution or a mesh; `""` for anything else."""
    is_one = hasattr(value, "num_replicas_in_sync")  # of TensorFlow's
    if not is_one and not _has_mesh(value):
        return ""
    names = _find_names(value, ())
    if names:
        return f" Write `devices={names}{_width(value)}`."
    return " Leave it out: a parallel model needs no strategy. Name the devices (`devices`)."


def _has_mesh(value: Any) -> bool:
    mesh = _mesh_of(value)
    return hasattr(mesh, "devices") and hasattr(mesh, "axis_names")


def _mesh_of(value: Any) -> Any:
    """The mesh of a distribution of Keras's, or of a sharding of JAX's."""
    return getattr(value, "device_mesh", getattr(value, "mesh", value))


def _width(meant: Any) -> str:
    """The options for a distribution of Keras's in which devices share a weight, too."""
    if not hasattr(meant, "batch_dim_name"):
        return ""
    sizes = dict(zip(meant.device_mesh.axis_names, meant.device_mesh.shape))
    groups = sizes.pop(meant.batch_dim_name)
    width = math.prod(sizes.values())
    if groups == 1 and width > 1:
        return ", mode='model', placement='spread'"
    return f", model_devices={width}" if width > 1 else ""


def _find_names(meant: Any, pool: Sequence[str]) -> list[str]:
    """The names of all devices that were meant, each once; none if one of them can't be told."""
    found = [_find_one(one, pool) for one in _as_list(meant)]
    return list(dict.fromkeys(name for names in found for name in names)) if all(found) else []


def _as_list(meant: Any) -> list[Any]:
    if isinstance(meant, str):
        return [one.strip() for one in meant.split(",")]
    meant = np.ravel(_mesh_of(meant).devices).tolist() if _has_mesh(meant) else meant
    is_list = isinstance(meant, Iterable) and not isinstance(meant, Mapping)
    return list(meant) if is_list and not is_object(meant) else [meant]


def _find_one(one: Any, pool: Sequence[str]) -> Sequence[str]:
    """The names of the devices that one object, number or name means."""
    number = as_number(one)
    if number is not None:
        return pool[number : number + 1] if number >= 0 else ()
    name = name_of(one)
    if name is None:
        return engines.current().parts_of(one)
    kind = name.lower().rpartition("/")[2].removeprefix("device:")
    if kind in ("cpu", "gpu"):
        return engines.current().list_devices(kind)
    return (name,) if ":" in name else ()
