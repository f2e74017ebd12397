"""Trainings on a number of devices, and how they compare."""

from __future__ import annotations

import dataclasses
import statistics


@dataclasses.dataclass(frozen=True)
class Run:
    """The trainings on one number of devices.

    Attributes:
        devices: how many there were.
        seconds: the time of each repeat, in seconds.
        loss: the loss at the end, `None` where it is not known.
        batch_size: rows of a batch, on all the devices together.
        steps: the batches of a repeat.

    Example:
        >>> Run(2, (5.0, 4.0, 9.0)).median
        5.0
    """

    devices: int
    seconds: tuple[float, ...]
    loss: float | None = None
    batch_size: int | None = None
    steps: int | None = None

    @property
    def median(self) -> float:
        """The median time of a repeat, in seconds."""
        return statistics.median(self.seconds)

    @property
    def step_seconds(self) -> float | None:
        """The median time of a batch, in seconds."""
        return self.median / self.steps if self.steps else None


def find_speedup(run: Run, base: Run, *, weak: bool = False) -> float:
    """How many times as fast a run is as another one.

    Args:
        run: the run in question.
        base: the one to compare with.
        weak: whether each device has a batch of the same size, so that n devices do n times the
            work in a step: the speed-up is then that of rows a second.

    Example:
        >>> find_speedup(Run(4, (30.0,)), Run(1, (60.0,)))
        2.0
        >>> find_speedup(Run(4, (80.0,)), Run(1, (60.0,)), weak=True)
        3.0
    """
    work = run.devices / base.devices if weak else 1.0
    return work * base.median / run.median


def find_efficiency(run: Run, base: Run, *, weak: bool = False) -> float:
    """The speed-up, as a part of that which so many more devices could bring.

    Example:
        >>> find_efficiency(Run(4, (30.0,)), Run(1, (60.0,)))
        0.5
        >>> find_efficiency(Run(4, (30.0,)), Run(2, (60.0,)))
        1.0
    """
    return find_speedup(run, base, weak=weak) * base.devices / run.devices
