"""Counts what crosses between devices in a step, as a table, sums and a map."""

from __future__ import annotations

import collections
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu import engines
from keras_multigpu.arguments import check_choice, number_of, short
from keras_multigpu.engines import Transfer
from keras_multigpu.modes import ParallelModel
from keras_multigpu.reports.forms import describe_environment, show_bytes, tell_unknown
from keras_multigpu.reports.inputs import Batch, check_batch
from keras_multigpu.reports.models import has_train_step, step_prepared
from keras_multigpu.reports.report import Column, Report

_STEPS = ("training", "prediction")
_NEEDED = ("weights", "activations", "gradients")
_MUCH = 1.5  # times the least: worth a note


def transfers(parallel: ParallelModel, batch: Any) -> TransfersReport:
    """Counts what crosses between the devices in a training step and in a prediction.

    It reads the graphs that TensorFlow makes for each device, or the program that XLA compiles on
    JAX, so it needs no GPU: virtual devices (`keras_multigpu.use_virtual_devices`) give the same
    counts. The step is compiled for this batch, and on TensorFlow it runs once; the model's
    weights, metrics and optimizer state are restored. XLA's collective operations are counted as
    rings of devices carry them out.

    Args:
        parallel: a model from `make_parallel`. If it is not compiled, only the prediction is
            counted; if it can't predict the batch that its own `train_step` takes, only the
            training step.
        batch: the inputs, or a tuple of inputs, targets and, optionally, sample weights, as
            arrays. Their values don't matter, only their shapes.

    Returns:
        A report with a row for each step, pair of devices and kind: `"inputs"`, `"weights"`,
        `"activations"`, `"gradients"`, `"other"`.

    Raises:
        ValueError: if the model is not parallel, or its loss needs targets, and there are none.

    Example:
        >>> import numpy as np
        >>> from keras_multigpu import make_parallel
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, use_bias=False)])
        >>> parallel = make_parallel(model, n_gpus=2)
        >>> parallel.compile("sgd", "mse")
        >>> report = transfers(parallel, (np.ones((6, 8)), np.ones((6, 4))))
        >>> sum(one.bytes for one in report.training if one.kind == "gradients") >= 8 * 4 * 4
        True
    """
    if not isinstance(parallel, ParallelModel):
        raise ValueError(
            "`parallel` must be a model from `make_parallel`. Received: "
            f"parallel={short(parallel)}. Make it parallel first: `make_parallel(model, n_gpus)`."
        )
    given = check_batch(batch, parallel)
    training, prediction, only = _count(parallel, given)
    rows = len(keras.tree.flatten(given[0])[0])
    least, notes = parallel._parallel_least_bytes(rows), _doubt_division(parallel, rows)
    if notes and rows % len(parallel.devices):  # each device computes all rows
        least = sum(_by_kind(one for one in training if one.kind in _NEEDED).values())
    elif (
        parallel.mode == "data" and rows == 1 < len(parallel.devices) and not training + prediction
    ):
        notes = ["One device computes a batch of one row. Give a batch of more rows."]
    is_committee = parallel._parallel_options.get("replicas") == "independent"
    return TransfersReport(
        training,
        prediction,
        parallel.devices,
        least,
        mode="committee" if is_committee else parallel.mode,  # as `advise` names it
        batch_size=rows,
        hosts={name: engines.current().host_of(name) for name in parallel.devices},
        settings={"model": parallel.template.name, **describe_environment(parallel.devices)},
        notes=[*notes, *only],
    )


def _count(
    parallel: ParallelModel, given: Batch
) -> tuple[list[Transfer], list[Transfer], list[str]]:
    """What a training step sends, and a prediction; why only one of them is counted."""
    count = engines.current().count_transfers
    training, prediction, only = [], [], []
    try:
        with step_prepared(parallel, given, False):
            prediction = count(parallel, given, False)
    except Exception as error:  # a user's `call` may raise anything; the note says it
        if not (parallel.compiled and has_train_step(parallel)):
            raise
        why = engines.reason_of(error)
        only = [f"Only a training step is counted: the model can't predict the batch ({why})."]
    if parallel.compiled:
        with step_prepared(parallel, given, True):
            training = count(parallel, given, True)
    else:
        only = ["The model is not compiled: only a prediction is counted, no training."]
    return training, prediction, only


def _doubt_division(parallel: ParallelModel, rows: int) -> list[str]:
    """Says so if the devices don't share so many rows."""
    count = len(parallel.devices)
    together = parallel._parallel_options.get("model_devices", 1)
    if parallel.mode != "data" or engines.current().divides(parallel.devices, rows, together):
        return []
    if not rows % count:
        return [
            "GPUs send as much. `fit` on processors computes one row for each device whole, on "
            f"each of them. Give a batch of {2 * rows} rows, for example."
        ]
    if together > 1:
        return []
    return [
        f"{count} devices don't divide {number_of(rows, 'row')}: each computes the whole "
        "batch, so nothing has to cross, and no time is saved. Give a batch of "
        f"{count * max(rows // count + 1, 2)} rows, for example."
    ]


class TransfersReport(Report):
    """What crosses between devices in one training step, and in one prediction.

    Args:
        training: the transfers of a training step.
        prediction: the transfers of a prediction.
        devices: the devices' names.
        least: the bytes of weights, activations and gradients that a training step has to send
            at least; `None` if unknown.
        mode: the model's mode, as `advise` names it, if known.
        batch_size: the rows of the batch, if known.
        hosts: the host of each device, if there are several; this process's is `""`.
        settings, notes: as in `Report`.

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
        self.training, self.prediction = list(training), list(prediction)
        self.devices, self.least = tuple(devices), least
        self.mode, self.batch_size, self.hosts = mode, batch_size, dict(hosts or {})
        named = {"mode": mode, "batch size": batch_size, **(settings or {})}
        known = {name: value for name, value in named.items() if value is not None}
        columns = [Column(name) for name in ("step", "from", "to", "kind", "copies")]
        columns.append(Column("bytes", "", show_bytes))
        notes = [*self._conclude(), *notes]
        super().__init__("Transfers between devices", columns, self._rows(), notes, known)

    def bytes(self, step: str, source: str | None = None, target: str | None = None) -> dict:
        """The bytes of a step by kind; tensors of unknown size add none.

        Args:
            step: `"training"` or `"prediction"`.
            source: the device they come from, `None` for any.
            target: the device they go to, `None` for any.
        """
        found = [one for one in self._transfers(step) if source in (None, one.source)]
        return _by_kind(one for one in found if target in (None, one.target))

    def between_hosts(self, step: str) -> dict[str, int]:
        """The bytes of a step by kind, counting only what crosses from one host to another."""
        host, found = collections.defaultdict(str, self.hosts), self._transfers(step)
        return _by_kind(one for one in found if host[one.source] != host[one.target])

    def matrix(self, step: str) -> tuple[list[str], np.ndarray]:
        """The devices, and the bytes of a step from each (rows) to each (columns)."""
        found = self._transfers(step)
        ends = dict.fromkeys(name for one in found for name in (one.source, one.target))
        names = [*(name for name in ends if name not in self.devices), *self.devices]
        sums = np.zeros((len(names), len(names)))
        for one in found:
            sums[names.index(one.source), names.index(one.target)] += one.bytes or 0
        return names, sums

    def draw(self, figure: Any) -> None:
        """Draws a map of devices by devices for each step; darker cells send more."""
        steps = [step for step in _STEPS if self._transfers(step)]
        if not steps:
            self._draw_notes(figure)
            return
        side = max(4.0, 0.55 * len(self.devices) + 1.5)  # inches: a cell has room for its number
        figure.set_size_inches(2.25 * side, side)
        for step, axes in zip(steps, np.atleast_1d(figure.subplots(1, len(steps)))):
            names, sums = self.matrix(step)
            axes.imshow(sums, cmap="Blues", vmin=0)
            axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
            axes.set_yticks(range(len(names)), names)
            axes.set(title=f"One {step} step", xlabel="to", ylabel="from")
            for (row, column), size in np.ndenumerate(sums):
                color = "white" if size > sums.max() / 2 else "black"
                style = {"ha": "center", "va": "center", "color": color, "fontsize": 8}
                axes.text(column, row, show_bytes(size) if size else "", **style)

    def _draw_notes(self, figure: Any) -> None:
        """Writes what was found, where there is nothing to draw."""
        lines = [line for note in self.notes for line in textwrap.wrap(note, 70)]
        figure.set_size_inches(6.5, 1 + 0.25 * len(lines))
        axes = figure.subplots()
        axes.set_axis_off()
        axes.set_title(self.title)
        axes.text(0.5, 0.5, "\n".join(lines), ha="center", va="center", transform=axes.transAxes)

    def _transfers(self, step: str) -> list[Transfer]:
        check_choice("step", step, *_STEPS)
        return self.training if step == "training" else self.prediction

    def _rows(self) -> list[tuple[Any, ...]]:
        found: dict[tuple[str, ...], list[Transfer]] = collections.defaultdict(list)
        for step in _STEPS:
            for one in self._transfers(step):
                found[step, one.source, one.target, one.kind].append(one)

        def order(key: tuple[str, ...]) -> tuple[Any, ...]:
            return _STEPS.index(key[0]), *map(_by_numbers, key[1:])

        return [
            (*key, sum(one.copies for one in alike), sum(one.bytes or 0 for one in alike))
            for key, alike in sorted(found.items(), key=lambda pair: order(pair[0]))
        ]

    def _conclude(self) -> list[str]:
        notes = [] if self.training or self.prediction else ["Nothing crosses between devices."]
        sent = sum(self.bytes("training").get(kind, 0) for kind in _NEEDED)
        if self.training and self.least is not None:
            least = (
                f"the least is {show_bytes(self.least)}."
                if sent >= self.least
                else f"all gradients, whole and in their own types, would take at least "
                f"{show_bytes(self.least)}."
            )
            notes.append(
                f"A training step sends {show_bytes(sent)} of weights, activations and gradients; "
                + least
            )
            if sent > _MUCH * self.least and self.mode == "model":
                notes.append(
                    f"That is {sent / max(self.least, 1):.1f} times as much as the placement "
                    "chosen by default (`placement=None`) has to send: yours puts layers that "
                    "follow each other on different devices."
                )
        if any(self.hosts.values()):
            crossing = self.between_hosts("training" if self.training else "prediction")
            size = show_bytes(sum(crossing.values()))
            notes.append(f"{size} of it cross between hosts, inputs among them.")
        unknown = sum(one.bytes is None for one in [*self.training, *self.prediction])
        return notes + tell_unknown(unknown, "they count as copies, and add no bytes.")


def _by_numbers(name: str) -> list[Any]:
    """A key that sorts by the numbers in a name: `cpu:2` is before `cpu:10`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _by_kind(found: Iterable[Transfer]) -> dict[str, int]:
    totals: collections.Counter[str] = collections.Counter()
    for one in found:
        totals[one.kind] += one.bytes or 0
    return dict(totals)
