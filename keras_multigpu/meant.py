"""What to write for the devices that were meant by a wrong argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from keras_multigpu import engines
from keras_multigpu.arguments import as_integer


def name_of(device: Any) -> str | None:
    """The name of a device, or `None`; the backend's own objects for devices have one too."""
    return device if isinstance(device, str) else engines.current().name_of(device)


def find_cure(name: str, meant: Any, pool: Sequence[str]) -> str:
    """What to write for the devices that the argument `name` meant; `""` if that can't be told.

    Numbers in a list are places in `pool`.
    """
    if isinstance(meant, str) and meant == "all":
        return f" Leave `{name}` out to use all."
    count = as_number(meant)
    if count:
        return f" Write `n_gpus={count}`." if count > 0 else ""
    found = [_find_name(one, pool) for one in _as_list(meant)]
    return "" if None in found or not found else f" Write `devices={found}`."


def as_number(value: Any) -> int | None:
    """The integer that a number or a text stands for; `None` if it is none."""
    if isinstance(value, str):
        return int(value) if value.isdecimal() else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return as_integer(value)


def _as_list(meant: Any) -> list[Any]:
    if isinstance(meant, str):
        return [one.strip() for one in meant.split(",")]
    extended = getattr(meant, "extended", None)  # of TensorFlow's strategies
    meant = getattr(extended, "worker_devices", meant)
    mesh = getattr(meant, "mesh", meant)  # of a sharding
    meant = np.ravel(mesh.devices) if hasattr(mesh, "devices") else meant
    is_one = isinstance(meant, Mapping) or name_of(meant) is not None
    return list(meant) if isinstance(meant, Iterable) and not is_one else [meant]


def _find_name(one: Any, pool: Sequence[str]) -> str | None:
    number = as_number(one)
    if number is not None:
        return pool[number] if 0 <= number < len(pool) else None
    name = name_of(one)
    return name if name and ":" in name else None
