"""What crosses between the devices in a step: counted before anything is trained."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu import engines
from keras_multigpu.engines import Transfer
from keras_multigpu.models import ParallelModel
from keras_multigpu.reports.advice_report import show_bytes
from keras_multigpu.reports.environment import describe_environment
from keras_multigpu.reports.report import Column, Report
from keras_multigpu.reports.state import Snapshot, state_of

_BETWEEN = ("weights", "activations", "gradients")
# What is above the least by less than this is not worth a word.
_MUCH = 1.5


def transfers(parallel: ParallelModel, batch: Any) -> TransfersReport:
    """Counts what crosses between the devices in a training step and in a prediction.

    On TensorFlow the graphs are read that it makes for each device, on JAX the program that XLA
    compiles: no GPU is needed, virtual devices (`keras_multigpu.use_virtual_devices`) give the
    same counts. The step is compiled for this batch, and on TensorFlow it is run once; the
    model's weights, its metrics and its optimizer are as before afterwards. XLA's collective
    operations are counted as rings of devices do them.

    Args:
        parallel: a model that `make_parallel` has made. If it is not compiled, the prediction is
            counted only.
        batch: the inputs, or a tuple of inputs, targets and, if there are any, sample weights,
            as arrays. The number of rows is what counts, not what is in them.

    Returns:
        A report with a row for each step, pair of devices and kind: `"inputs"`, `"weights"`,
        `"activations"`, `"gradients"`, `"other"`.

    Raises:
        ValueError: if the model is not parallel, or the batch has no targets.

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
    given = _check(parallel, batch)
    predicted = _count(parallel, given, training=False)
    trained: list[Transfer] = []
    if parallel.compiled:
        trained = _count(parallel, given, training=True)
    rows = len(keras.tree.flatten(given[0])[0])
    # `advise` tells towers with weights of their own from those that share them.
    is_committee = parallel._parallel_options.get("replicas") == "independent"
    return TransfersReport(
        trained,
        predicted,
        parallel.devices,
        parallel._parallel_least_bytes(rows),
        mode="committee" if is_committee else parallel.mode,
        batch_size=rows,
        hosts={name: engines.current().host_of(name) for name in parallel.devices},
        settings=describe_environment(parallel.devices),
    )


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
        self.notes += self._notes()

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
        sent = sum(self.bytes("training").get(kind, 0) for kind in _BETWEEN)
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


def _check(parallel: Any, batch: Any) -> tuple[Any, ...]:
    if not isinstance(parallel, ParallelModel):
        raise ValueError(
            "`parallel` must be a model that `make_parallel` has made. Received: "
            f"parallel={parallel!r}. Make it parallel first: `make_parallel(model, n_gpus)`."
        )
    given = batch if isinstance(batch, tuple) else (batch,)
    if parallel.compiled and not 2 <= len(given) <= 3:
        raise ValueError(
            "`batch` must be a tuple of inputs, targets and, if there are any, sample weights, "
            f"since the model is compiled. Received: {type(batch).__name__} of {len(given)}. "
            "Give `(x, y)`."
        )
    return (*given, *[None] * (3 - len(given)))


def _count(parallel: Any, batch: tuple[Any, ...], training: bool) -> list[Transfer]:
    """The transfers of a step; the model is as before afterwards."""
    if not parallel.built:
        parallel.predict_on_batch(batch[0])
    before = Snapshot(state_of(parallel))
    functions = {name: getattr(parallel, name) for name in ("train_function", "predict_function")}
    try:
        if training:  # what a first step would make is made beforehand
            parallel.optimizer.build(parallel.trainable_variables)
            before.add(parallel.optimizer.variables)
            parallel.test_on_batch(*batch)
            parallel.reset_metrics()
        return engines.current().count_transfers(parallel, batch, training)
    finally:
        for name, function in functions.items():
            setattr(parallel, name, function)
        parallel.reset_metrics()
        before.restore()
