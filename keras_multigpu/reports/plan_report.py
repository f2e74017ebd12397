"""Ways to train a model as a table, and the call that starts the best one."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from keras_multigpu.arguments import number_of
from keras_multigpu.reports.forms import draw_bars, show_bytes, show_seconds
from keras_multigpu.reports.prediction import Prediction
from keras_multigpu.reports.report import Column, Report

_MOST_DRAWN = 16
_FAR = 20  # times the largest bar
_TOO_LOW = 0.8  # an estimate of memory may be such a part of what is counted


@dataclasses.dataclass(frozen=True)
class Choice:
    """A way to train a model on several devices.

    Attributes:
        prediction: the step on one part of a batch.
        shard: what mode `"data"` spreads over the devices.
        parts: the number of parts of a batch, whose gradients are accumulated.
        rows: the rows of a part, on all devices together.
        remat: whether activations are computed again instead of kept.
        fits: whether the memory of a device is enough.
        is_counted: whether its memory was counted as by `memory`, on as many devices.

    Example:
        >>> from keras_multigpu.reports import Link
        >>> from keras_multigpu.reports.prediction import Load, Traffic, predict
        >>> load = Load(0.02, 0.04, 0.04, Traffic(12e7, 12e7), memory=500_000_000)
        >>> step = predict("data", 2, load, Link("fast", 1e11))
        >>> Choice(step, "weights", parts=1, rows=64, remat=False, fits=True).call
        "parallel = make_parallel(model, 2, mode='data', shard='weights')"
    """

    prediction: Prediction
    shard: str | None
    parts: int
    rows: int
    remat: bool
    fits: bool
    is_counted: bool = False

    @property
    def mode(self) -> str:
        """The mode."""
        return self.prediction.mode

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.prediction.devices

    @property
    def memory(self) -> int | None:
        """The bytes of the device that needs most, if known."""
        return self.prediction.load.memory

    def with_memory(self, memory: int, limit: int) -> Choice:
        """The same with the memory that was counted, of devices that have so much."""
        load = dataclasses.replace(self.prediction.load, memory=memory)
        prediction = dataclasses.replace(self.prediction, load=load)
        return dataclasses.replace(
            self, prediction=prediction, fits=memory <= limit, is_counted=True
        )

    @property
    def update_s(self) -> float:
        """The time of an update with a whole batch, in seconds."""
        return self.parts * self.prediction.step_s

    @property
    def rank(self) -> tuple[Any, ...]:
        """Orders ways: the fastest first, and of those as fast in two digits the simplest."""
        time = float(f"{self.update_s:.2g}")
        return time, self.parts, self.shard is not None, self.remat, self.update_s

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `make_parallel` beside the model and the number of devices."""
        return {"mode": self.mode} | ({"shard": self.shard} if self.shard else {})

    @property
    def call(self) -> str:
        """What to write."""
        given = "".join(f", {name}={value!r}" for name, value in self.options.items())
        parallel = f"parallel = make_parallel(model, {self.devices}{given})"
        remat = 'make the layers in `keras.RematScope("full")`, the model outside of it; '
        parts = (
            f"; compile it with an optimizer with gradient_accumulation_steps={self.parts}, and "
            f"fit(..., batch_size={self.rows})"
        )
        call = parallel if self.devices > 1 else "train the model as it is"
        return f"{remat if self.remat else ''}{call}{parts if self.parts > 1 else ''}"

    def __str__(self) -> str:
        mode = self.mode if self.devices > 1 else "one device"
        spread = f", {self.shard} spread" if self.shard else ""
        parts = f", {self.parts} parts" if self.parts > 1 else ""
        return f"{mode}{spread}{parts}{', recomputed' if self.remat else ''}"


class PlanReport(Report):
    """The ways to train a model on n devices, or on one: those that fit first, the fastest first.

    If one device fits, it precedes a way that may be no faster, as far as a prediction tells.

    Attributes:
        choices: the ways, in the order of the table.
        limit: the memory that a device has, in bytes; `None` if unknown.

    Example:
        >>> from keras_multigpu.reports import Link
        >>> from keras_multigpu.reports.prediction import Load, Traffic, predict
        >>> load = Load(0.02, 0.04, 0.04, Traffic(12e7, 12e7), memory=500_000_000)
        >>> step = predict("data", 2, load, Link("fast", 1e11))
        >>> found = PlanReport([Choice(step, None, parts=1, rows=64, remat=False, fits=True)], 2)
        >>> found.best
        {'n_gpus': 2, 'mode': 'data'}
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        devices: int,
        *,
        limit: int | None = None,
        notes: Sequence[str] = (),
        **options: Any,
    ):
        def order(one: Choice) -> tuple[Any, ...]:
            return not one.fits, *(one.rank if one.fits else (one.memory or 0,))

        self.choices, self.limit = sorted(choices, key=order), limit
        alone = next((one for one in self.choices if one.fits and one.devices == 1), None)
        if alone is not None and _speedups(self.choices[0], alone)[0] <= 1:
            self.choices.sort(key=lambda one: one is not alone)
        rows = [[find(one) for find in _TABLE.values()] for one in self.choices]
        title = f"Plan for {number_of(devices, 'device')}"
        super().__init__(title, list(_TABLE), rows, [self._conclude(), *notes], **options)

    @property
    def best(self) -> dict[str, Any]:
        """The arguments of the fastest way that fits: `make_parallel(model, **plan.best)`.

        Its batch and `keras.RematScope` are in `choices[0]`.

        Raises:
            ValueError: if none fits.

        Warns:
            UserWarning: if it needs more than these: a batch in parts, or `keras.RematScope`.
        """
        if not self.choices or not self.choices[0].fits:
            raise ValueError(f"`best` needs a way to train that fits. Received: {self._conclude()}")
        best = self.choices[0]
        if best.parts > 1 or best.remat:
            warnings.warn(
                f"The arguments of `make_parallel` alone don't make this model fit. To fit: "
                f"{best.call}.",
                stacklevel=2,
            )
        return {"n_gpus": best.devices, **best.options}

    def _conclude(self) -> str:
        fitting = [one for one in self.choices if one.fits]
        if not fitting:
            known = [one.memory for one in self.choices if one.memory is not None]
            least = f" The least is {show_bytes(min(known))} on a device." if known else ""
            ways = len(self.choices)
            none = f"None of {ways} ways fits" if ways > 1 else "The only way does not fit"
            return (
                f"{none}.{least} Give more devices, devices with "
                f"more memory, or a smaller batch.{_doubt_division(self.choices)}"
            )
        best, time = fitting[0], show_seconds(fitting[0].update_s)
        alone = next((one for one in fitting if one.devices == 1), None)
        several = next((one for one in fitting if one.devices > 1), None)
        if alone is None or several is None:
            text = f"The fastest that fits takes {time}: {best.call}."
            return text + _doubt_division(self.choices) + self._doubt_memory(best)
        if best is several:
            other = f"one device {show_seconds(alone.update_s)}"
            text = f"The fastest that fits takes {time}, {other}: {best.call}."
        else:
            text = (
                f"Stay on one device: an update takes {time} there, and "
                f"{show_seconds(several.update_s)} on {several.devices} in the fastest way that "
                f"fits."
            )
            text += f" To fit: {best.call}." if best.parts > 1 or best.remat else ""
        doubts = _doubt_division(self.choices), _doubt(several, alone), self._doubt_memory(best)
        return text + "".join(doubts)

    def _doubt_memory(self, best: Choice) -> str:
        """Says so if an estimate is near the limit."""
        if best.is_counted or not self.limit or (best.memory or 0) < _TOO_LOW * self.limit:
            return ""
        return (
            " Its memory is an estimate, which may be a fifth too low: `reports.memory` counts it, "
            f"on {best.devices} virtual devices too."
        )

    def draw(self, figure: Any) -> None:
        """Draws the memory and the time of each way; those that don't fit are grey."""
        shown = self.choices[:_MOST_DRAWN]
        colors = {"": ["C0" if one.fits else "lightgrey" for one in shown]}
        left, right = figure.subplots(1, 2, sharey=True)
        sizes = [(one.memory or 0) / 1e6 for one in shown]
        memory = "memory of a device (MB)"
        times = [1e3 * one.update_s for one in shown]
        labels = list(map(str, shown))
        if self.limit is not None and self.limit / 1e6 > _FAR * max(sizes, default=0.0):
            memory += f", of {show_bytes(self.limit)}"  # a line there would hide the bars
        elif self.limit is not None:
            left.axvline(self.limit / 1e6, color="C3", linestyle="--")
            top = left.get_xaxis_transform()
            left.text(self.limit / 1e6, 1.02, "available", color="C3", ha="center", transform=top)
        texts = ["?" if one.memory is None else show_bytes(one.memory) for one in shown]
        draw_bars(left, labels, {"": sizes}, xlabel=memory, colors=colors, texts=texts)
        xlabel = "update with a whole batch (ms)"
        draw_bars(right, labels, {"": times}, xlabel=xlabel, colors=colors)
        figure.suptitle(self.title)


def _doubt_division(choices: Sequence[Choice]) -> str:
    """Says so if devices compute all rows of a batch, because they don't divide them."""
    for one in choices:
        if one.rows % one.devices and one.prediction.is_undivided:
            return (
                f" In mode {one.mode!r} the {one.devices} devices don't divide the "
                f"{number_of(one.rows, 'row')}, so that each computes all of them: give a multiple "
                f"of {one.devices}."
            )
    return ""


def _speedups(one: Choice, alone: Choice) -> tuple[float, ...]:
    """How many times as fast as one device a way is, at least and at most."""
    ratio, step = alone.update_s / one.update_s, one.prediction
    return tuple(ratio * end / step.speedup for end in step.speedup_range)


def _doubt(several: Choice, alone: Choice) -> str:
    """Says so if either may be faster, as far as a prediction tells."""
    low, high = _speedups(several, alone)
    if not low <= 1 <= high or high - low < 0.01:
        return ""
    return (
        f" It may be otherwise: {several.devices} devices are {low:.2f} to {high:.2f} times as "
        "fast, as far as a prediction tells. Run `reports.scaling` on the devices."
    )


_TABLE: dict[Column, Callable[[Choice], Any]] = {
    Column("devices"): lambda one: one.devices,
    Column("mode"): lambda one: one.mode if one.devices > 1 else None,
    Column("shard"): lambda one: one.shard,
    Column("parts"): lambda one: one.parts,
    Column("rows of a part"): lambda one: one.rows,
    Column("recomputed"): lambda one: "yes" if one.remat else "no",
    Column("memory", "B", show_bytes): lambda one: one.memory,
    Column("source of memory"): lambda one: "counted" if one.is_counted else "estimated",
    Column("fits"): lambda one: "yes" if one.fits else "no",
    Column("update", "s", show_seconds): lambda one: one.update_s,
    Column("moving", "s", show_seconds): lambda one: one.parts * one.prediction.transfer_s,
}
