"""Predictions as a table, and what they mean in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from keras_multigpu.reports.prediction import Prediction
from keras_multigpu.reports.report import Column, Report

_GAIN, _EFFICIENCY = 1.05, 0.5
_MOVED = {
    "data": "weights and gradients",
    "tower": "weights, gradients and outputs",
    "committee": "outputs and their gradients",
    "model": "activations and their gradients",
}


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
        >>> from keras_multigpu.reports.prediction import Load, Traffic, predict
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
        counts = sorted({1, *(one.devices for one in self.predictions)})
        right.plot(counts, counts, "--", color="gray", label="ideal")
        right.set(xlabel="devices", ylabel="speed-up", ylim=(0, None), xticks=counts)
        right.legend()
        for axes in (left, right):
            axes.grid(alpha=0.3)


def decide(predictions: Sequence[Prediction]) -> str:
    """What to do, in words.

    Several devices are advised where they are faster by 5% at least and each does half of what it
    could: of those numbers the fastest.

    Args:
        predictions: those of one mode.
    """
    several = [one for one in predictions if one.devices > 1]
    if not several:
        return "Nothing to decide: give more than one device."
    worth_it = [one for one in several if _is_worth_it(one)]
    if worth_it:
        best = max(worth_it, key=lambda one: one.speedup)
        return (
            f"Take {best.devices} devices in mode {best.mode!r}: {best.speedup:.2f} times as fast "
            f"as one, an efficiency of {best.efficiency:.0%}."
        )
    best = max(several, key=lambda one: one.speedup)
    return f"Stay on one device: {_compare(best)}, because {_blame(best)}."


def _is_worth_it(one: Prediction) -> bool:
    return one.speedup >= _GAIN and one.efficiency >= _EFFICIENCY


def describe(prediction: Prediction) -> str:
    """How a choice compares with one device, and what keeps it from n times the speed."""
    return f"{_compare(prediction)}: {_blame(prediction)}"


def _compare(one: Prediction) -> str:
    name = f"{one.devices} in mode {one.mode!r}"
    if one.speedup >= _GAIN:
        efficiency = f"an efficiency of {one.efficiency:.0%}"
        return f"{name} would be {one.speedup:.2f} times as fast, {efficiency}"
    if one.speedup >= 1:
        return f"{name} would be hardly faster ({one.speedup:.2f} times)"
    return f"{name} would take {1 / one.speedup:.2f} times as long"


def _blame(one: Prediction) -> str:
    """The larger of what is lost to copies and what is lost to computing."""
    lost = one.compute_s - one.alone_s / one.devices
    step = show_seconds(one.step_s)
    if one.transfer_s >= lost:
        traffic = one.load.traffic
        moved = _MOVED.get(one.mode, "data")
        if traffic.duplex:
            moved = moved.replace("weights and gradients", "gradients")
        return (
            f"{show_seconds(one.transfer_s)} of {step} go into moving "
            f"{show_bytes(traffic.sent + traffic.received)} of {moved}"
        )
    if one.compute_s > one.load.busiest_s:
        return f"{show_seconds(lost)} of {step} are lost to processors that the devices share"
    if one.mode == "model":
        return f"{show_seconds(lost)} of {step} go by while devices wait for each other"
    return f"{show_seconds(lost)} of {step} don't get less with fewer rows on a device"


def show_seconds(seconds: float) -> str:
    """Three digits, in s or ms.

    Example:
        >>> show_seconds(0.0123), show_seconds(2.5)
        ('12.3 ms', '2.50 s')
    """
    value, unit = (seconds, "s") if seconds >= 0.9995 else (1e3 * seconds, "ms")
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{decimals}f} {unit}"


def show_bytes(size: float) -> str:
    """Three digits, in the unit that fits.

    Example:
        >>> show_bytes(123_456_789), show_bytes(2_500), show_bytes(12)
        ('123 MB', '2.50 kB', '12 B')
    """
    if size < 1000:
        return f"{size:.0f} B"
    power = min(int(math.log10(size) // 3), len(_UNITS))
    size, unit = size / 1000**power, _UNITS[power - 1]
    decimals = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{decimals}f} {unit}"


_UNITS = ("kB", "MB", "GB", "TB")
_COLUMNS = (
    Column("mode"),
    Column("devices"),
    Column("step", "s", show_seconds),
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
    figures = [one.step_s, one.compute_s, one.transfer_s, traffic.sent, traffic.received]
    return [one.mode, one.devices, *figures, one.speedup, one.efficiency, one.load.memory]
