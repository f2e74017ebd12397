"""What the figures of a report were measured on: date, machine, devices, versions, backend."""

from __future__ import annotations

import collections
import datetime
import os
import platform
import sys
from collections.abc import Sequence

import keras

from keras_multigpu import engines
from keras_multigpu.version import __version__


def describe_environment(devices: Sequence[str]) -> dict[str, str]:
    """The date, the machine, the named devices and the versions, each in a few words."""
    engine = engines.current()
    kinds = collections.Counter(engine.describe_device(name) for name in devices)
    versions = {
        "Python": platform.python_version(),
        "Keras": keras.__version__,
        engine.title: sys.modules[keras.backend.backend()].__version__,
        "keras_multigpu": __version__,
    }
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": f"{count_cores()} processor cores ({platform.machine()})",
        "devices": ", ".join(f"{count} x {kind}" for kind, count in kinds.items()),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def count_cores() -> int:
    """The processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def are_virtual(devices: Sequence[str]) -> bool:
    """Whether devices are parts of one processor: then their times say nothing about GPUs."""
    hosts = collections.Counter(name.rpartition("/")[0] for name in devices)
    is_one = len(devices) > 1 and len(hosts) == 1
    return is_one and all(name.rpartition("/")[2].startswith("cpu") for name in devices)
