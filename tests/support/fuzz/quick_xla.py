"""XLA's flags with which it compiles quickly.

XLA compiles for longer than the tests compute. What it optimizes is what it would optimize for
one device.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys

_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# JAX compiles in half the time by XLA's older emitters. Of an unknown flag XLA would die.
_OLDER_EMITTERS = "--xla_cpu_use_fusion_emitters=false"


@functools.cache
def flags(backend: str) -> str:
    """The value of `XLA_FLAGS`: that of this process, with the quick flags that XLA knows."""
    before = os.environ.get("XLA_FLAGS", "")
    if _QUICK in before:
        return before
    found = f"{_QUICK} {before}".strip()
    if backend != "jax":
        return found
    more = f"{found} {_OLDER_EMITTERS}"
    command = [sys.executable, "-c", "import jax; jax.devices('cpu')"]
    done = subprocess.run(command, env={**os.environ, "XLA_FLAGS": more})
    return found if done.returncode else more
