"""How long a step on n devices takes: arithmetic on a few figures, without a device.

A step takes what the busiest device computes, and what it sends and receives. Nothing is taken to
overlap unless that is said, so a prediction errs towards the slow side.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from keras_multigpu.reports.links import Link


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The time of a training step on one device: `fixed_s + rows * row_s`.

    Args:
        fixed_s: seconds that don't depend on the batch: the update, the launching of operations.
        row_s: seconds for each row.

    Example:
        >>> StepTime(0.25, 0.5).seconds(2)
        1.25
    """

    fixed_s: float
    row_s: float

    def seconds(self, rows: float) -> float:
        """The time of a step on so many rows, in seconds."""
        return self.fixed_s + rows * self.row_s

    @classmethod
    def through(cls, rows: int, seconds: float, fewer: int, shorter: float) -> StepTime:
        """The times on a batch and on a smaller one, as a line that meets the larger one.

        Neither part is below zero: a smaller batch that takes longer is taken for chance.

        Example:
            >>> StepTime.through(4, 3.0, 2, 2.0)
            StepTime(fixed_s=1.0, row_s=0.5)
        """
        slope = (seconds - shorter) / (rows - fewer)
        row_s = min(max(slope, 0.0), seconds / rows)
        return cls(seconds - rows * row_s, row_s)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The bytes of a model that have to be kept, or moved.

    Attributes:
        weights: of all its variables.
        gradients: of those that are trained.
        tensors: how many variables it has.
        slots: of the optimizer's state.
        outputs: of the outputs for one row.
        activations: of what a step keeps for one row; `None` where that is not known.
        inputs: of the inputs for one row.
    """

    weights: int
    gradients: int
    tensors: int
    slots: int
    outputs: int
    activations: int | None
    inputs: int = 0


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a model is spread in mode `"model"`.

    Args:
        size: the bytes of the activations that cross in a forward pass on the whole batch; their
            gradients cross the other way.
        copies: how many tensors those are.
        share: the part of the work that the busiest device has: 1 for a chain, whose parts wait for
            each other, and 1 / n for n equal branches.
        memory: the bytes that the busiest device keeps, where that is known.

    Example:
        >>> branches = Cut(size=25_600, copies=1, share=0.5)  # two equal ones that meet at the end
        >>> branches.share
        0.5
    """

    size: int
    copies: int
    share: float = 1.0
    memory: int | None = None


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is to be trained.

    Attributes:
        step: the time of a step on one device.
        batch_size: rows of a batch.
        sizes: the model's.
        partitions: whether the backend's compiler spreads the step, as on JAX: weights stay on the
            devices, gradients are added up in a ring, and a batch that the devices don't divide
            is computed whole on each.
        processors: how many devices' worth of processors there are; `None` if each device is one.
            Virtual devices are parts of one.
        cuts: how the model is spread in mode `"model"`, by the number of devices.
        per_host: how many devices a host has; `None` if one host has all of them.
    """

    step: StepTime
    batch_size: int
    sizes: Sizes
    partitions: bool = False
    processors: float | None = None
    cuts: Mapping[int, Cut] = dataclasses.field(default_factory=dict)
    per_host: int | None = None

    def hosts(self, devices: int) -> int:
        """How many hosts have so many devices."""
        return 1 if self.per_host is None else math.ceil(devices / self.per_host)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What the busiest device sends and receives in one step.

    Attributes:
        sent: bytes.
        received: bytes.
        copies: how many copies that is, one after the other.
        duplex: whether it sends and receives at the same time.
    """

    sent: float = 0.0
    received: float = 0.0
    copies: float = 0.0
    duplex: bool = False

    def seconds(self, link: Link) -> float:
        """How long that takes on a link."""
        both = (self.sent, self.received)
        return link.seconds(max(both) if self.duplex else sum(both), self.copies)


@dataclasses.dataclass(frozen=True)
class Load:
    """What a mode makes of a workload on n devices.

    Attributes:
        busiest_s: the seconds that the busiest device computes.
        total_s: the seconds that all devices compute, added up.
        alone_s: the seconds that the same would take on one device.
        traffic: what the busiest device sends and receives.
        memory: the bytes that it keeps; `None` where that is not known.
        between: what the busiest host sends to other hosts and receives from them.
    """

    busiest_s: float
    total_s: float
    alone_s: float
    traffic: Traffic
    memory: int | None
    between: Traffic = Traffic()


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step on n devices.

    Attributes:
        mode: the mode's name.
        devices: their number.
        compute_s: the part of the step that is computed, in seconds.
        transfer_s: the part in which all wait for copies, in seconds.
        alone_s: the time of the same on one device, in seconds.
        load: what it was found from.
    """

    mode: str
    devices: int
    compute_s: float
    transfer_s: float
    alone_s: float
    load: Load

    @property
    def step_s(self) -> float:
        """The time of a step, in seconds."""
        return self.compute_s + self.transfer_s

    @property
    def speedup(self) -> float:
        """How many times as fast as one device."""
        return self.alone_s / self.step_s

    @property
    def efficiency(self) -> float:
        """The speed-up, as a part of that which so many devices could bring."""
        return self.speedup / self.devices


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

        >>> load = Load(1.0, 2.0, 2.0, Traffic(4, 4), None)
        >>> predict("data", 2, load, Link("slow", 8)).step_s
        2.0
    """
    compute = load.busiest_s
    if processors is not None:
        compute = max(compute, load.total_s / processors)
    copying = load.traffic.seconds(link) + load.between.seconds(host_link or link)
    transfer = (1 - overlap) * copying
    return Prediction(mode, devices, compute, transfer, load.alone_s, load)


def find_busiest(transfers: Iterable[Any], *, duplex: bool = False) -> Traffic:
    """The traffic of the busiest device, from the copies that were counted.

    Args:
        transfers: values with the attributes `source` and `target` (devices), `bytes` and
            `copies`, as `reports.transfers` lists them.
        duplex: as in `Traffic`.
    """
    sent: dict[str, float] = {}
    received: dict[str, float] = {}
    copies: dict[str, float] = {}
    for one in transfers:
        sent[one.source] = sent.get(one.source, 0) + (one.bytes or 0)
        received[one.target] = received.get(one.target, 0) + (one.bytes or 0)
        for name in (one.source, one.target):
            copies[name] = copies.get(name, 0) + one.copies
    if not copies:
        return Traffic(duplex=duplex)
    busiest = max(copies, key=lambda name: (sent.get(name, 0) + received.get(name, 0), name))
    return Traffic(sent.get(busiest, 0), received.get(busiest, 0), copies[busiest], duplex)
