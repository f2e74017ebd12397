"""Links between devices: presets with nominal speeds, and measurements on this machine."""

from __future__ import annotations

import dataclasses
import math
import statistics
import timeit
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu import engines
from keras_multigpu.arguments import did_you_mean, positive_integer, quantity
from keras_multigpu.devices import choose_devices, list_devices
from keras_multigpu.meant import name_of
from keras_multigpu.reports.forms import are_virtual

_SMALL, _LARGE = 4 * 2**10, 64 * 2**20  # bytes
_TURNS = 20  # there and back


@dataclasses.dataclass(frozen=True)
class Link:
    """A link between devices, on which a copy takes `latency_s + bytes / bytes_per_s`.

    The model is Hockney's ("The communication challenge for MPP", Parallel Computing 20, 1994).
    Each device has a separate link, on which it can send and receive at the same time.

    Args:
        name: what to call it.
        bytes_per_s: bandwidth in one direction, in bytes per second; `math.inf` if copies cost
            nothing, as between the parts of one processor.
        latency_s: the seconds that even the smallest copy takes.

    Example:
        >>> link = Link("a slow one", bytes_per_s=1e6, latency_s=0.5)
        >>> link.seconds(2_000_000, copies=3)
        3.5
    """

    name: str
    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(
                f"`name` must be a text. Received: name={self.name!r}. Write "
                'Link("my link", bytes_per_s=10e9), for example.'
            )
        if self.bytes_per_s != math.inf:
            quantity("bytes_per_s", self.bytes_per_s)
        quantity("latency_s", self.latency_s, zero=True)

    def seconds(self, size: float, copies: float = 1) -> float:
        """The time to send `size` bytes in `copies` copies, one after the other."""
        return copies * self.latency_s + size / self.bytes_per_s

    def __str__(self) -> str:
        latency = f"{1e6 * self.latency_s:.3g} us"
        if math.isinf(self.bytes_per_s):
            cost = f"take {latency}, of any size" if self.latency_s else "cost nothing"
            return f"{self.name}: copies {cost}"
        return f"{self.name}: {self.bytes_per_s / 1e9:.4g} GB/s each way, {latency} per copy"


_PCIE_S, _NVLINK_S, _ETHERNET_S = 10e-6, 5e-6, 50e-6
_LANES = 16 * 128 / 130 / 8  # bytes of a PCIe transfer: 16 lanes, 128 bits of data in 130

PRESETS = {
    "pcie3": Link("PCIe 3.0 x16", 8e9 * _LANES, _PCIE_S),
    "pcie4": Link("PCIe 4.0 x16", 16e9 * _LANES, _PCIE_S),
    "pcie5": Link("PCIe 5.0 x16", 32e9 * _LANES, _PCIE_S),
    "nvlink2": Link("NVLink 2 (V100)", 6 * 25e9, _NVLINK_S),
    "nvlink3": Link("NVLink 3 (A100)", 12 * 25e9, _NVLINK_S),
    "nvlink4": Link("NVLink 4 (H100, H200)", 18 * 25e9, _NVLINK_S),
    "ethernet10": Link("10 Gbit Ethernet", 10e9 / 8, _ETHERNET_S),
    "ethernet25": Link("25 Gbit Ethernet", 25e9 / 8, _ETHERNET_S),
    "ethernet100": Link("100 Gbit Ethernet", 100e9 / 8, _ETHERNET_S),
}
"""Nominal links by name.

The bandwidths are the standards' figures for one direction; real copies reach 70 to 90% of them.
Sources: PCI Express Base Specification 3.0 (2010), 4.0 (2017), 5.0 (2019); NVIDIA's white papers on
V100 (2017), A100 (2020), H100 (2022), whose 300, 600 and 900 GB/s add both directions; IEEE 802.3ae
(2002), 802.3by (2016), 802.3ba (2010). No standard gives a latency: these are assumed round
numbers. Where latency matters, use `measure_link` or give a `Link`.
"""


def find_link(link: str | Link | None) -> Link | None:
    """The preset of a name (`"nvlink"` is the latest); a `Link` or `None` comes back unchanged."""
    if link is None or isinstance(link, Link):
        return link
    name = link.lower() if isinstance(link, str) else None
    name = "nvlink4" if name == "nvlink" else name
    if name is None or name not in PRESETS:
        raise ValueError(
            f"`link` must be one of {', '.join(map(repr, PRESETS))}, 'nvlink', or a `Link`. "
            f"Received: link={link!r}.{did_you_mean(name, PRESETS)} For other links give "
            "`Link(name, bytes_per_s, latency_s)`."
        )
    return PRESETS[name]


def find_host_link(per_host: Any, host_link: Any, counts: Sequence[int]) -> Link | None:
    """The link between hosts, `None` if there is one host."""
    if per_host is not None:
        per_host = positive_integer("devices_per_host", per_host)
    several = per_host is not None and max(counts) > per_host
    if several != (host_link is not None):
        raise ValueError(
            "`devices_per_host` and `host_link` must be given together, and only if there are more "
            f"devices than a host has. Received: devices_per_host={per_host!r}, "
            f"host_link={host_link!r} and n_gpus={tuple(counts)!r}. Give devices_per_host=8, "
            "host_link='ethernet25', for example."
        )
    odd = [count for count in counts if per_host and count > per_host and count % per_host]
    if odd:
        raise ValueError(
            "`n_gpus` above `devices_per_host` must be multiples of it: each host has as many. "
            f"Received: n_gpus={tuple(counts)!r} and devices_per_host={per_host}, which does not "
            f"divide {odd[0]}. Give n_gpus=(1, {2 * (per_host or 1)}), for example."
        )
    return find_link(host_link)


def default_link() -> Link:
    """The link between the first two devices; PCIe 4.0 if there is only one."""
    return measure_link() if len(choose_devices(None, None)) > 1 else PRESETS["pcie4"]


def measure_link(source: str | None = None, target: str | None = None, *, repeats: int = 9) -> Link:
    """Times copies between two devices of this process: the medians of small and large blocks.

    Args:
        source: name of the device to copy from; `None` for the first one.
        target: name of the device to copy to; `None` for the second one.
        repeats: how often to copy each block.

    Returns:
        The link in this direction. Virtual devices on TensorFlow share their memory, and so
        copies between them cost nothing.

    Raises:
        ValueError: if there are no two such devices, or an argument is no name or no positive
            integer.

    Example:
        >>> measure_link("cpu:0", "cpu:1", repeats=1).name
        'cpu:0 to cpu:1'
    """
    repeats = positive_integer("repeats", repeats)
    if source is None or target is None:
        pool = choose_devices(None, None)
        if len(pool) < 2:
            raise ValueError(
                f"A link needs two devices. Received: source={source!r}, target={target!r}, and "
                f"the only device here is {pool[0]!r}. Use a preset instead: link='pcie4', for "
                "example."
            )
        source, target = source or pool[0], target or pool[1]
    names = [name_of(one) for one in (source, target)]
    found = [one for one in names if one and engines.current().find_device(one) is not None]
    if len(found) < 2 or found[0] == found[1]:
        raise ValueError(
            "`source` and `target` must be the names of two devices. Received: "
            f"source={source!r}, target={target!r}. Take two of what `list_devices()` gives: "
            f"{', '.join(list_devices())}."
        )
    source, target = choose_devices(None, found)
    engine, name = engines.current(), f"{source} to {target}"
    is_one_host = engine.host_of(source) == engine.host_of(target)
    if engine.shares_memory and is_one_host and are_virtual([source, target]):
        return Link(name, math.inf)
    with engine.on_host():
        blocks = [keras.ops.convert_to_tensor(np.ones(n // 4, "float32")) for n in (_SMALL, _LARGE)]
    small, large = (engine.copy(one, source) for one in blocks)
    # A step's copies follow one another, without a call of Python for each.
    once, often = engine.relay([target]), engine.relay([target, *[source, target] * _TURNS])
    runs = (
        lambda: once(small),
        lambda: often(small),
        lambda: engine.copy(small, target),
        lambda: engine.copy(large, target),
    )
    # The first round also traces, and allocates memory.
    _, *rounds = [[timeit.timeit(run, number=1) for run in runs] for _ in range(repeats + 1)]
    first, all_turns, shorter, longer = map(statistics.median, zip(*rounds))
    latency = max(all_turns - first, 0.0) / (2 * _TURNS)
    return fit_link(name, _SMALL, latency, _LARGE, latency + longer - shorter)


def fit_link(name: str, size: float, seconds: float, larger: float, longer: float) -> Link:
    """The link on which `size` bytes take `seconds`, and `larger` ones take `longer`."""
    if longer <= seconds:  # the extra bytes took no measurable time
        return Link(name, math.inf, seconds)
    speed = (larger - size) / (longer - seconds)
    return Link(name, speed, max(seconds - size / speed, 0.0))
