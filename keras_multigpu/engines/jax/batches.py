"""The batches of Keras's loops on their way to the devices."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from keras_multigpu.engines.jax.placement import Placement

_SAID_AFTER = 10  # batches, so that a few last, incomplete ones are passed over


class Undivided:
    """Warns once of a model whose batches are never spread, as the devices do not divide them."""

    def __init__(self) -> None:
        self._is_over = False  # it has been said, or a batch was spread
        self._seen = 0

    def see(self, batch: Any, place: Placement) -> None:
        """Takes note of a batch.

        Warns:
            UserWarning: after some batches, none of which could be spread.
        """
        if self._is_over or place.count == 1 or not place.is_of_rows:
            return
        shapes = [np.shape(part) for part in jax.tree.leaves(batch)]
        rows = next((shape[0] for shape in shapes if shape), 0)
        self._is_over = not rows % place.count
        self._seen += 1
        if self._seen < _SAID_AFTER or self._is_over:
            return
        self._is_over = True
        warnings.warn(
            f"The {place.count} devices do not divide the batches, so that each of them computes "
            f"whole batches: right, and no faster than one device. Received: {self._seen} batches, "
            f"the last of {rows} rows. Choose a batch size that is a multiple of {place.count}.",
            stacklevel=2,
        )


class PlacedBatches:
    """An iterator whose batches are put on the devices.

    Keras puts a batch whole on the default device while it iterates, so it iterates with the
    host as that.

    Args:
        batches: the batches.
        place: where their rows go.
        undivided: takes note of them.
    """

    def __init__(self, batches: Iterator[Any], place: Placement, undivided: Undivided):
        self._batches = batches
        self._place = place
        self._undivided = undivided

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with on_host():
            batch = next(self._batches)
        self._undivided.see(batch, self._place)
        return self._place.put_batch(batch)


def on_host() -> Any:
    """A scope in which new arrays are in the host's memory."""
    return jax.default_device(jax.local_devices(backend="cpu")[0])
