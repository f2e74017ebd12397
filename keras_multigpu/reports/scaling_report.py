"""The results of training on 1, 2, 4 devices: speed-up, efficiency, a table, a plot."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from keras_multigpu.arguments import device_counts, number_of, quantity
from keras_multigpu.reports.forms import listed, spread_devices
from keras_multigpu.reports.report import Column, Report

_MUCH = 0.1  # of a run, for what its epochs take besides their steps: worth a note


@dataclasses.dataclass(frozen=True)
class Run:
    """The trainings on one number of devices.

    Attributes:
        devices: the number of devices.
        seconds: the time of each repeat, in seconds.
        loss: the loss at the end, `None` if unknown.
        batch_size: rows of a batch, on all the devices together.
        steps: the batches of a repeat.
        step_times: the time of a step in each repeat, in seconds, without the time that epochs
            take besides their steps; empty if this was not measured separately.
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
        """The time of an epoch besides its steps, in seconds; `None` if unknown."""
        if not self.step_times or not self.steps:
            return None
        rest = [all_s - self.steps * one for all_s, one in zip(self.seconds, self.step_times)]
        return max(statistics.median(rest), 0.0) / self.epochs


class ScalingReport(Report):
    """How long the same training takes on 1, 2, 4 devices.

    The speed-ups compare with the smallest number of devices: steps if their time is known, or
    else whole runs.

    Args:
        runs: one for each number of devices.
        weak: whether `batch_size` was the same per device (weak scaling) rather than for all
            devices together (strong scaling).
        members: whether n devices train n members of a committee, which is n times the work.
        notes, settings, title: as in `Report`.

    Attributes:
        runs: the runs, by the number of devices.
        speedups: the speed-up of each run.
        efficiencies: the efficiency of each run: the speed-up by the ratio of the devices.

    Example:
        >>> report = ScalingReport([Run(1, (8.0, 8.2, 8.1)), Run(2, (4.5, 4.6, 4.4))])
        >>> [f"{speedup:.2f}" for speedup in report.speedups]
        ['1.00', '1.80']
    """

    def __init__(
        self,
        runs: Sequence[Run],
        *,
        weak: bool = False,
        members: bool = False,
        notes: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        title: str = "Scaling",
    ):
        self.runs = tuple(sorted(runs, key=lambda run: run.devices))
        self._times, base = _comparable_times(self.runs), self.runs[0]
        medians = [statistics.median(times) for times in self._times]
        work = [_more_work(run, base, weak, members) for run in self.runs]
        self.speedups = [more * medians[0] / median for more, median in zip(work, medians)]
        self.efficiencies = [
            speedup * base.devices / run.devices for run, speedup in zip(self.runs, self.speedups)
        ]
        kinds = {"rows": weak, "members": members}
        table = self._table()
        notes = [*self._conclude([kind for kind, is_more in kinds.items() if is_more]), *notes]
        super().__init__(title, list(table), list(zip(*table.values())), notes, settings)

    @classmethod
    def from_figures(
        cls,
        n_gpus: Sequence[int],
        seconds: Sequence[float],
        losses: Sequence[float] | None = None,
        *,
        weak: bool = False,
        settings: Mapping[str, Any] | None = None,
        title: str = "Scaling",
    ) -> ScalingReport:
        """A report on figures that were measured elsewhere.

        Args:
            n_gpus: the numbers of devices.
            seconds: the time on each, in seconds.
            losses: the loss on each.
            weak: as in `ScalingReport`.
            settings: as in `ScalingReport`.
            title: one line.

        Raises:
            ValueError: if there are not as many figures as numbers of devices, or a time is not a
                number above zero.

        Example:
            A published experiment, an autoencoder recommender on 1 to 4 GPUs:

            >>> seconds, losses = (857.7, 562.5, 384.4, 263.6), (0.0281, 0.0283, 0.0262, 0.0258)
            >>> report = ScalingReport.from_figures((1, 2, 3, 4), seconds, losses)
            >>> report.notes
            ['4 devices are 3.25 times as fast as 1, an efficiency of 81%.']
        """
        counts = device_counts("n_gpus", n_gpus)
        for name, values in {"seconds": seconds, "losses": losses}.items():
            if values is not None and len(values) != len(counts):
                raise ValueError(
                    f"`{name}` must have a figure for each of the {len(counts)} numbers of "
                    f"devices, n_gpus={counts}. Received: {name}={values!r}. Give {len(counts)}."
                )
        times = [quantity("seconds", value) for value in seconds]
        ends: Sequence[float | None] = losses or [None] * len(counts)
        runs = [Run(count, (time,), loss) for count, time, loss in zip(counts, times, ends)]
        return cls(runs, weak=weak, settings=settings, title=title)

    def draw(self, figure: Any) -> None:
        """Draws time and speed-up against the number of devices."""
        counts = [run.devices for run in self.runs]
        figure.suptitle(self.title)
        left, right = figure.subplots(1, 2)
        below = [run.median - min(run.seconds) for run in self.runs]
        above = [max(run.seconds) - run.median for run in self.runs]
        medians = [run.median for run in self.runs]
        left.errorbar(counts, medians, yerr=[below, above], marker="o", capsize=4)
        left.set(ylabel="time (s)")
        ideal = [count / counts[0] for count in counts]
        right.plot(counts, ideal, "--", color="gray", label="ideal")
        right.plot(counts, self.speedups, marker="o", label="measured")
        for place, (count, speedup) in enumerate(zip(counts, self.speedups)):
            near = self.speedups[max(place - 1, 0) : place + 2]
            self._write(right, count, speedup, rises=near[-1] >= near[0])
        right.set(ylabel="speed-up")
        right.legend()
        spread_devices((left, right), counts, right)
        right.margins(x=0.15)  # for the last figure

    def _write(self, axes: Any, count: int, speedup: float, *, rises: bool) -> None:
        """Writes a speed-up below or above its point, on the side where the curve is not."""
        last = self.runs[-1].devices
        is_low = last <= 8 and speedup < last / self.runs[0].devices / 10  # no room below
        is_right = rises != is_low
        axes.annotate(
            f"{speedup:.{max(3 - len(str(int(speedup))), 0)}f}",  # three digits
            (count, speedup),
            (3 if is_right else -3, 6 if is_low else -14),
            textcoords="offset points",
            ha="left" if is_right else "right",
        )

    def _table(self) -> dict[Column, list[Any]]:
        """The columns that have figures."""
        smallest = min(run.median for run in self.runs)  # with four digits
        digits = f".{min(max(3 - math.floor(math.log10(smallest)), 0), 9)}f"
        repeated = [run.seconds if len(run.seconds) > 1 else () for run in self.runs]
        table: dict[Column, list[Any]] = {
            Column("devices"): [run.devices for run in self.runs],
            Column("batch size"): [run.batch_size for run in self.runs],
            Column("time", "s", digits): [run.median for run in self.runs],
            Column("fastest", "s", digits): [min(times, default=None) for times in repeated],
            Column("slowest", "s", digits): [max(times, default=None) for times in repeated],
            Column("step", "s", ".4g"): [run.step_seconds for run in self.runs],
            Column("epoch overhead", "s", ".4g"): [run.epoch_seconds for run in self.runs],
            Column("loss", "", ".4g"): [run.loss for run in self.runs],
            Column("speed-up", "", ".2f"): self.speedups,
            Column("efficiency", "", ".0%"): self.efficiencies,
        }
        return {column: v for column, v in table.items() if any(one is not None for one in v)}

    def _conclude(self, grows: Sequence[str]) -> list[str]:
        """The conclusions in words; `grows` are what more devices have more of."""
        base = self.runs[0]
        if len(self.runs) == 1:
            alone = "There is no run to compare with: add 1 to the numbers of devices."
            return [alone] if base.devices > 1 else []
        best = max(range(1, len(self.runs)), key=self.speedups.__getitem__)
        speedup, unit = f"{self.speedups[best]:.2f}", f"{' x '.join(grows)} per second"
        notes = [
            f"{self.runs[best].devices} devices are {speedup} times as fast as {base.devices}"
            f"{', in ' + unit if grows else ''}, an efficiency of "
            f"{self.efficiencies[best]:.0%}."
        ]
        if float(speedup) <= 1:
            notes = [f"More devices are no faster than {base.devices}: {notes[0]}"]
        overhead = (base.epoch_seconds or 0) * base.epochs / base.median
        if overhead > _MUCH and all(run.step_times for run in self.runs):
            devices = number_of(base.devices, "device")
            notes.append(
                f"The speed-ups compare steps. Epochs are short: on {devices}, {overhead:.0%} of a "
                "run is overhead of epochs, not steps."
            )
        pairs = zip(self.runs[1:], self._times[1:])
        alike = [str(run.devices) for run, times in pairs if _overlap(times, self._times[0])]
        if alike and not grows:
            notes.append(
                f"On {listed(alike)} devices the repeats overlap with those on {base.devices}: the "
                "difference may be chance."
            )
        return notes


def _more_work(run: Run, base: Run, weak: bool, members: bool) -> float:
    """How much more a step does: of rows, which the data may have fewer of, and of members."""
    devices = run.devices / base.devices
    has_sizes = run.batch_size and base.batch_size
    rows = (run.batch_size or 1) / (base.batch_size or 1) if has_sizes else devices
    return (rows if weak else 1.0) * (devices if members else 1.0)


def _comparable_times(runs: Sequence[Run]) -> list[Sequence[float]]:
    """Each run's times of a step if all are known, for larger batches make fewer; or of repeats."""
    if all(run.step_times for run in runs):  # an epoch of one batch has none
        return [run.step_times for run in runs]
    steps = [run.steps or 0 for run in runs]
    parts = steps if all(steps) else [1] * len(steps)
    return [[one / count for one in run.seconds] for run, count in zip(runs, parts)]


def _overlap(times: Sequence[float], others: Sequence[float]) -> bool:
    """Whether the times of two repeated runs overlap."""
    first, second = sorted((times, others), key=min)
    return len(first) > 1 and max(first) >= min(second)
