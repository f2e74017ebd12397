"""Predictions as a table, and what they mean in words."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from keras_multigpu.reports.forms import draw_bars, show_bytes, show_seconds, spread_devices
from keras_multigpu.reports.prediction import Prediction
from keras_multigpu.reports.report import Column, Report

_GAIN, _EFFICIENCY = 1.05, 0.5  # what several devices must bring to be worth it
_ALIKE = 0.99  # of a speed-up: as much
_MOVED = {
    "data": "weights and gradients",
    "tower": "weights, gradients and outputs",
    "committee": "outputs and their gradients",
    "model": "activations and their gradients",
}
_ALTERNATIVES = ("data", "model")  # ways to train one model; the others train several
_TAKE = {"tower": "For shared replicas take", "committee": "For a committee take"}
_NOISE = "because other programs use this machine, or `steps` is too small."
_RANGES = (
    "A predicted step is shortest if the devices pay side by side for the part that doesn't depend "
    "on the rows, and longest if they pay for it one after the other; the fastest and the slowest "
    "round on one device widen the range. Copies overlap with computations only as `overlap` says."
)


class Advice(Report):
    """Whether several devices are worth it, and why.

    Attributes:
        predictions: one for each mode and number of devices.
        verdicts: what to do, in words, by mode.

    Example:
        >>> import textwrap
        >>> from keras_multigpu.reports import Link
        >>> from keras_multigpu.reports.prediction import Load, Traffic, predict
        >>> load = Load(0.02, 0.04, 0.04, Traffic(12e7, 12e7), memory=500_000_000)
        >>> advice = Advice([predict("data", 2, load, Link("slow", 1e10))])
        >>> print(textwrap.fill(advice.verdicts["data"], 80))
        Stay on one device: 2 devices in mode 'data' would be 0.91 times as fast as one,
        an efficiency of 45%; 24.0 ms of 44.0 ms go into moving 240 MB of weights and
        gradients.
    """

    def __init__(
        self, predictions: Sequence[Prediction], *, notes: Sequence[str] = (), **options: Any
    ):
        self.predictions = tuple(predictions)
        modes = dict.fromkeys(one.mode for one in self.predictions)
        best = {mode: _find_best(self._of(mode)) for mode in modes}
        ways = [one for mode, one in best.items() if mode in _ALTERNATIVES]
        gaining = [one for one in ways if _is_sure(one) or _may_be_worth_it(one)]
        first = max(gaining, key=lambda one: (_is_sure(one), one.speedup), default=None)
        said = {mode: (_say(one, first), _why_measure(one)) for mode, one in best.items()}
        self.verdicts = {mode: " ".join(filter(None, both)) for mode, both in said.items()}
        several = [one for one in self.predictions if one.devices > 1]
        others = [f"{describe(one)}." for one in several if one is not best[one.mode]]
        ranges = [] if all(one.is_measured for one in several) else [_RANGES]
        rows = [[find(one) for find in _TABLE.values()] for one in self.predictions]
        verdicts, reasons = zip(*said.values())
        unique = filter(None, dict.fromkeys(reasons))  # several modes often have the same one
        notes = [*verdicts, *unique, *others, *ranges, *notes]
        super().__init__("Advice", list(_TABLE), rows, notes, **options)

    def _of(self, mode: str) -> list[Prediction]:
        return [one for one in self.predictions if one.mode == mode]

    def draw(self, figure: Any) -> None:
        """Draws what a step consists of, and the speed-up, by the number of devices."""
        figure.suptitle(self.title)
        left, right = figure.subplots(1, 2)
        labels = [f"{one.mode}, {one.devices}" for one in self.predictions]
        parts = {
            "computing": [1e3 * one.compute_s for one in self.predictions],
            "moving": [1e3 * one.transfer_s for one in self.predictions],
        }
        draw_bars(left, labels, parts, xlabel="step (ms)")
        left.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
        for mode, style in zip(self.verdicts, itertools.cycle(("-", "--", ":", "-."))):
            own = self._of(mode)
            points = sorted((one.devices, one.speedup, *one.speedup_range) for one in own)
            places, speedups, *ends = zip(*points)
            right.plot(places, speedups, style, marker="o", label=mode)
            right.fill_between(places, *ends, alpha=0.2)
        counts = sorted({1, *(one.devices for one in self.predictions)})
        right.plot(counts, counts, "--", color="gray", label="ideal")
        right.set(ylabel="speed-up")
        right.legend()
        spread_devices([right], counts, right)


def _find_best(predictions: Sequence[Prediction]) -> Prediction:
    """The fastest number of devices that is surely worth it; else that may be; else of several."""
    several = [one for one in predictions if one.devices > 1]
    for is_worth_it in (_is_sure, _may_be_worth_it):
        if found := [one for one in several if is_worth_it(one)]:
            return max(found, key=lambda one: one.speedup)
    return max(several or predictions, key=lambda one: one.speedup)


def _is_sure(one: Prediction) -> bool:
    """Whether several devices are worth it, at the slow end too if the range is wide."""
    return _gains(one, one.sure_speedup)


def _may_be_worth_it(one: Prediction) -> bool:
    return one.is_wide and not one.is_undivided and _gains(one, one.speedup_range[1])


def _gains(one: Prediction, speedup: float) -> bool:
    return one.devices > 1 and speedup >= _GAIN and speedup / one.devices >= _EFFICIENCY


def _say(one: Prediction, first: Prediction | None) -> str:
    """What to do; `first` is the best of the ways to train one model, if any gains, or may."""
    if one.devices == 1:
        where = f"Nothing to decide in mode {one.mode!r} on one device"
        return f"{where}: give more than one, on which it can train."
    text = f"{describe(one)}."
    if _is_sure(one):
        if first is not None and one.mode in _ALTERNATIVES and one is not first:
            much = "as much as" if _is_as_fast(one, first) else "less than"
            return f"Mode {one.mode!r} gains {much} mode {first.mode!r}: {text}"
        take = _TAKE.get(one.mode, "Take")
        return f"{take} {one.devices} devices in mode {one.mode!r}: {_facts(one)}."
    if not _may_be_worth_it(one):
        if one.sure_speedup >= _GAIN:
            return f"Faster, but {one.devices} devices do less than half of what they could: {text}"
        # Where another mode gains, the advice is not to stay on one device.
        stay = f"Mode {one.mode!r} gains nothing" if first else "Stay on one device"
        high = one.speedup_range[1]
        even = f" Even {high:.2f} is less than half of what they could." if high >= _GAIN else ""
        return f"{stay}: {text}{even}"
    return f"Measure it{' again' if one.is_measured else ''}: {text}"


def _why_measure(one: Prediction) -> str:
    """Why only a measurement tells whether so many devices are worth it; `""` if that is told."""
    if one.devices == 1 or _is_sure(one) or not _may_be_worth_it(one):
        return ""
    if one.is_measured:
        return f"Rounds differ, {_NOISE}"
    why = f"Rounds on one device differ, {_NOISE}"
    fixed_s = one.load.fixed_s
    if 2 * (one.devices - 1) * fixed_s > one.most_s - one.least_s:  # most of the range
        why = (
            f"{show_seconds(fixed_s)} of the step don't depend on the rows, and one device doesn't "
            "show whether several pay this once or each."
        )
    return f"{why} Run `reports.scaling` on the devices."


def _is_as_fast(one: Prediction, first: Prediction) -> bool:
    """Whether each speed-up is in the other's range, but for a difference that nobody notices."""
    return (
        one.speedup_range[1] > _ALIKE * first.speedup
        and one.speedup > _ALIKE * first.speedup_range[0]
    )


def describe(one: Prediction) -> str:
    """How so many devices compare with one device, and what keeps them from n times the speed."""
    be = "were" if one.is_measured else "would be"
    return f"{one.devices} devices in mode {one.mode!r} {be} {_facts(one)}"


def _facts(one: Prediction) -> str:
    low, high = (f"{end:.2f}" for end in one.speedup_range)
    ends = "" if low == high else f" ({low} to {high})"
    times = f"{one.speedup:.2f} times "
    fast = f"{'' if times == '1.00 times ' else times}as fast as one{_work(one)}{ends}"
    return f"{fast}, an efficiency of {one.efficiency:.0%}; {_blame(one)}"


def _work(one: Prediction) -> str:
    """What one device is compared with that does the same work, if that is not the model alone."""
    return "" if one.mode in _ALTERNATIVES else f" with {one.devices} replicas"


def _blame(one: Prediction) -> str:
    """The largest loss: to copies, shared processors, waiting, or the part without rows."""
    step, lost = show_seconds(one.step_s), one.compute_s - one.alone_s / one.devices
    cure = (
        "the devices don't divide the batch: each computes all of it. Give a multiple of "
        f"{one.devices} rows"
    )
    if one.is_measured:
        times = f"a step took {step}, on one device{_work(one)} {show_seconds(one.alone_s)}"
        return f"{times}; {cure}" if one.is_undivided else times
    if one.transfer_s >= lost:
        traffic, moved = one.load.traffic, _MOVED[one.mode]
        if traffic.duplex:
            moved = moved.replace("weights and gradients", "gradients")
        size = show_bytes(traffic.sent + traffic.received)
        return f"{show_seconds(one.transfer_s)} of {step} go into moving {size} of {moved}"
    fixed_s, part = one.compute_s - one.rows_s, f"{show_seconds(lost)} of {step}"
    if one.is_undivided and one.alone_s - one.load.fixed_s > fixed_s:
        return f"{part} are lost because {cure}"
    if one.rows_s - one.load.rows_s > fixed_s:
        return f"{part} are lost because the devices share processors"
    if one.mode == "model" and one.rows_s > fixed_s:
        return f"{part} are lost while devices wait for each other"
    return f"{part} are lost because a part of the step doesn't shrink with the rows per device"


_TABLE: dict[Column, Callable[[Prediction], Any]] = {
    Column("mode"): lambda one: one.mode,
    Column("devices"): lambda one: one.devices,
    Column("source"): lambda one: "measured" if one.is_measured else "predicted",
    Column("step", "s", show_seconds): lambda one: one.step_s,
    Column("at least", "s", show_seconds): lambda one: one.least_s,
    Column("at most", "s", show_seconds): lambda one: one.most_s,
    Column("computing", "s", show_seconds): lambda one: one.compute_s,
    Column("moving", "s", show_seconds): lambda one: one.transfer_s,
    Column("sent", "B", show_bytes): lambda one: one.load.traffic.sent,
    Column("received", "B", show_bytes): lambda one: one.load.traffic.received,
    Column("speed-up", "", ".2f"): lambda one: one.speedup,
    Column("efficiency", "", ".0%"): lambda one: one.efficiency,
}
