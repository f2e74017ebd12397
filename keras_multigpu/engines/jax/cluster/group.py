"""Processes that run the same steps on JAX."""

from __future__ import annotations

import time
from typing import Any

import jax

from keras_multigpu.engines import group
from keras_multigpu.engines.board import BEAT


class Group(group.Group):
    """A group that waits for JAX's computations."""

    failures = (jax.errors.JaxRuntimeError,)

    def wait(self, values: Any) -> None:
        """Waits for arrays that all processes compute together.

        It polls, because a blocking wait in JAX can't be interrupted.
        """
        pause, due = 1e-4, time.monotonic() + BEAT
        for leaf in jax.tree.leaves(values):
            while isinstance(leaf, jax.Array) and not leaf.is_ready():
                time.sleep(pause)
                pause = min(1.5 * pause, 0.01)
                if time.monotonic() > due:
                    self.check()
                    due = time.monotonic() + BEAT
        jax.block_until_ready(values)  # raises the error, if there was one
