"""Code that runs outside the caller's scopes, in the caller's precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import experimental

from keras_multigpu.engines import shared

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
