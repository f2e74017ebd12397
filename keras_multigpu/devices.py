"""Which devices there are, and which of them a parallel model uses."""

from __future__ import annotations

import functools
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from keras_multigpu import engines
from keras_multigpu.arguments import as_number, number_of, positive_integer
from keras_multigpu.meant import find_cure, is_object, name_of

_HINT = "Give the number of devices, 1 or more; 1 runs the same way on one device."


def list_devices() -> tuple[str, ...]:
    """Names of the available devices, for `make_parallel(model, devices=...)`.

    Before `keras_multigpu.cluster.join`, these are the devices of this process. The call doesn't
    start the backend then, so `use_virtual_devices` may still follow. After `join`, they are the
    devices of all processes, numbered consecutively. With 8 GPUs in each process, `"gpu:8"` is the
    first GPU of process 1. The names are the same in every process.

    Returns:
        First the GPUs, then the CPU devices, with the names of `keras.distribution.list_devices`:
        `"gpu:0"`, `"cpu:0"`. Then the devices of machines that `keras_multigpu.cluster.connect` has
        connected: `"host:port/gpu:0"`.

    Example:
        >>> list_devices()[-4:]
        ('cpu:0', 'cpu:1', 'cpu:2', 'cpu:3')
    """
    engine = engines.current()
    own = engine.list_devices("gpu") + engine.list_devices("cpu")
    return own + engine.remote.list_devices()


def use_virtual_devices(n: int) -> None:
    """Makes `n` virtual CPU devices of the host's processor, in place of GPUs.

    They compute what `n` GPUs would compute, so they show whether a training on several devices is
    right. They share one processor, so their times say nothing about GPUs. Call this before the
    backend starts: before the first tensor or model. Afterwards `make_parallel` uses the virtual
    devices, even if there are GPUs.

    Args:
        n: how many devices, 1 or more.

    Raises:
        ValueError: if `n` is not a positive integer.
        RuntimeError: if the backend has already started with another number of devices.

    Example:
        >>> use_virtual_devices(4)
        >>> len([name for name in list_devices() if name.startswith("cpu")])
        4
    """
    count = positive_integer("n", n, _HINT)
    try:
        engines.current().use_virtual_devices(count)
    except RuntimeError as error:
        there = len(engines.current().list_devices("cpu"))
        raise RuntimeError(
            f"`use_virtual_devices(n)` must come before the backend starts, and it has started "
            f"with {number_of(there, 'CPU device')}. Received: n={n}. Restart the "
            "process (or the notebook's kernel) and call it right after the imports, before "
            "the first tensor or model."
        ) from error


def choose_devices(n_gpus: int | None, devices: Sequence[str] | None) -> tuple[str, ...]:
    """The devices that a request names, or the first `n_gpus`; all if it says neither.

    Of joined processes each gives as many, as far as it has them. One device is this process's own.

    Raises:
        ValueError: if there are not so many, a name is unknown or given twice, or a joined process
            would have no device.
        TypeError: if `devices` is not a sequence of names.
    """
    if n_gpus is not None:
        n_gpus = positive_integer("n_gpus", n_gpus, _find_meant(n_gpus) or _HINT)
    if devices is not None:
        return _named_devices(n_gpus, devices)
    engine = engines.current()
    gpus, cpus = engine.list_devices("gpu"), engine.list_devices("cpu")
    are_virtual = len(cpus) > engine.num_processes
    pool = gpus if gpus and not are_virtual else cpus
    if n_gpus is None:
        return pool
    if n_gpus > len(pool):
        raise ValueError(_too_many(n_gpus, len(gpus), len(cpus)))
    if 1 < n_gpus < engine.num_processes:
        raise ValueError(
            "A model uses one device, or at least one of each process that has joined. Received: "
            f"n_gpus={n_gpus}, in {engine.num_processes} processes. Leave `n_gpus` out to use "
            "all, or name the devices of this process (`devices`)."
        )
    return _first_of_each(pool, n_gpus)


def choose_again(mode: str, count: int, asked: Any = None) -> tuple[str, ...]:
    """The devices for a model from a file, which it had `count` of; fewer if there are fewer.

    Of joined processes, each has one at least in mode `"data"`; the other modes use this process's.

    `asked`: the names that the user chose, which are taken if they are here; or `"all"`: more if
    there are more, but for towers, which have a replica on each.
    """
    engine, pool = engines.current(), choose_devices(None, None)
    if isinstance(asked, (list, tuple)) and set(asked) <= set(list_devices()):
        return tuple(asked)
    if asked == "all" and mode != "tower":
        count = max(count, len(pool))
    if engine.num_processes > 1 and mode != "data":
        pool = tuple(name for name in pool if not engine.host_of(name))
        return pool[:count]
    return _first_of_each(pool, max(count, engine.num_processes))


def _first_of_each(pool: tuple[str, ...], count: int) -> tuple[str, ...]:
    """The first `count` devices; of joined processes the first of each, then the second of each."""
    engine = engines.current()
    if engine.num_processes == 1:
        return pool[:count]
    owners = [engine.host_of(name) for name in pool]
    if count == 1:
        return (pool[owners.index("")],)
    ranks = [owners[:place].count(owner) for place, owner in enumerate(owners)]
    chosen = sorted(range(len(pool)), key=lambda place: (ranks[place], place))[:count]
    return tuple(pool[place] for place in sorted(chosen))


def take_several(count: int | None, enough: int = 2) -> tuple[tuple[str, ...], str]:
    """Devices on which to show a parallel training, and a sentence that says which they are.

    These are `count` GPUs, or fewer if there are fewer; with `None`, all GPUs if there are
    `enough`. Otherwise virtual devices stand in: `count`, or four. Must come before the backend
    starts, like `use_virtual_devices`.
    """
    if count is not None:
        count = positive_integer("n_gpus", count, _HINT)
    engine = engines.current()
    gpus, cpus = engine.list_devices("gpu"), engine.list_devices("cpu")
    if len(cpus) > engine.num_processes:
        chosen = choose_devices(count, None)
        return chosen, f"Virtual devices are in use: {', '.join(chosen)}."
    if len(gpus) >= min(count or enough, 2):
        chosen = gpus[:count]
        return chosen, f"GPUs in use: {', '.join(chosen)} (of {len(gpus)})."
    use_virtual_devices(count or 4)
    chosen = choose_devices(count or 4, None)
    found = "only one GPU" if gpus else "no GPU"
    if len(chosen) == 1:
        return chosen, f"There is {found} here, so a virtual CPU device stands in."
    return chosen, f"There is {found} here, so {len(chosen)} virtual CPU devices stand in."


def find_only_gpu() -> str | None:
    """The name of the host's GPU if there is exactly one."""
    gpus = engines.current().list_devices("gpu")
    return gpus[0] if len(gpus) == 1 else None


def explain_no_gpus() -> list[str]:
    """Why this process may see no GPU: what can be found out about it."""
    reasons = [engines.current().no_gpu_support]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        reasons.append(f"the environment variable CUDA_VISIBLE_DEVICES={visible!r} hides GPUs")
    if shutil.which("nvidia-smi"):
        reasons.append("if `nvidia-smi` lists a GPU, its driver may be too old for this CUDA")
    else:
        reasons.append("`nvidia-smi` is not there: no NVIDIA driver, or a container without it")
    return [reason for reason in reasons if reason]


@functools.cache
def warn_of_one_cpu() -> None:
    """Says, once in a process, that there is no GPU to use."""
    warnings.warn(
        "`make_parallel` found no GPU, so it uses one CPU device. Received: n_gpus=None. Possible "
        f"reasons: {'; '.join(explain_no_gpus())}. If this is what you want, give `n_gpus=1`; to "
        "try several devices on this host, call `keras_multigpu.use_virtual_devices(4)` first.",
        stacklevel=3,
    )


@functools.cache
def warn_of_apart() -> None:
    """Says, once in a joined process, that `n_gpus` counts the devices of all processes."""
    warnings.warn(
        "`make_parallel` uses one device of this process, in each of "
        f"{engines.current().num_processes} processes that have joined: it trains apart from the "
        "models of the others. Received: n_gpus=1. Leave `n_gpus` out for one model on the devices "
        "of all; if this is what you want, name the device (`devices`).",
        stacklevel=3,
    )


def _named_devices(n_gpus: int | None, devices: Sequence[str]) -> tuple[str, ...]:
    is_list = isinstance(devices, Sequence) and not is_object(devices)
    names = [name_of(one) for one in devices] if is_list else [None]
    cure = find_cure("devices", devices, choose_devices(None, None))
    if None in names:
        raise TypeError(
            '`devices` must be a list of device names such as "gpu:0", as `list_devices()` gives '
            f"them. Received: devices={devices!r}.{cure}"
        )
    if not names:
        raise ValueError(
            "`devices` must name devices, at least one. Received: devices=[]. Leave `devices` out "
            f"to use all, or choose from {', '.join(list_devices())}."
        )
    found = [engines.current().find_device(name) for name in names if name is not None]
    unknown = [str(name) for name, device in zip(names, found) if device is None]
    if unknown:
        raise ValueError(
            f"`devices` must name devices of this process, or of machines that it is connected to: "
            f"{', '.join(list_devices())}. "
            f"Received: devices={list(devices)!r}, of which {unknown!r} are unknown."
            f"{_why(unknown) or (cure if not any(':' in one for one in unknown) else '')}"
        )
    chosen = tuple(device for device in found if device is not None)
    if len(set(chosen)) < len(chosen):
        raise ValueError(
            f"`devices` must name each device once. Received: devices={list(devices)!r}."
        )
    if n_gpus is not None and n_gpus != len(chosen):
        raise ValueError(
            "`n_gpus` and `devices` must agree where both are given; one of them is enough. "
            f"Received: n_gpus={n_gpus} and {number_of(len(chosen), 'device')}, {list(devices)!r}."
        )
    return chosen


def _why(unknown: Sequence[str]) -> str:
    """Why there is no GPU, if one is asked for."""
    gpus = engines.current().list_devices("gpu")
    if gpus and any("cuda" in one.lower() for one in unknown):
        return f' Keras names a GPU "{gpus[0]}".'
    if gpus or not any(re.search("gpu:|cuda", one.lower()) for one in unknown):
        return ""
    return f" No GPU is here: {'; '.join(explain_no_gpus())}."


def _find_meant(n_gpus: Any) -> str:
    """What to write for what is no number of devices; `""` if that can't be told."""
    if isinstance(n_gpus, Mapping):
        return "Write `make_parallel(model, **plan.best)`."
    is_no_number = isinstance(n_gpus, int) or as_number(n_gpus) == 0
    return "" if is_no_number else find_cure("n_gpus", n_gpus, choose_devices(None, None)).strip()


def _too_many(n_gpus: int, gpus: int, cpus: int) -> str:
    hint = f"Only virtual devices are in use: {cpus}. " if cpus > 1 else ""
    if gpus and not hint:
        hint = f"Leave `n_gpus` out to use all GPUs, or write `n_gpus={gpus}`. "
    if not gpus and not hint:
        hint = f"Possible reasons: {'; '.join(explain_no_gpus())}. "
    return (
        f"`n_gpus` must not exceed the number of devices. Received: n_gpus={n_gpus}, and this "
        f"host has {number_of(gpus, 'GPU')}. {hint}To try it on virtual devices, "
        f"call `keras_multigpu.use_virtual_devices({n_gpus})` at the start of the process (or "
        "kernel), before the first tensor or model."
    )
