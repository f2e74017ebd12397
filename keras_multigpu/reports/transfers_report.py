"""What crosses between devices, as a table, sums and a map."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_multigpu.engines import Transfer
from keras_multigpu.reports.report import Column, Report
from keras_multigpu.reports.units import show_bytes

CROSSING = ("weights", "activations", "gradients")
# What is above the least by less than this is not worth a word.
_MUCH = 1.5


class TransfersReport(Report):
    """What crosses between devices in one training step, and in one prediction.

    Args:
        training: the transfers of a training step.
        prediction: those of a prediction.
        devices: the devices' names.
        least: the bytes of weights, activations and gradients that a training step has to send
            at least; `None` if that is not known.
        mode: the mode of the model, as `advise` names them, if that is known.
        batch_size: the rows of the batch, if they are known.
        hosts: which host each device is of, where they are of several. Others than these are of
            the host `""`, that of this process.
        settings: what else the figures hold for.
        notes: sentences to print below the table, after what the figures say themselves.

    Example:
        >>> sent = [Transfer("cpu:0", "cpu:1", "weights", "kernel", 2048)]
        >>> report = TransfersReport(sent, [], ("cpu:0", "cpu:1"), least=1024)
        >>> report.bytes("training")
        {'weights': 2048}
        >>> print(report.notes[0])
        A training step sends 2.05 kB of weights, activations and gradients; the least is 1.02 kB.
    """

    def __init__(
        self,
        training: Sequence[Transfer],
        prediction: Sequence[Transfer],
        devices: Sequence[str],
        least: int | None = None,
        *,
        mode: str | None = None,
        batch_size: int | None = None,
        hosts: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
        notes: Sequence[str] = (),
    ):
        self.training = list(training)
        self.prediction = list(prediction)
        self.devices = tuple(devices)
        self.least = least
        self.mode = mode
        self.batch_size = batch_size
        self.hosts = dict(hosts or {})
        columns = [
            Column("step"),
            Column("from"),
            Column("to"),
            Column("kind"),
            Column("copies"),
            Column("bytes", "", show_bytes),
        ]
        named = {"mode": mode, "batch size": batch_size}
        known = {name: one for name, one in named.items() if one is not None}
        known |= settings or {}
        super().__init__("Transfers between devices", columns, self._rows(), (), known)
        self.notes += [*self._notes(), *notes]

    def bytes(self, step: str, source: str | None = None, target: str | None = None) -> dict:
        """The bytes of a step by kind; tensors whose size is not known add none.

        Args:
            step: `"training"` or `"prediction"`.
            source: the device they come from, `None` for any.
            target: the device they go to, `None` for any.
        """
        totals: dict[str, int] = collections.defaultdict(int)
        for one in self._of(step):
            if source in (None, one.source) and target in (None, one.target):
                totals[one.kind] += one.bytes or 0
        return dict(totals)

    def between_hosts(self, step: str) -> dict[str, int]:
        """The bytes of a step by kind, of what crosses from one host to another."""
        totals: dict[str, int] = collections.defaultdict(int)
        for one in self._of(step):
            if self.hosts.get(one.source, "") != self.hosts.get(one.target, ""):
                totals[one.kind] += one.bytes or 0
        return dict(totals)

    def matrix(self, step: str) -> tuple[list[str], np.ndarray]:
        """The bytes of a step from each device (rows) to each other one (columns)."""
        found = {name: None for one in self._of(step) for name in (one.source, one.target)}
        names = [*(name for name in found if name not in self.devices), *self.devices]
        sums = np.zeros((len(names), len(names)))
        for one in self._of(step):
            sums[names.index(one.source), names.index(one.target)] += one.bytes or 0
        return names, sums

    def draw(self, figure: Any) -> None:
        """Draws a map for each step, darker where more crosses."""
        steps = [step for step in ("training", "prediction") if self._of(step)]
        for step, axes in zip(steps, np.atleast_1d(figure.subplots(1, max(len(steps), 1)))):
            names, sums = self.matrix(step)
            axes.imshow(sums, cmap="Blues", vmin=0)
            axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
            axes.set_yticks(range(len(names)), names)
            axes.set(title=f"One {step} step", xlabel="to", ylabel="from")
            for (row, column), size in np.ndenumerate(sums):
                if size:
                    color = "white" if size > sums.max() / 2 else "black"
                    text = show_bytes(size)
                    axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8)

    def _of(self, step: str) -> list[Transfer]:
        if step not in ("training", "prediction"):
            raise ValueError(f"`step` must be 'training' or 'prediction'. Received: step={step!r}.")
        return self.training if step == "training" else self.prediction

    def _rows(self) -> list[tuple[Any, ...]]:
        rows = []
        for step in ("training", "prediction"):
            groups: dict[tuple[str, str, str], list[Transfer]] = collections.defaultdict(list)
            for one in self._of(step):
                groups[one.source, one.target, one.kind].append(one)
            rows += [
                (step, *key, sum(one.copies for one in ones), sum(one.bytes or 0 for one in ones))
                for key, ones in sorted(groups.items())
            ]
        return rows

    def _notes(self) -> list[str]:
        notes = []
        sent = sum(self.bytes("training").get(kind, 0) for kind in CROSSING)
        if self.training and self.least is not None:
            notes.append(
                f"A training step sends {show_bytes(sent)} of weights, activations and gradients; "
                f"the least is {show_bytes(self.least)}."
            )
            if sent > _MUCH * self.least and self.mode == "model":
                notes.append(
                    f"That is {sent / max(self.least, 1):.1f} times as much as the placement "
                    "chosen by default (`placement=None`) has to send: layers that follow each "
                    "other are on different devices."
                )
        if any(self.hosts.values()):
            crossing = sum(
                self.between_hosts("training" if self.training else "prediction").values()
            )
            notes.append(f"{show_bytes(crossing)} of it cross between hosts, inputs among them.")
        unknown = sum(one.bytes is None for one in [*self.training, *self.prediction])
        if unknown:
            notes.append(
                f"Of {unknown} tensors the size is known only when the step runs: they count "
                "as copies, and add no bytes."
            )
        return notes
