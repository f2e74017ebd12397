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
        step_times: the time of a step in each repeat, in seconds, without what an epoch takes
            besides its steps; empty where it was not measured apart.
        epochs: the epochs of a repeat.

    Example:
        >>> run = Run(2, (5.0, 4.0, 9.0), steps=10, step_times=(0.4, 0.3, 0.5))
        >>> run.median, run.step_seconds, run.epoch_seconds
        (5.0, 0.4, 1.0)
    """

    devices: int
    seconds: tuple[float, ...]
    loss: float | None = None
    batch_size: int | None = None
    steps: int | None = None
    step_times: tuple[float, ...] = ()
    epochs: int = 1

    @property
    def median(self) -> float:
        """The median time of a repeat, in seconds."""
        return statistics.median(self.seconds)

    @property
    def step_seconds(self) -> float | None:
        """The median time of a batch, in seconds."""
        if self.step_times:
            return statistics.median(self.step_times)
        return self.median / self.steps if self.steps else None

    @property
    def epoch_seconds(self) -> float | None:
        """What an epoch takes besides its steps, in seconds; `None` where that is not known."""
        if not self.step_times or not self.steps:
            return None
        rest = [all_s - self.steps * one for all_s, one in zip(self.seconds, self.step_times)]
        return max(statistics.median(rest), 0.0) / self.epochs


def comparable_times(run: Run, other: Run) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The times by which two runs compare: those of their steps, or else of their repeats.

    Runs may differ in their numbers of steps (with larger batches there are fewer), and what an
    epoch takes besides does not depend on the devices.
    """
    if run.step_times and other.step_times:
        return run.step_times, other.step_times
    if run.steps and other.steps and run.steps != other.steps:
        return (
            tuple(one / run.steps for one in run.seconds),
            tuple(one / other.steps for one in other.seconds),
        )
    return run.seconds, other.seconds


def find_speedup(run: Run, base: Run, *, weak: bool = False) -> float:
    """How many times as fast a run is as another one: its steps, where their time is known.

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
    own, others = comparable_times(run, base)
    return work * statistics.median(others) / statistics.median(own)


def find_efficiency(run: Run, base: Run, *, weak: bool = False) -> float:
    """The speed-up, as a part of that which so many more devices could bring.

    Example:
        >>> find_efficiency(Run(4, (30.0,)), Run(1, (60.0,)))
        0.5
        >>> find_efficiency(Run(4, (30.0,)), Run(2, (60.0,)))
        1.0
    """
    return find_speedup(run, base, weak=weak) * base.devices / run.devices
