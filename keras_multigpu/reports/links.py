"""Links between devices: nominal ones by name, and those of this machine, measured."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time

import keras
import numpy as np

from keras_multigpu import engines
from keras_multigpu.devices import choose_devices
from keras_multigpu.reports.checks import check_count, check_quantity

_SMALL, _LARGE = 4 * 2**10, 64 * 2**20  # bytes


@dataclasses.dataclass(frozen=True)
class Link:
    """What a copy from one device to another takes: `latency_s + bytes / bytes_per_s`.

    The model is Hockney's ("The communication challenge for MPP", Parallel Computing 20, 1994).
    Each device is taken to have a link of its own, on which it sends and receives at the
    same time.

    Args:
        name: what to call it.
        bytes_per_s: its bandwidth in one direction, in bytes a second; `math.inf` where copies
            cost nothing, as between the parts of one processor.
        latency_s: the seconds that a copy takes however small it is.

    Raises:
        ValueError: if the bandwidth is not above 0, or the latency is below.

    Example:
        >>> link = Link("a slow one", bytes_per_s=1e6, latency_s=0.5)
        >>> link.seconds(2_000_000, copies=3)
        3.5
    """

    name: str
    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.bytes_per_s != math.inf:
            check_quantity("bytes_per_s", self.bytes_per_s)
        check_quantity("latency_s", self.latency_s, zero=True)

    def seconds(self, size: float, copies: float = 1) -> float:
        """How long it takes to send `size` bytes in a number of copies, one after the other."""
        return copies * self.latency_s + size / self.bytes_per_s

    def __str__(self) -> str:
        speed = "no limit" if math.isinf(self.bytes_per_s) else f"{self.bytes_per_s / 1e9:.4g} GB/s"
        return f"{self.name}: {speed} each way, {1e6 * self.latency_s:.3g} us a copy"


def _pcie(transfers_per_s: float) -> float:
    """Bytes a second of 16 lanes, of whose 130 bits 128 are data."""
    return 16 * transfers_per_s * 128 / 130 / 8


_PCIE_S, _NVLINK_S, _ETHERNET_S = 10e-6, 5e-6, 50e-6

PRESETS = {
    "pcie3": Link("PCIe 3.0 x16", _pcie(8e9), _PCIE_S),
    "pcie4": Link("PCIe 4.0 x16", _pcie(16e9), _PCIE_S),
    "pcie5": Link("PCIe 5.0 x16", _pcie(32e9), _PCIE_S),
    "nvlink2": Link("NVLink 2 (V100)", 6 * 25e9, _NVLINK_S),
    "nvlink3": Link("NVLink 3 (A100)", 12 * 25e9, _NVLINK_S),
    "nvlink4": Link("NVLink 4 (H100, H200)", 18 * 25e9, _NVLINK_S),
    "ethernet10": Link("10 Gbit Ethernet", 10e9 / 8, _ETHERNET_S),
    "ethernet25": Link("25 Gbit Ethernet", 25e9 / 8, _ETHERNET_S),
    "ethernet100": Link("100 Gbit Ethernet", 100e9 / 8, _ETHERNET_S),
}
"""Nominal links by name.

The bandwidths are those of the standards, in one direction, and a device hardly ever sees more
than 70 to 90% of them: PCI Express Base Specification 3.0, 4.0 and 5.0 (8, 16 and 32 GT/s a lane,
16 lanes, 128 of 130 bits); NVIDIA's architecture white papers on V100, A100 and H100 (6, 12 and 18
links of 25 GB/s in each direction; the 300, 600 and 900 GB/s that are advertised count both); IEEE
802.3. No standard gives a latency: these are round numbers, assumed, of the order of what copies
between GPUs, and TCP within a room, take. Where they matter, measure (`measure_link`), or give a
`Link`.
"""


def find_link(link: str | Link | None) -> Link | None:
    """The link of a name in `PRESETS`; `"nvlink"` is the latest; a link is itself.

    Raises:
        ValueError: if there is none of that name.

    Example:
        >>> str(find_link("pcie4"))
        'PCIe 4.0 x16: 31.51 GB/s each way, 10 us a copy'
    """
    if link is None or isinstance(link, Link):
        return link
    name = "nvlink4" if link == "nvlink" else link
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(
            f"`link` must be one of {', '.join(map(repr, PRESETS))}, 'nvlink', or a `Link`. "
            f"Received: link={link!r}. Give `Link(name, bytes_per_s, latency_s)` for another."
        )
    return PRESETS[name]


def measure_link(source: str | None = None, target: str | None = None, *, repeats: int = 9) -> Link:
    """Times copies between two devices of this process.

    Blocks of 4 KiB and 64 MiB are copied in turn; the medians give latency and bandwidth.

    Args:
        source: the name of the device to copy from; `None` for the first one.
        target: the name of the device to copy to; `None` for the second one.
        repeats: how often each block is copied.

    Returns:
        A link in one direction. On TensorFlow, virtual devices share their memory and copy nothing:
        the bandwidth is then without limit, or nearly.

    Raises:
        ValueError: if there are no two such devices, or `repeats` is not above 0.

    Example:
        >>> measure_link("cpu:0", "cpu:1", repeats=1).name
        'cpu:0 to cpu:1'
    """
    check_count("repeats", repeats)
    if source is None or target is None:
        pool = choose_devices(None, None)
        if len(pool) < 2:
            raise ValueError(
                "A link needs two devices. Received: source=None, target=None, and the one device "
                f"here, {pool[0]!r}. Name a link instead: link='pcie4', say."
            )
        source, target = source or pool[0], target or pool[1]
    source, target = choose_devices(None, [source, target])
    small, large = (_Block(size, source, target) for size in (_SMALL, _LARGE))
    for _ in range(repeats):
        small.copy()
        large.copy()
    return fit_link(f"{source} to {target}", small.size, small.median, large.size, large.median)


def fit_link(name: str, size: float, seconds: float, larger: float, longer: float) -> Link:
    """The link on which two copies take what they took.

    Args:
        name: the link's name.
        size: the bytes of the smaller copy.
        seconds: the time that it took.
        larger: the bytes of the larger copy.
        longer: the time that it took, in seconds.

    Example:
        >>> fit_link("a link", 0, 1.0, 4, 3.0)
        Link(name='a link', bytes_per_s=2.0, latency_s=1.0)
    """
    if longer <= seconds:  # what is copied costs nothing that could be measured
        return Link(name, math.inf, seconds)
    speed = (larger - size) / (longer - seconds)
    return Link(name, speed, max(seconds - size / speed, 0.0))


class _Block:
    """A block of bytes on one device, copied to another."""

    def __init__(self, size: int, source: str, target: str):
        self.size = size
        self._target = target
        self._seconds: list[float] = []
        self._engine = engines.current()
        with self._engine.on_device("cpu:0"):
            values = keras.ops.convert_to_tensor(np.ones(size // 4, "float32"))
        self._values = self._engine.copy(values, source)
        self._engine.copy(self._values, target)  # the first copy takes memory from the system

    def copy(self) -> None:
        begin = time.perf_counter()
        self._engine.copy(self._values, self._target)
        self._seconds.append(time.perf_counter() - begin)

    @property
    def median(self) -> float:
        return statistics.median(self._seconds)
