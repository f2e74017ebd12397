"""Divides weights among *hubs*: devices that pass weights on and sum their gradients.

The *home* of the weights sends every byte once and receives every sum of gradients. Hubs do the
rest. For n devices and weights of P bytes, no device sends or receives more than
P (2n - 3) / (n - 1) bytes in a step: at most an eighth above 2 P (n - 1) / n, the minimum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

_Key = TypeVar("_Key")

# The unit of cuts, in elements: a multiple of TensorFlow's tensor alignment, so that cutting
# copies nothing.
_GRAIN = 1024
# Hubs may exceed their share by this part of the mean share, so that fewer weights are cut.
_SLACK = 0.05


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a weight.

    Attributes:
        hub: the device that passes it on.
        start: the index of its first element in the flattened weight.
        stop: the index after its last element.
    """

    hub: str
    start: int
    stop: int


def shares_of(names: Sequence[str], home: str, *, back: bool) -> dict[str, float]:
    """The share of the home's weights that each device passes on, or of the gradients it sums.

    The home passes on nothing: it already sends all. It sums a larger share: it has to receive the
    other sums anyway, while the other devices have to receive weights.

    Example:
        >>> shares_of(["a", "b", "c"], home="a", back=False)
        {'b': 0.5, 'c': 0.5}
        >>> shares_of(["a", "b", "c"], home="a", back=True)
        {'a': 0.5, 'b': 0.25, 'c': 0.25}
    """
    others = len({*names} - {home})
    at_home = back / others
    away = (1 - at_home) / others
    shares = {one: at_home if one == home else away for one in (*names, home)}
    return {one: share for one, share in shares.items() if share > 0}


def divide(sizes: Mapping[_Key, int], shares: Mapping[str, float]) -> dict[_Key, tuple[Part, ...]]:
    """The parts of each weight, in order, divided among hubs by their shares.

    Weights, of `sizes` elements, are cut if they don't fit. The shares add up to 1.

    Example:
        >>> divide({1: 30_000, 2: 10_000}, {"a": 0.5, "b": 0.5})[1]
        (Part(hub='a', start=0, stop=20480), Part(hub='b', start=20480, stop=30000))
    """
    total = sum(sizes.values())
    slack = _SLACK * total / len(shares)
    left = {hub: share * total for hub, share in shares.items()}
    parts: dict[_Key, tuple[Part, ...]] = {}
    for key in sorted(sizes, key=sizes.__getitem__, reverse=True):
        found: list[Part] = []
        start, size = 0, sizes[key]
        while start < size or not found:
            hub = max(left, key=left.__getitem__)
            fits = round(left[hub] / _GRAIN) * _GRAIN
            rest = size - start
            count = rest if rest - left[hub] <= slack + _GRAIN else max(_GRAIN, fits)
            found.append(Part(hub, start, start + count))
            left[hub] -= count
            start += count
        parts[key] = tuple(found)
    return parts
