"""Predicts the time of a step on n devices: arithmetic on a few figures, without a device.

A step takes the busiest device's computing time plus its copies; nothing overlaps unless stated,
so predictions err towards the slow side. The part that doesn't depend on the rows is paid once, or
by each device: a prediction is a range. In the likely step each further device pays a quarter of
it, about what `benchmarks.prediction` found on virtual devices, by processor time.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from keras_multigpu.reports.interconnect import Link

_PAID = 0.25  # of the part that doesn't depend on the rows, by each further device


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The bytes that the busiest device sends and receives in a step."""

    sent: float = 0.0
    received: float = 0.0
    copies: float = 0.0  # one after the other
    duplex: bool = False  # sends and receives at the same time

    def __add__(self, other: Traffic) -> Traffic:
        sums = (self.sent + other.sent, self.received + other.received, self.copies + other.copies)
        return Traffic(*sums, self.duplex)

    def seconds(self, link: Link) -> float:
        """The time that this takes on a link."""
        both = (self.sent, self.received)
        return link.seconds(max(both) if self.duplex else sum(both), self.copies)


@dataclasses.dataclass(frozen=True)
class Load:
    """What a mode makes of a workload on n devices."""

    rows_s: float  # the busiest device's seconds for its rows
    total_s: float  # those of all devices together
    alone_s: float  # one device's seconds for all the work
    traffic: Traffic
    memory: int | None  # the busiest device's bytes, if known
    between: Traffic = Traffic()  # of the busiest host, with other hosts
    fixed_s: float = 0.0  # the part that doesn't depend on the rows


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step on n devices, from `least_s` to `most_s` seconds."""

    mode: str
    devices: int
    compute_s: float  # of the likely step, computing
    rows_s: float  # of that, on rows, with shared processors
    transfer_s: float  # of the likely step, waiting for copies
    alone_s: float  # the same work on one device
    load: Load
    least_s: float
    most_s: float
    is_measured: bool = False  # on so many devices
    alone_rounds: tuple[float, ...] = ()  # if so, the same work on one device in each round

    @property
    def step_s(self) -> float:
        """The likely time of a step in seconds, or the median if it was timed."""
        return self.compute_s + self.transfer_s

    @property
    def speedup(self) -> float:
        """The speed-up over one device."""
        return self.alone_s / self.step_s

    @property
    def speedup_range(self) -> tuple[float, float]:
        """The smallest and the largest speed-up; of a prediction not above the devices."""
        alone = self.alone_rounds or (self.alone_s,)
        low, high = min(alone) / self.most_s, max(alone) / self.least_s
        return (low, high) if self.is_measured else (low, max(min(high, self.devices), low))

    @property
    def efficiency(self) -> float:
        """The speed-up divided by the number of devices."""
        return self.speedup / self.devices

    @property
    def is_undivided(self) -> bool:
        """Whether each device computes all rows, because the devices don't divide them."""
        load = self.load
        whole = load.rows_s >= 0.999 * (load.alone_s - load.fixed_s) > 0
        return self.mode == "data" and self.devices > 1 and whole

    @property
    def is_wide(self) -> bool:
        """Whether the ends differ by more than 30%: too wide to decide by."""
        low, high = self.speedup_range
        return high > 1.3 * low

    @property
    def sure_speedup(self) -> float:
        """The speed-up to decide by: that of the slow end if the range is wide."""
        return self.speedup_range[0] if self.is_wide else self.speedup

    def with_times(self, rounds: Sequence[float], alone: Sequence[float]) -> Prediction:
        """The same with timed steps of each round, and the same work on one device in each."""
        step, alone_s = statistics.median(rounds), statistics.median(alone)
        transfer = min(self.transfer_s, step)
        return dataclasses.replace(
            self, compute_s=step - transfer, transfer_s=transfer, alone_s=alone_s, is_measured=True,
            least_s=min(rounds), most_s=max(rounds),
            alone_rounds=tuple(alone) if self.devices > 1 else (),
        )  # fmt: skip

    def widened(self, rounds: Sequence[float]) -> Prediction:
        """The same with the uncertainty of the rounds on one device that it was made from."""
        middle = statistics.median(rounds)
        low, high = min(rounds) / middle, max(rounds) / middle
        return dataclasses.replace(self, least_s=low * self.least_s, most_s=high * self.most_s)


def predict(
    mode: str,
    devices: int,
    load: Load,
    link: Link,
    processors: float | None = None,  # how many devices they keep busy, if devices share them
    overlap: float = 0.0,  # the share of the copies that computations hide
    host_link: Link | None = None,  # of a host to the others; `None`: the same as `link`
) -> Prediction:
    """The time of a step in which copies within a host precede copies between hosts."""
    rows = load.rows_s if processors is None else max(load.rows_s, load.total_s / processors)
    copying = load.traffic.seconds(link) + load.between.seconds(host_link or link)
    transfer = (1 - overlap) * copying
    paid = (1, 1 + _PAID * (devices - 1), devices)
    least, likely, most = (rows + times * load.fixed_s for times in paid)
    ends = (least + transfer, most + transfer)
    return Prediction(mode, devices, likely, rows, transfer, load.alone_s, load, *ends)
