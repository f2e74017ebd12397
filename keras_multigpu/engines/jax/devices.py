"""JAX's devices, counted without starting its runtime if possible."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
from typing import Any

import jax

from keras_multigpu.engines.jax import threads

_COUNT = "jax_num_cpu_devices"
_FORCED = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_GPU_PLATFORMS = ("cuda", "gpu", "rocm")


def check_platforms() -> None:
    """Raises a `RuntimeError` if JAX may not use the processor, in whose memory batches wait."""
    platforms = jax.config.jax_platforms
    if platforms and "cpu" not in platforms.split(","):
        lacks = "" if _plugins() else ", and there is no plugin for GPUs here"
        raise RuntimeError(
            "JAX must be allowed to use the processor beside GPUs, because batches wait in the "
            f"host's memory. Received: JAX_PLATFORMS={platforms!r}{lacks}. Unset JAX_PLATFORMS, or "
            f"write JAX_PLATFORMS={platforms},cpu before Python starts."
        )


def has_started() -> bool:
    """Whether JAX's runtime has started; the number of CPU devices is then fixed."""
    count = jax.config.jax_num_cpu_devices
    try:
        jax.config.update(_COUNT, count + 2)
    except RuntimeError:
        return True
    jax.config.update(_COUNT, count)
    return False


def make_virtual(number: int) -> None:
    """Makes JAX start with virtual CPU devices, and with threads for them.

    Raises:
        RuntimeError: if JAX has started with another number.
    """
    if count("cpu") != number:
        jax.config.update(_COUNT, number)
    if not has_started():
        threads.ask_for_threads(number)


def count(kind: str) -> int:
    """The number of devices of a kind, `"cpu"` or `"gpu"`, in all processes."""
    if has_started():
        return len(running(kind))
    return _planned_cpus() if kind == "cpu" else _count_gpus()


def running(kind: str) -> list[jax.Device]:
    """The devices of a kind, process 0's first; starts the runtime."""
    try:
        return sorted(jax.devices(kind), key=lambda device: (device.process_index, device.id))
    except RuntimeError as error:
        if "Unknown backend" not in str(error):
            raise
        return []
    finally:
        threads.restore_environment()


def find(name: str) -> jax.Device:
    """The device with a name like `"gpu:0"`; the number must be less than `count`."""
    kind, _, number = name.partition(":")
    return running(kind)[int(number)]


def name_of(device: jax.Device) -> str:
    """A device's name, the same in all processes."""
    kind = "cpu" if device.platform == "cpu" else "gpu"
    return f"{kind}:{running(kind).index(device)}"


def no_gpu_support() -> str:
    """Why JAX, as installed and set up, can't use GPUs; `""` if it can."""
    platforms = jax.config.jax_platforms
    if platforms and not any(name in platforms for name in _GPU_PLATFORMS):
        return f"JAX is told to use only {platforms!r}: look for JAX_PLATFORMS"
    return "" if _plugins() else "JAX has no plugin for GPUs: install the extra `jax-cuda`"


def _plugins() -> set[str]:
    return {plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")}


def _planned_cpus() -> int:
    if jax.config.jax_num_cpu_devices >= 0:
        return jax.config.jax_num_cpu_devices
    forced = _FORCED.search(os.environ.get("XLA_FLAGS", ""))
    return int(forced[1]) if forced else 1


def _count_gpus() -> int:
    """The GPUs that the runtime will find.

    NVIDIA's driver counts them without a runtime; for other GPUs JAX has to start.
    """
    platforms = jax.config.jax_platforms
    plugins = _plugins()
    if (platforms and not any(name in platforms for name in _GPU_PLATFORMS)) or not plugins:
        return 0
    if not any("cuda" in name for name in plugins):
        return len(running("gpu"))
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def is_traced(values: Any) -> bool:
    """Whether arrays in a structure are of a function that is being traced, and on no device."""
    return any(isinstance(one, jax.core.Tracer) for one in jax.tree.leaves(values))
