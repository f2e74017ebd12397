"""The batches of Keras's step functions, put on the devices."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from keras_multigpu.arguments import number_of
from keras_multigpu.engines.jax.cluster.joint import Step
from keras_multigpu.engines.jax.placement import Placement, is_sparse, on_host

_END: Any = object()
_SAID_AFTER = 10  # batches, so that a few incomplete last ones don't count


class Undivided:
    """Warns once if most batches are not spread, because the devices don't divide their rows.

    `loop`: what the batches are for.
    """

    def __init__(self, loop: str) -> None:
        self._loop = loop
        self._is_over = False  # warned already
        self._seen, self._rows = 0, 0  # undivided batches, less the others; rows of the longest

    def see(self, batch: Any, place: Placement, counts: bool = True) -> None:
        """Notes a batch; `counts` is false for one that is as long as it is.

        Warns:
            UserWarning: if ten more batches could not be spread than could.
        """
        if self._is_over or place.count == 1 or not place.is_of_rows:
            return
        shapes = [np.shape(part) for part in jax.tree.leaves(batch, is_leaf=is_sparse)]
        rows = next((shape[0] for shape in shapes if shape), 0)
        if place.divides(rows):
            self._seen = max(self._seen - 1, 0)
            return
        self._rows = max(rows, self._rows)
        self._seen += counts
        if self._seen < _SAID_AFTER:
            return
        self._is_over = True
        if self._rows == place.count:
            warnings.warn(
                f"On processors batches of {self._loop} with one row for each device are computed "
                "whole by each: right, and no faster than one device. Received: "
                f"{self._seen} batches, the longest of {number_of(self._rows, 'row')}. Give "
                f"{place.divided(self._rows)} rows, say.",
                stacklevel=2,
            )
            return
        kind = "groups of devices" if place.is_mesh else "devices"
        warnings.warn(
            f"The {place.count} {kind} do not divide the batches of {self._loop}, so that each "
            f"computes whole ones: right, and no faster than one device. Received: {self._seen} "
            f"such batches, the longest of {number_of(self._rows, 'row')}. Give batches of a "
            f"multiple of {place.count} rows: {place.divided(self._rows)}, for example.",
            stacklevel=2,
        )


def placed_batches(
    batches: Iterator[Any],
    place: Placement,
    undivided: Undivided,
    step: Callable[[], Step],
    one_short: bool,
    counts: list[list[int]],
) -> Iterator[Any]:
    """Puts batches on the devices.

    Keras puts a whole batch on the default device while it iterates, so the host is the default
    device meanwhile. `step` gives the name of each step, its position in a pass, a sample of the
    weights, and what it has computed before. The first batch of a pass that has `one_short` may be
    its last, which is as long as it is. `counts` gets how many rows each process has of each batch.
    """
    while True:
        with on_host():
            batch = next(batches, _END)
        if batch is _END:
            return
        begun = step()
        counts.append(place.compare(batch, begun))
        placed = place.put_batch(batch, counts[-1])
        undivided.see(placed, place, not one_short or begun.position > 0)
        yield placed
