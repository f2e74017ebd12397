"""Divides weights among *hubs*: devices that pass weights on and sum their gradients.

The *home* of the weights sends every byte once and receives every sum of gradients. Hubs do the
rest. For n devices and weights of P bytes, no device sends or receives more than
P (2n - 3) / (n - 1) bytes in a step: at most an eighth above 2 P (n - 1) / n, the minimum.

If the weights have homes on all devices, each home is the hub of its weights: it sends them to all
devices, and sums all gradients. If the homes have equally much, that is the minimum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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


def shares_out(loads: Mapping[str, int], home: str) -> dict[str, float]:
    """The share of a home's weights that each device passes on to the others.

    `loads` has how much each device stores. A home that stores all weights passes on nothing, if
    there are other devices: it already sends all of them.

    Example:
        >>> shares_out({"a": 100, "b": 0, "c": 0}, home="a")
        {'b': 0.5, 'c': 0.5}
        >>> shares_out({"a": 100, "b": 100, "c": 100}, home="a")
        {'a': 1.0}
    """
    return _shares(loads, home, 0.0)


def shares_back(loads: Mapping[str, int], home: str) -> dict[str, float]:
    """The share of the gradients of a home's weights that each device sums.

    The home sums a larger share: it has to receive the other sums anyway, while the other devices
    have to receive weights.

    Example:
        >>> shares_back({"a": 100, "b": 0, "c": 0}, home="a")
        {'a': 0.5, 'b': 0.25, 'c': 0.25}
    """
    return _shares(loads, home, 1 / (len(loads) - 1) if len(loads) > 1 else 1.0)


def _shares(loads: Mapping[str, int], home: str, least: float) -> dict[str, float]:
    """The share of each device; the home has the `least`, and more if other devices store much."""
    if home not in loads:
        at_home = 0.0
    elif len(loads) == 1:
        at_home = 1.0
    else:
        # The home is the hub of as much as the others store on the average.
        average = (sum(loads.values()) - loads[home]) / (len(loads) - 1)
        direct = min(1.0, average / loads[home]) if loads[home] else 1.0
        at_home = direct + (1 - direct) * least
    # The others are hubs as far as they store less than an even part.
    even = sum(loads.values()) / len(loads)
    spare = {one: max(0.0, even - load) for one, load in loads.items() if one != home}
    if not sum(spare.values()):
        spare = dict.fromkeys(spare, 1.0)
    total = sum(spare.values())
    shares = {one: (1 - at_home) * part / total for one, part in spare.items()}
    found = {one: at_home if one == home else shares[one] for one in loads}
    return {one: share for one, share in found.items() if share > 0}


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
