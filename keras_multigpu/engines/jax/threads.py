"""Threads for virtual devices: with too few, the devices wait for each other for ever.

XLA runs all CPU devices of a process on one pool of threads: one per core or per device, whichever
is more. A device in an all-reduce keeps its thread until the others arrive. The others need threads
too, also for the parts into which XLA cuts an operation. With none left, no device makes progress,
and XLA aborts the process after 40 s. Seen with jaxlib 0.10.2: a training on 4 devices and 2 cores
hangs with 4 or 5 threads, and not with 8.

The environment variable PJRT_NPROC is the only way to set the number of threads. XLA reads it once,
when it makes the devices (`DefaultThreadPoolSize` in xla/pjrt/utils.cc). So it is set only until
then; processes that are started before that inherit it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax import experimental

from keras_multigpu.engines import shared

_VARIABLE = "PJRT_NPROC"
_PER_DEVICE = 4  # threads; 2 have always been enough
_before: list[str | None] = []  # the variable's old value, while it is changed
_asked_for = 0  # threads


def ask_for_threads(count: int) -> None:
    """Makes XLA start enough threads for virtual devices; call it before XLA makes the devices."""
    global _asked_for
    restore_environment()
    _asked_for = max(_expected(), _PER_DEVICE * count)
    if count > 1 and _asked_for > _expected():
        _before.append(os.environ.get(_VARIABLE))
        os.environ[_VARIABLE] = str(_asked_for)


def restore_environment() -> None:
    """Restores the environment; call it as soon as XLA has made the devices."""
    for value in _before:
        if value is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = value
    _before.clear()


def warn_of_few_threads(count: int) -> None:
    """Warns if XLA had made its threads before we could ask for enough."""
    threads = max(_expected(), _asked_for, count)
    if count > 1 and threads < 2 * count:
        warnings.warn(
            f"{count} virtual devices share {threads} threads, and a step may stop for ever: the "
            "devices wait for each other, with no thread left to go on. Received: CPU devices "
            "that were made without `keras_multigpu.use_virtual_devices`. Call "
            f"`use_virtual_devices({count})` before the first tensor or model, or set the "
            f"environment variable {_VARIABLE}={_PER_DEVICE * count} before the process starts.",
            stacklevel=2,
        )


def _expected() -> int:
    """The threads that XLA makes by default, unless there are more devices."""
    for name in (_VARIABLE, "NPROC"):
        value = os.environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return os.cpu_count() or 1


# In older versions it is experimental.
_enable_x64: Any = getattr(jax, "enable_x64", getattr(experimental, "enable_x64", None))


def in_fresh_thread(function: Callable[[], Any]) -> None:
    """Calls a function outside the caller's scopes, except `jax.enable_x64`.

    JAX keeps that setting per thread. Without it, float64 values would be rounded to float32.
    """
    is_x64 = jax.dtypes.canonicalize_dtype("float64") == "float64"

    def run() -> None:
        with _enable_x64(is_x64):
            function()

    shared.in_fresh_thread(run)
