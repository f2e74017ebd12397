"""Predictions as a table, and what they mean in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keras_multigpu.reports.prediction import Prediction
from keras_multigpu.reports.report import Column, Report
from keras_multigpu.reports.units import show_bytes, show_seconds

_GAIN, _EFFICIENCY = 1.05, 0.5
_MOVED = {
    "data": "weights and gradients",
    "tower": "weights, gradients and outputs",
    "committee": "outputs and their gradients",
    "model": "activations and their gradients",
}


_RANGES = (
    "A predicted step is at least what it takes if the devices pay side by side for what does not "
    "depend on the rows, and at most what it takes if they pay one after the other, by the fastest "
    "and the slowest round on one device; copies and computations are taken not to overlap."
)


class Advice(Report):
    """Whether several devices are worth it, and why.

    Args:
        predictions: one for each mode and number of devices.
        notes: sentences to print below the table, after the verdicts.
        settings: what the predictions hold for.
        title: one line.

    Attributes:
        predictions: the predictions, as given.
        verdicts: what to do, in words, by mode.

    Example:
        >>> import textwrap
        >>> from keras_multigpu.reports import Link
        >>> from keras_multigpu.reports.prediction import predict
        >>> from keras_multigpu.reports.workload import Load, Traffic
        >>> load = Load(0.02, 0.04, 0.04, Traffic(12e7, 12e7), memory=500_000_000)
        >>> advice = Advice([predict("data", 2, load, Link("slow", 1e10))])
        >>> print(textwrap.fill(advice.verdicts["data"], 80))
        Stay on one device: 2 in mode 'data' would take 1.10 times as long, because 24.0
        ms of 44.0 ms go into moving 240 MB of weights and gradients.
    """

    def __init__(
        self,
        predictions: Sequence[Prediction],
        *,
        notes: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        title: str = "Advice",
    ):
        self.predictions = tuple(predictions)
        by_mode: dict[str, list[Prediction]] = {}
        for one in self.predictions:
            by_mode.setdefault(one.mode, []).append(one)
        self.verdicts = {mode: decide(found) for mode, found in by_mode.items()}
        others = [f"{describe(one)}." for one in self.predictions if one.devices > 1]
        if any(one.devices > 1 and not one.is_measured for one in self.predictions):
            notes = [_RANGES, *notes]
        notes = [*self.verdicts.values(), *others, *notes]
        super().__init__(title, _COLUMNS, list(map(_row, self.predictions)), notes, settings)

    def draw(self, figure: Any) -> None:
        """Draws the predicted speed-up, and what a step consists of, against the devices."""
        figure.suptitle(self.title)
        left, right = figure.subplots(1, 2)
        labels = [f"{one.mode}, {one.devices}" for one in self.predictions]
        places = range(len(labels))
        compute = [1e3 * one.compute_s for one in self.predictions]
        left.barh(places, compute, label="computing")
        moving = [1e3 * one.transfer_s for one in self.predictions]
        left.barh(places, moving, left=compute, label="moving")
        left.set(xlabel="step (ms)", yticks=places, yticklabels=labels)
        left.invert_yaxis()
        left.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
        for mode in dict.fromkeys(one.mode for one in self.predictions):
            points = sorted((p.devices, p.speedup) for p in self.predictions if p.mode == mode)
            right.plot(*zip(*points), marker="o", label=mode)
            ends = sorted((p.devices, *p.speedup_range) for p in self.predictions if p.mode == mode)
            right.fill_between(*zip(*ends), alpha=0.2)
        counts = sorted({1, *(one.devices for one in self.predictions)})
        right.plot(counts, counts, "--", color="gray", label="ideal")
        right.set(xlabel="devices", ylabel="speed-up", ylim=(0, None), xticks=counts)
        right.legend()
        for axes in (left, right):
            axes.grid(alpha=0.3)


def decide(predictions: Sequence[Prediction]) -> str:
    """What to do, in words.

    Several devices are advised where they are faster by 5% at least and each does half of what it
    could: of those numbers the fastest. Where a range is so wide that its ends ask for different
    things, the advice is to measure.

    Args:
        predictions: those of one mode.
    """
    several = [one for one in predictions if one.devices > 1]
    if not several:
        return "Nothing to decide: give more than one device."
    worth_it = [one for one in several if _is_worth_it(one) and (_is_sure(one) or not one.is_wide)]
    if worth_it:
        best = max(worth_it, key=lambda one: one.speedup)
        return (
            f"Take {best.devices} devices in mode {best.mode!r}: {best.speedup:.2f} times as fast "
            f"as one{_range(best)}, an efficiency of {best.efficiency:.0%}."
        )
    open_ones = [one for one in several if one.is_wide and _may_be_worth_it(one)]
    if open_ones:
        return _say_measure(max(open_ones, key=lambda one: one.speedup))
    best = max(several, key=lambda one: one.speedup)
    return f"Stay on one device: {_compare(best)}, because {_blame(best)}."


def _say_measure(one: Prediction) -> str:
    low, high = one.speedup_range
    name = f"{one.devices} devices in mode {one.mode!r}"
    if one.is_measured:
        return (
            f"Measure it again: {name} were {low:.2f} to {high:.2f} times as fast as one, from "
            "round to round. Something else works on this machine, or `steps` is too small."
        )
    return (
        f"Measure it: {name} would be {low:.2f} to {high:.2f} times as fast as one. One device "
        f"does not show how often {show_seconds(one.load.fixed_s)} of its step, which don't depend "
        "on the rows, are paid on several. `reports.scaling` on the devices does."
    )


def _is_worth_it(one: Prediction) -> bool:
    return _gains(one.speedup, one.devices)


def _is_sure(one: Prediction) -> bool:
    return _gains(one.speedup_range[0], one.devices)


def _may_be_worth_it(one: Prediction) -> bool:
    return _gains(one.speedup_range[1], one.devices)


def _gains(speedup: float, devices: int) -> bool:
    return speedup >= _GAIN and speedup / devices >= _EFFICIENCY


def describe(prediction: Prediction) -> str:
    """How a choice compares with one device, and what keeps it from n times the speed."""
    return f"{_compare(prediction)}: {_blame(prediction)}"


def _compare(one: Prediction) -> str:
    name = f"{one.devices} in mode {one.mode!r}"
    be, take = ("were", "took") if one.is_measured else ("would be", "would take")
    if one.speedup >= _GAIN:
        efficiency = f"an efficiency of {one.efficiency:.0%}"
        return f"{name} {be} {one.speedup:.2f} times as fast{_range(one)}, {efficiency}"
    if one.speedup >= 1:
        return f"{name} {be} hardly faster ({one.speedup:.2f} times{_range(one)})"
    return f"{name} {take} {1 / one.speedup:.2f} times as long{_range(one, inverse=True)}"


def _range(one: Prediction, *, inverse: bool = False) -> str:
    """The range of a speed-up in brackets, where it has one."""
    low, high = one.speedup_range
    ends = (1 / high, 1 / low) if inverse else (low, high)
    first, last = (f"{end:.2f}" for end in ends)
    return "" if first == last else f" ({first} to {last})"


def _blame(one: Prediction) -> str:
    """The larger of what is lost to copies and what is lost to computing."""
    step = show_seconds(one.step_s)
    if one.is_measured:
        return f"{step} a step, timed here, where one device takes {show_seconds(one.alone_s)}"
    lost = one.compute_s - one.alone_s / one.devices
    if one.transfer_s >= lost:
        traffic = one.load.traffic
        moved = _MOVED.get(one.mode, "data")
        if traffic.duplex:
            moved = moved.replace("weights and gradients", "gradients")
        return (
            f"{show_seconds(one.transfer_s)} of {step} go into moving "
            f"{show_bytes(traffic.sent + traffic.received)} of {moved}"
        )
    fixed_s = one.compute_s - one.rows_s
    if one.rows_s - one.load.rows_s > fixed_s:
        return f"{show_seconds(lost)} of {step} are lost to processors that the devices share"
    if one.mode == "model" and one.rows_s > fixed_s:
        return f"{show_seconds(lost)} of {step} go by while devices wait for each other"
    return f"{show_seconds(lost)} of {step} don't get less with fewer rows on a device"


_COLUMNS = (
    Column("mode"),
    Column("devices"),
    Column("found"),
    Column("step", "s", show_seconds),
    Column("at least", "s", show_seconds),
    Column("at most", "s", show_seconds),
    Column("computing", "s", show_seconds),
    Column("moving", "s", show_seconds),
    Column("sent", "B", show_bytes),
    Column("received", "B", show_bytes),
    Column("speed-up", "", ".2f"),
    Column("efficiency", "", ".0%"),
    Column("memory", "B", show_bytes),
)


def _row(one: Prediction) -> list[Any]:
    traffic = one.load.traffic
    found = "timed" if one.is_measured else "predicted"
    times = [one.step_s, one.least_s, one.most_s, one.compute_s, one.transfer_s]
    moved = [traffic.sent, traffic.received]
    return [
        *(one.mode, one.devices, found, *times, *moved),
        *(one.speedup, one.efficiency, one.load.memory),
    ]
