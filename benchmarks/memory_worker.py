"""One measurement of `memory`: a model's predicted and measured memory, in a fresh process.

What a process holds before a step is known: its arrays. The step's own part is measured. TensorFlow
keeps statistics of its allocator. On JAX it is how far the process's resident memory rises above
its value before the step: Linux keeps the highest value, and forgets it on demand; glibc returns
freed memory at once if told to (`ENVIRONMENT`).
"""

from __future__ import annotations

import ctypes
import gc
import pathlib
import re
from typing import Any

import keras

from benchmarks.memory_models import find
from benchmarks.processes import answer
from keras_multigpu import reports

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
_STATUS, _FORGET = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")


def compare(model: str, steps: int) -> dict[str, Any]:
    """The bytes that a model's training step needs: predicted, and measured in several steps."""
    benchmark = find(model)
    built = benchmark.build()
    rise = {"jax": _rise_of_process, "tensorflow": _rise_of_allocator}[keras.backend.backend()]
    benchmark.compile(built, jit_compile=rise is _rise_of_process)
    x, y = keras.tree.map_structure(keras.ops.convert_to_tensor, benchmark.make_batch())
    report = reports.memory(built, (x, y))
    kept = sum(report.bytes(kind=kind) for kind in ("weights", "slots", "batch"))
    for _ in range(2):
        built.train_on_batch(x, y)
    rises = [rise(lambda: built.train_on_batch(x, y)) for _ in range(steps)]
    (device,) = report.devices
    by_kind = {kind: report.bytes(device, kind) for kind in ("weights", "slots", "batch")}
    return {
        "rows": benchmark.batch_size,
        **by_kind,
        "predicted": report.peak,
        "measured": [kept + rise for rise in rises],
    }


def _rise_of_allocator(step: Any) -> int:
    """How far the memory that TensorFlow has allocated rises in a step."""
    from tensorflow.config import experimental

    gc.collect()
    before = experimental.get_memory_info("CPU:0")["current"]
    experimental.reset_memory_stats("CPU:0")
    step()
    return experimental.get_memory_info("CPU:0")["peak"] - before


def _rise_of_process(step: Any) -> int:
    """How far the process's resident memory rises in a step."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    _FORGET.write_text("5")
    before = _read("VmRSS")
    step()
    return _read("VmHWM") - before


def _read(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", _STATUS.read_text())
    assert found
    return 1024 * int(found[1])


if __name__ == "__main__":
    answer(compare, ["keras", "jax", "tensorflow"])
