"""What a placement sends between devices, and how much of the work runs in parallel."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import keras

from keras_multigpu.graphs import costs
from keras_multigpu.graphs.graph import Graph


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A tensor that is made on one device and used on another.

    Attributes:
        maker: the index of the call that makes it; `None` for an input of the model.
        takers: the indices of the calls on the other device that use it.
        target: the other device's number; the source is the maker's device, or 0 for inputs.
        row_bytes: the bytes of one of its rows.
        has_gradient: whether its gradient is sent back.
    """

    maker: int | None
    takers: tuple[int, ...]
    target: int
    row_bytes: int
    has_gradient: bool

    def bytes(self, rows: int) -> int:
        """The bytes sent in a training step on `rows` rows, including the gradient."""
        return rows * self.row_bytes * (2 if self.has_gradient else 1)


def find_crossings(graph: Graph, numbers: Sequence[int]) -> list[Crossing]:
    """The transfers of a placement; each tensor goes to a device once."""
    producers = graph.producers()
    takers: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
    tensors: dict[int, keras.KerasTensor] = {}
    for place, call in enumerate(graph.calls):
        for tensor in call.inputs:
            maker = producers.get(id(tensor))
            if numbers[place] != (0 if maker is None else numbers[maker]):
                tensors[id(tensor)] = tensor
                takers[id(tensor), numbers[place]].append(place)
    return [
        Crossing(
            maker=producers.get(key),
            takers=tuple(dict.fromkeys(places)),
            target=target,
            row_bytes=costs.row_bytes(tensors[key]),
            has_gradient=key in producers and keras.backend.is_float_dtype(tensors[key].dtype),
        )
        for (key, target), places in takers.items()
    ]


def find_share(graph: Graph, numbers: Sequence[int]) -> float:
    """The estimated step time of a placement, relative to one device.

    Calls on different devices run in parallel unless one waits for another. Copies take no time.

    Returns:
        1 for a chain, 1 / n for n equal branches on n devices.
    """
    producers = graph.producers()
    work = [costs.seconds(call) for call in graph.calls]
    free: dict[int, float] = collections.defaultdict(float)
    done: list[float] = []
    for call, number, spent in zip(graph.calls, numbers, work):
        arrivals = [done[producers[id(t)]] for t in call.inputs if id(t) in producers]
        free[number] = max([free[number], *arrivals]) + spent
        done.append(free[number])
    return max(done, default=0.0) / max(sum(work), 1e-12)
