"""What is to be trained, and what a mode makes of it for each device: plain figures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from keras_multigpu.reports.links import Link


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The time of a training step on one device: `fixed_s + rows * row_s`.

    Args:
        fixed_s: seconds that don't depend on the batch: the update, launching operations, Python.
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
        rows_s: the seconds that the busiest device computes on its rows.
        total_s: the seconds that all devices compute on their rows, added up.
        alone_s: the seconds of a step on one device that does all of it.
        traffic: what the busiest device sends and receives.
        memory: the bytes that it keeps; `None` where that is not known.
        between: what the busiest host sends to other hosts and receives from them.
        fixed_s: the seconds of a step that don't depend on the rows, and no device saves another.
    """

    rows_s: float
    total_s: float
    alone_s: float
    traffic: Traffic
    memory: int | None
    between: Traffic = Traffic()
    fixed_s: float = 0.0
