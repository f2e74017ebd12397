"""What times on 1, 2, 4 devices say: speed-up, efficiency, a table, a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from keras_multigpu.reports.checks import check_counts, check_quantity
from keras_multigpu.reports.report import Column, Report
from keras_multigpu.reports.runs import Run, comparable_times, find_efficiency, find_speedup

_MUCH = 10  # epochs that take a tenth of a run besides their steps are worth a word


class ScalingReport(Report):
    """How long the same training takes on 1, 2, 4 devices.

    The speed-ups are those over the smallest number of devices: of a step where its time is known,
    and of a whole run otherwise.

    Args:
        runs: one for each number of devices.
        weak: whether each device was given a batch of the same size (weak scaling), or all
            devices together (strong scaling).
        notes: sentences to print below the table, after what the figures say themselves.
        settings: what the figures hold for.
        title: one line.

    Attributes:
        runs: the runs, by the number of devices.
        speedups: that of each run.
        efficiencies: that of each run.

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
        notes: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        title: str = "Scaling",
    ):
        self.runs = tuple(sorted(runs, key=lambda run: run.devices))
        base = self.runs[0]
        self.speedups = [find_speedup(run, base, weak=weak) for run in self.runs]
        self.efficiencies = [find_efficiency(run, base, weak=weak) for run in self.runs]
        columns, rows = self._table()
        notes = [*_conclude(self.runs, self.speedups, self.efficiencies, weak), *notes]
        super().__init__(title, columns, rows, notes, settings)

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
        """A report of figures that were measured elsewhere.

        Args:
            n_gpus: the numbers of devices.
            seconds: the time on each, in seconds.
            losses: the loss on each.
            weak: as in `ScalingReport`.
            settings: as in `ScalingReport`.
            title: one line.

        Raises:
            ValueError: if there are not as many figures as numbers of devices, or one is not a
                number above zero.

        Example:
            A published experiment, an autoencoder recommender on 1 to 4 GPUs:

            >>> report = ScalingReport.from_figures(
            ...     (1, 2, 3, 4),
            ...     (857.7, 562.5, 384.4, 263.6),
            ...     (0.0281, 0.0283, 0.0262, 0.0258),
            ...     title="An autoencoder recommender",
            ... )
            >>> print(report)
            An autoencoder recommender
            <BLANKLINE>
            devices  time (s)    loss  speed-up  efficiency
                  1     857.7  0.0281      1.00        100%
                  2     562.5  0.0283      1.52         76%
                  3     384.4  0.0262      2.23         74%
                  4     263.6  0.0258      3.25         81%
            <BLANKLINE>
            4 devices are 3.25 times as fast as 1, an efficiency of 81%.
        """
        counts = check_counts("n_gpus", n_gpus)
        for name, values in {"seconds": seconds, "losses": losses}.items():
            if values is not None and len(values) != len(counts):
                raise ValueError(
                    f"`{name}` must have a figure for each of the {len(counts)} numbers of "
                    f"devices, n_gpus={counts}. Received: {name}={values!r}. Give one for each."
                )
        times = [check_quantity("seconds", value) for value in seconds]
        ends: Sequence[float | None] = losses or [None] * len(counts)
        runs = [Run(count, (time,), loss) for count, time, loss in zip(counts, times, ends)]
        return cls(runs, weak=weak, settings=settings, title=title)

    def draw(self, figure: Any) -> None:
        """Draws time and speed-up against the number of devices."""
        counts = [run.devices for run in self.runs]
        medians = [run.median for run in self.runs]
        figure.suptitle(self.title)
        left, right = figure.subplots(1, 2)
        spread = [
            [run.median - min(run.seconds) for run in self.runs],
            [max(run.seconds) - run.median for run in self.runs],
        ]
        left.errorbar(counts, medians, yerr=spread, marker="o", capsize=4)
        left.set(xlabel="devices", ylabel="time (s)", ylim=(0, None))
        ideal = [count / counts[0] for count in counts]
        right.plot(counts, ideal, "--", color="gray", label="ideal")
        right.plot(counts, self.speedups, marker="o", label="measured")
        for count, speedup in zip(counts, self.speedups):
            right.annotate(
                f"{speedup:.2f}",
                (count, speedup),
                (0, -14),
                textcoords="offset points",
                ha="center",
            )
        right.set(xlabel="devices", ylabel="speed-up", ylim=(0, None))
        right.legend()
        for axes in (left, right):
            axes.set_xticks(counts)
            axes.margins(x=0.1)
            axes.grid(alpha=0.3)

    def _table(self) -> tuple[list[Column], list[list[Any]]]:
        """The columns for which there are figures, and the rows."""
        digits = f".{_decimals(run.median for run in self.runs)}f"
        table: dict[Column, list[Any]] = {
            Column("devices"): [run.devices for run in self.runs],
            Column("batch size"): [run.batch_size for run in self.runs],
            Column("time", "s", digits): [run.median for run in self.runs],
            Column("fastest", "s", digits): [_among_several(min, run) for run in self.runs],
            Column("slowest", "s", digits): [_among_several(max, run) for run in self.runs],
            Column("step", "s", ".4g"): [run.step_seconds for run in self.runs],
            Column("epoch besides", "s", ".4g"): [run.epoch_seconds for run in self.runs],
            Column("loss", "", ".4g"): [run.loss for run in self.runs],
            Column("speed-up", "", ".2f"): self.speedups,
            Column("efficiency", "", ".0%"): self.efficiencies,
        }
        known = {column: v for column, v in table.items() if any(one is not None for one in v)}
        return list(known), [list(row) for row in zip(*known.values())]


def _among_several(choose: Any, run: Run) -> float | None:
    return choose(run.seconds) if len(run.seconds) > 1 else None


def _decimals(values: Any) -> int:
    """How many decimals show four digits of the smallest value."""
    return min(max(3 - math.floor(math.log10(min(values))), 0), 9)


def _conclude(
    runs: Sequence[Run], speedups: Sequence[float], efficiencies: Sequence[float], weak: bool
) -> list[str]:
    """What the figures say, in words."""
    base, *others = runs
    if not others:
        return []
    unit = ", in rows a second" if weak else ""
    best = max(range(1, len(runs)), key=speedups.__getitem__)
    count, speedup = runs[best].devices, speedups[best]
    if speedup > 1:
        notes = [
            f"{count} devices are {speedup:.2f} times as fast as {base.devices}{unit}, an "
            f"efficiency of {efficiencies[best]:.0%}."
        ]
    else:
        notes = [
            f"More devices are no faster than {base.devices}: {count} take {1 / speedup:.2f} times "
            f"as long{unit and ' for each row'}."
        ]
    besides = (base.epoch_seconds or 0) * base.epochs / base.median
    if _MUCH * besides > 1:
        notes.append(
            f"The speed-ups compare steps. What epochs take besides is {besides:.0%} of a run on "
            f"{_devices(base.devices)}: the epochs are short."
        )
    alike = [str(run.devices) for run in others if not weak and _overlap(run, base)]
    if alike:
        notes.append(
            f"On {' and '.join(alike)} devices the repeats overlap with those on {base.devices}: "
            "the difference may be chance."
        )
    return notes


def _devices(count: int) -> str:
    return f"{count} device{'' if count == 1 else 's'}"


def _overlap(run: Run, base: Run) -> bool:
    """Whether two runs that were repeated differ by less than their repeats."""
    first, second = sorted(comparable_times(run, base), key=min)
    return len(first) > 1 and max(first) >= min(second)
