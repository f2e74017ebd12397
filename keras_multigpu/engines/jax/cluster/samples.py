"""Samples of weights, by which joined processes notice that one goes another way.

What a process assigns is compared before the next step where it can be seen (`lent.py`). It can't
be if the template alone has trained meanwhile, or if a step of this process computes otherwise: an
eager one reads the optimizer's attributes. So a checksum of some elements crosses now and then.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np

from keras_multigpu.engines.cluster.calls import Call
from keras_multigpu.engines.cluster.descriptions import digest_of

EVERY = 8
"""After so many steps of a loop, weights are sampled; after each single one."""
_TAKEN = 256  # elements of a weight at a time; each time others


class Samples:
    """Decides when weights are sampled: alike in all processes, as their steps are."""

    def __init__(self) -> None:
        self._latest: tuple[Call | None, int] = (None, 0)

    def take(self, weights: list[Any], call: Call) -> int:
        """A checksum of weights that each device has whole; 0 if it is not their turn."""
        latest, steps = self._latest
        if latest is not call:
            steps = 0
        every = EVERY if call.is_loop else 1
        due = call.steps - steps >= every
        self._latest = call, call.steps if due else steps
        if not due:
            return 0
        whole = [one for one in weights if isinstance(one, jax.Array) and one.is_fully_replicated]
        some = _some([one.addressable_data(0) for one in whole], np.int32(call.steps // every))
        return digest_of(some, sys.maxsize)


@jax.jit
def _some(weights: list[jax.Array], turn: Any) -> list[jax.Array]:
    """Some elements of each weight."""
    return [_of_one(weight, turn) for weight in weights]


def _of_one(weight: jax.Array, turn: Any) -> jax.Array:
    count = min(weight.size, _TAKEN)
    places = (turn + np.arange(count) * max(1, weight.size // _TAKEN)) % max(1, weight.size)
    return weight.reshape(-1)[places]
