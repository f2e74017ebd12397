"""What a process tells the others of itself and its arrays: short texts and checksums."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import random
import socket
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

COMPARED = 1024
"""How many elements of each array in a batch the processes compare."""


def describe_process(count: int, data: str, **facts: str) -> dict[str, str]:
    """What the others are told of this process, `facts` of the backend included."""
    states = (random.getstate(), np.random.get_state(legacy=False))
    return {
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "num_processes": str(count),
        "data": data,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "Keras": keras.__version__,
        "keras_multigpu": importlib.metadata.version("keras-multigpu"),
        # A checksum: equal in processes that have set the same seed.
        "random numbers": str(zlib.crc32(repr(states).encode())),
        "seed": str(random.SystemRandom().randrange(2**31)),
        **facts,
    }


def digest_of(arrays: Sequence[Any], count: int) -> int:
    """A 31-bit checksum of arrays: shapes, types, and about `count` values of each."""
    digest = 0
    for leaf in arrays:
        array = np.asarray(leaf)
        some = array.reshape(-1)[:: max(1, array.size // count)]
        digest = zlib.crc32(repr((array.shape, str(array.dtype))).encode(), digest)
        digest = zlib.crc32(some.tobytes(), digest)
    return digest >> 1
