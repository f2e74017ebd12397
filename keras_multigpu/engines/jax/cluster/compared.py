"""What a model's steps tell the other processes of themselves, to be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import keras

from keras_multigpu.engines.cluster.calls import Call
from keras_multigpu.engines.cluster.group import Group
from keras_multigpu.engines.cluster.listing import Listing
from keras_multigpu.engines.jax.cluster.joint import Step, is_whole
from keras_multigpu.engines.jax.cluster.listing import listing_of
from keras_multigpu.engines.jax.cluster.samples import Samples

_SETTINGS = (
    "default_dtype_bits", "default_matmul_precision", "default_prng_impl",
    "disable_jit", "enable_x64", "numpy_dtype_promotion", "random_seed_offset",
    "threefry_partitionable", "use_shardy_partitioner",
)  # fmt: skip


def settings() -> str:
    """Settings of JAX that change what a step computes, or what crosses in it."""
    found = {name: getattr(jax.config, f"jax_{name}", None) for name in _SETTINGS}
    return ", ".join(f"{name}={value}" for name, value in found.items())


class Compared:
    """Samples of the weights of one process, and settings."""

    def __init__(self) -> None:
        self._samples = Samples()
        self._sample = 0  # of the weights, on its way to the others

    def take_sample(self, weights: list[Any], call: Call) -> None:
        """Takes a sample of the weights, which crosses with the next step."""
        self._sample = self._samples.take(weights, call)

    def next(self, name: str, position: int) -> Step:
        """What crosses with a step: a sample of the weights, once, and settings."""
        sample, self._sample = self._sample, 0
        return Step(name, position, sample, settings())


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
