"""What a model's steps tell the other processes of themselves, to be compared."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_multigpu.engines.cluster.calls import Call
from keras_multigpu.engines.cluster.group import Group
from keras_multigpu.engines.cluster.listing import Listing, digest_of
from keras_multigpu.engines.jax.cluster.joint import is_whole
from keras_multigpu.engines.jax.cluster.listing import listing_of

_SETTINGS = (
    "default_dtype_bits", "default_matmul_precision", "default_prng_impl",
    "disable_jit", "enable_x64", "numpy_dtype_promotion", "random_seed_offset",
    "threefry_partitionable", "use_shardy_partitioner",
)  # fmt: skip


def settings() -> str:
    """Settings of JAX that change what a step computes, or what crosses in it."""
    found = {name: getattr(jax.config, f"jax_{name}", None) for name in _SETTINGS}
    return ", ".join(f"{name}={value}" for name, value in found.items())


def compare_programs(traced: Any, group: Group) -> None:
    """Raises a `ClusterError` if another process would compute something else in this step.

    Before it does: with other sums in it the processes would wait for each other, or be aborted.
    """
    listing = listing_of(traced)
    found = group.differing("programs", str(listing.checksum))
    if found is not None:
        raise group.differs(*found, "programs", listing)


def compare_weights(group: Group, variables: Sequence[keras.Variable], parts: Listing) -> None:
    """Raises a `ClusterError` if another process has other values, or has assigned other `parts`.

    `parts` is what was assigned to variables of which each process has a part.
    """
    # A loop that has donated an array and given none back leaves a deleted one.
    values = [(one.path, one._value) for one in variables if one._value is not None]
    own = [(path, one) for path, one in values if not one.is_deleted() and is_whole(one)]
    listing = Listing.of_all([Listing.of_values(own), parts])
    found = group.differing("new weights", str(listing.checksum))
    if found is not None:
        raise group.differs(*found, "weights", listing)


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
    some = []
    for weight in weights:
        count, step = min(weight.size, _TAKEN), max(1, weight.size // _TAKEN)
        places = (turn + np.arange(count) * step) % max(1, weight.size)
        some.append(weight.reshape(-1)[places])
    return some
