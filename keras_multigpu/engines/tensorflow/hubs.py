"""Which device passes on which part of the weights.

Of n devices the *home* of the weights sends every byte of them once, and receives every sum of
gradients. What is left to do is passed on by *hubs*, and with the shares given here no device
sends or receives more than P (2n - 3) / (n - 1) bytes in a step, for weights of P bytes: at most an
eighth above 2 P (n - 1) / n, the least that any way of summing on n devices can do with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

# No part has fewer elements; a multiple of what TensorFlow aligns tensors to, so that it cuts a
# tensor without copying it.
_GRAIN = 1024
# A share may be exceeded by this part of the mean share: fewer weights are cut.
_SLACK = 0.05


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a weight.

    Attributes:
        hub: the device that passes it on.
        start: its first element in the flattened weight.
        stop: the element behind its last one.
    """

    hub: str
    start: int
    stop: int


def shares_out(devices: Sequence[str], home: str) -> dict[str, float]:
    """The part of the weights that each device passes on to the others.

    The home does not, where others can: it sends all of them already.

    Example:
        >>> shares_out(["a", "b", "c"], home="a")
        {'b': 0.5, 'c': 0.5}
    """
    others = [device for device in devices if device != home] or list(devices)
    return dict.fromkeys(others, 1 / len(others))


def shares_back(devices: Sequence[str], home: str) -> dict[str, float]:
    """The part of the gradients that each device sums.

    The home sums a larger share: it has to receive the other sums anyway, while the other devices
    have to receive weights.

    Example:
        >>> shares_back(["a", "b", "c"], home="a")
        {'a': 0.5, 'b': 0.25, 'c': 0.25}
    """
    count = len(devices)
    if home not in devices or count == 1:
        return dict.fromkeys(devices, 1 / count)
    at_home = 1 / (count - 1)
    return {
        device: at_home if device == home else (1 - at_home) / (count - 1) for device in devices
    }


def divide(sizes: Mapping[int, int], shares: Mapping[str, float]) -> dict[int, tuple[Part, ...]]:
    """Divides weights among hubs, and cuts them where they don't come out even.

    Args:
        sizes: the number of elements of each weight, by any key.
        shares: the part of the whole that each hub is to have; they add up to 1.

    Returns:
        The parts of each weight, in order.

    Example:
        >>> divide({1: 30_000, 2: 10_000}, {"a": 0.5, "b": 0.5})[1]
        (Part(hub='a', start=0, stop=20480), Part(hub='b', start=20480, stop=30000))
    """
    total = sum(sizes.values())
    slack = _SLACK * total / len(shares)
    left = {hub: share * total for hub, share in shares.items()}
    parts: dict[int, tuple[Part, ...]] = {}
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
