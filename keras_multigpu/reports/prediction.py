"""How long a step on n devices takes: arithmetic on a few figures, without a device.

A step takes what the busiest device computes, and what it sends and receives. Nothing is taken to
overlap unless that is said, so a prediction errs towards the slow side.

One device does not show how often the part of a step that does not depend on the rows (launching
operations above all) has to be paid on n devices: once, if they do it side by side, or n times, if
one process does it for one after the other. So a prediction is a range. The step that is named has
it paid by each further device for a quarter: by processor time, about what `benchmarks.prediction`
found on virtual devices.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from keras_multigpu.reports.links import Link
from keras_multigpu.reports.workload import Load

_PAID = 0.25  # of what does not depend on the rows, by each further device


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step on n devices.

    Attributes:
        mode: the mode's name.
        devices: their number.
        compute_s: the part of the step that is computed, in seconds.
        rows_s: the part of that which depends on the rows, with processors that are shared.
        transfer_s: the part in which all wait for copies, in seconds.
        alone_s: the time of the same on one device, in seconds.
        load: what it was found from.
        least_s: what a step takes at least, in seconds.
        most_s: what it takes at most.
        is_measured: whether the step was timed on so many devices.
    """

    mode: str
    devices: int
    compute_s: float
    rows_s: float
    transfer_s: float
    alone_s: float
    load: Load
    least_s: float
    most_s: float
    is_measured: bool = False

    @property
    def step_s(self) -> float:
        """The time of a step, in seconds: what is likely in the range, or the median timed."""
        return self.compute_s + self.transfer_s

    @property
    def speedup(self) -> float:
        """How many times as fast as one device."""
        return self.alone_s / self.step_s

    @property
    def speedup_range(self) -> tuple[float, float]:
        """Between what and what the speed-up is."""
        return self.alone_s / self.most_s, self.alone_s / self.least_s

    @property
    def efficiency(self) -> float:
        """The speed-up, as a part of that which so many devices could bring."""
        return self.speedup / self.devices

    @property
    def is_wide(self) -> bool:
        """Whether the range is too wide to decide by: its ends differ by more than 30%."""
        return self.most_s > 1.3 * self.least_s


def predict(
    mode: str,
    devices: int,
    load: Load,
    link: Link,
    processors: float | None = None,
    overlap: float = 0.0,
    host_link: Link | None = None,
) -> Prediction:
    """The time of a step: what crosses inside a host goes before what crosses between hosts.

    Args:
        mode: the mode's name.
        devices: their number.
        load: what the mode makes of the workload on them.
        link: the link between any two of them in a host.
        processors: as in `Workload`.
        overlap: the part of the copies that is hidden behind computations.
        host_link: a host's link to the other hosts; `None` for the same as `link`.

    Example:
        Two devices with half of the rows each, and 4 bytes to send and receive on a link of 8 a
        second:

        >>> from keras_multigpu.reports.workload import Traffic
        >>> load = Load(1.0, 2.0, 2.0, Traffic(4, 4), None)
        >>> predict("data", 2, load, Link("slow", 8)).step_s
        2.0

        Half a second that does not depend on the rows is paid once, or by each device:

        >>> load = Load(1.0, 2.0, 2.5, Traffic(), None, fixed_s=0.5)
        >>> found = predict("data", 2, load, Link("slow", 8))
        >>> found.least_s, found.step_s, found.most_s
        (1.5, 1.625, 2.0)
    """
    rows = load.rows_s if processors is None else max(load.rows_s, load.total_s / processors)
    copying = load.traffic.seconds(link) + load.between.seconds(host_link or link)
    transfer = (1 - overlap) * copying
    paid = (1, 1 + _PAID * (devices - 1), devices)
    least, likely, most = (rows + times * load.fixed_s for times in paid)
    ends = (least + transfer, most + transfer)
    return Prediction(mode, devices, likely, rows, transfer, load.alone_s, load, *ends)


def with_times(one: Prediction, rounds: Sequence[float], alone_s: float) -> Prediction:
    """A prediction whose step, and that on one device, were timed instead.

    Args:
        one: the prediction, which says what of the step goes into copies.
        rounds: the time of a step in each round, in seconds.
        alone_s: the time of the same on one device, in seconds.
    """
    step = statistics.median(rounds)
    transfer = min(one.transfer_s, step)
    return dataclasses.replace(
        one,
        compute_s=step - transfer,
        transfer_s=transfer,
        alone_s=alone_s,
        least_s=min(rounds),
        most_s=max(rounds),
        is_measured=True,
    )


def widen(one: Prediction, rounds: Sequence[float]) -> Prediction:
    """A prediction that is as uncertain as the time on one device that it was made from.

    Args:
        one: the prediction.
        rounds: the time of a step on one device in each round, in seconds.
    """
    middle = statistics.median(rounds)
    low, high = min(rounds) / middle, max(rounds) / middle
    return dataclasses.replace(one, least_s=low * one.least_s, most_s=high * one.most_s)
