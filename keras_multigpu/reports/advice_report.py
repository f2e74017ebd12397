"""Predictions as a table, and what they mean in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_multigpu.reports.forms import draw_bars, show_bytes, show_seconds
from keras_multigpu.reports.prediction import Prediction
from keras_multigpu.reports.report import Column, Report

_GAIN, _EFFICIENCY = 1.05, 0.5  # what several devices must bring to be worth it
_MOVED = {
    "data": "weights and gradients",
    "tower": "weights, gradients and outputs",
    "committee": "outputs and their gradients",
    "model": "activations and their gradients",
}
_ALTERNATIVES = ("data", "model")  # ways to train one model; the others train several
_COPIES = {"tower": "shared replicas", "committee": "a committee"}
_RANGES = (
    "A predicted step is shortest if the devices pay side by side for the part that doesn't depend "
    "on the rows, and longest if they pay for it one after the other; the fastest and the slowest "
    "round on one device widen the range. Copies overlap with computations only as `overlap` says."
)


class Advice(Report):
    """Whether several devices are worth it, and why.

    Args:
        predictions: one for each mode and number of devices.
        notes: sentences to print below the table, after the verdicts.
        settings: what the predictions are based on.
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
        judged = {mode: _judge(found) for mode, found in by_mode.items()}
        self.verdicts = {mode: one.text for mode, one in _with_one_best(judged).items()}
        told = [id(one.about) for one in judged.values()]
        others = [
            f"{describe(one)}."
            for one in self.predictions
            if one.devices > 1 and id(one) not in told
        ]
        if any(one.devices > 1 and not one.is_measured for one in self.predictions):
            notes = [_RANGES, *notes]
        notes = [*self.verdicts.values(), *others, *notes]
        rows = [[find(one) for find in _TABLE.values()] for one in self.predictions]
        super().__init__(title, list(_TABLE), rows, notes, settings)

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


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """What to do, in words, about which prediction, and whether that is to take several devices."""

    text: str
    about: Prediction | None = None
    takes: bool = False


def _with_one_best(judged: Mapping[str, _Verdict]) -> dict[str, _Verdict]:
    """Verdicts by mode, of which one at most takes several devices for the same training."""
    found = dict(judged)
    taken = [mode for mode in _ALTERNATIVES if mode in judged and judged[mode].takes]
    best = max(taken, key=lambda mode: judged[mode].about.speedup, default=None)  # type: ignore[union-attr]
    for mode in taken:
        about = judged[mode].about
        if mode != best and about is not None:
            text = f"Mode {mode!r} gains less than mode {best!r}: {describe(about)}."
            found[mode] = _Verdict(text, about)
    return found


def decide(predictions: Sequence[Prediction]) -> str:
    """The verdict on the predictions of one mode, in words."""
    return _judge(predictions).text


def _judge(predictions: Sequence[Prediction]) -> _Verdict:
    """The verdict on the predictions of one mode.

    Several devices are worth it if they are at least 5% faster at an efficiency of at least 50%;
    the fastest such number is advised. If the ends of a range ask for different verdicts, the
    advice is to measure.
    """
    several = [one for one in predictions if one.devices > 1]
    if not several:
        return _Verdict("Nothing to decide: give more than one device.")
    sure = [one for one in several if _gains(one, one.speedup_range[0]) or not one.is_wide]
    worth_it = [one for one in sure if _gains(one, one.speedup)]
    if worth_it:
        best = max(worth_it, key=lambda one: one.speedup)
        take = f"For {_COPIES[best.mode]} take" if best.mode in _COPIES else "Take"
        text = (
            f"{take} {best.devices} devices in mode {best.mode!r}: {best.speedup:.2f} times as "
            f"fast as one{_range(best)}, an efficiency of {best.efficiency:.0%}; {_blame(best)}."
        )
        return _Verdict(text, best, takes=True)
    unsure = [one for one in several if one.is_wide and _gains(one, one.speedup_range[1])]
    if unsure:
        best = max(unsure, key=lambda one: one.speedup)
        return _Verdict(_say_measure(best), best)
    best = max(several, key=lambda one: one.speedup)
    joined = ";" if best.is_measured else ", because"
    return _Verdict(f"Stay on one device: {_compare(best)}{joined} {_blame(best)}.", best)


def _gains(one: Prediction, speedup: float) -> bool:
    return speedup >= _GAIN and speedup / one.devices >= _EFFICIENCY


def _say_measure(one: Prediction) -> str:
    low, high = one.speedup_range
    name = f"{one.devices} devices in mode {one.mode!r}"
    if one.is_measured:
        return (
            f"Measure it again: {name} were {low:.2f} to {high:.2f} times as fast as one, from "
            "round to round. Other programs use this machine, or `steps` is too small."
        )
    return (
        f"Measure it: {name} would be {low:.2f} to {high:.2f} times as fast as one. "
        f"{show_seconds(one.load.fixed_s)} of the step don't depend on the rows, and one device "
        "doesn't show whether several pay this once or each. Run `reports.scaling` on them."
    )


def describe(prediction: Prediction) -> str:
    """How so many devices compare with one device, and what keeps them from n times the speed."""
    return f"{_compare(prediction)}: {_blame(prediction)}"


def _compare(one: Prediction) -> str:
    name = f"{one.devices} in mode {one.mode!r}"
    be, take = ("were", "took") if one.is_measured else ("would be", "would take")
    if "1.00" in (f"{one.speedup:.2f}", f"{1 / one.speedup:.2f}"):
        return f"{name} {take} about as long as one{_range(one, inverse=True)}"
    if one.speedup >= _GAIN:
        efficiency = f"an efficiency of {one.efficiency:.0%}"
        return f"{name} {be} {one.speedup:.2f} times as fast{_range(one)}, {efficiency}"
    if one.speedup >= 1:
        return f"{name} {be} hardly faster ({one.speedup:.2f} times{_range(one)})"
    return f"{name} {take} {1 / one.speedup:.2f} times as long{_range(one, inverse=True)}"


def _range(one: Prediction, *, inverse: bool = False) -> str:
    """The range of a speed-up in brackets; empty if its ends agree."""
    low, high = one.speedup_range
    ends = (1 / high, 1 / low) if inverse else (low, high)
    first, last = (f"{end:.2f}" for end in ends)
    return "" if first == last else f" ({first} to {last})"


def _blame(one: Prediction) -> str:
    """The largest loss: to copies, shared processors, waiting, or the part without rows."""
    step = show_seconds(one.step_s)
    if one.is_measured:
        return f"measured {step} per step, one device {show_seconds(one.alone_s)}"
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
    fixed_s, lost_s = one.compute_s - one.rows_s, show_seconds(lost)
    if one.rows_s - one.load.rows_s > fixed_s:
        return f"{lost_s} of {step} are lost because the devices share processors"
    if one.mode == "model" and one.rows_s > fixed_s:
        return f"{lost_s} of {step} are lost while devices wait for each other"
    return f"{lost_s} of {step} don't shrink with fewer rows per device"


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
    Column("memory", "B", show_bytes): lambda one: one.load.memory,
}
