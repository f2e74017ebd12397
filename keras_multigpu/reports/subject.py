"""The model that `advise` and `plan` are asked about: its steps, its memory, its cuts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu.arguments import check_model, finite_number, positive_integer, quantity
from keras_multigpu.parallel import make_parallel
from keras_multigpu.reports.inputs import make_inputs
from keras_multigpu.reports.loads import check_mode
from keras_multigpu.reports.memory_report import MemoryReport, memory
from keras_multigpu.reports.prediction import Sizes, StepTime
from keras_multigpu.reports.sizes import find_sizes
from keras_multigpu.reports.timing import compile_for, take_rows


class Subject:
    """A built model, with a batch to train it on, and what was asked about it.

    `batch` has inputs and targets (`None` to train towards zeros), `batch_size` rows on all devices
    together. `sizes` are estimated. `known` is the time of a step on one device, if the user gave
    it. Without inputs, some are drawn.
    """

    def __init__(
        self,
        model: keras.Model,
        batch_size: int,
        counts: Sequence[int],
        modes: Sequence[str],
        *,
        inputs: Any,
        targets: Any,
        step_seconds: float | Mapping[int, float] | None,
        speed: float,
        overlap: float,
        steps: int,
    ):
        self.batch_size = positive_integer("batch_size", batch_size)
        _check_modes(modes, counts, batch_size)
        self.steps, self.speed = positive_integer("steps", steps), quantity("speed", speed)
        hint = "Give 0 if copies and computations take turns."
        finite_number("overlap", overlap, "a share, from 0 to 1", lambda one: 0 <= one <= 1, hint)
        self.known = _known_step(step_seconds, self.batch_size)
        check_model(model, built=True)
        self.model = model
        self.batch = (make_inputs(model, batch_size) if inputs is None else inputs, targets)
        for name, arrays in zip(("inputs", "targets"), self.batch):
            if arrays is not None:
                _check_rows(name, arrays, self.batch_size)
        one_row = take_rows(self.batch[0], 1)
        self.sizes = find_sizes(model, model(one_row), one_row)

    def count_sizes(self, model: keras.Model, rows: int, fewer: int) -> Sizes:
        """The sizes of a copy of the model, from its memory on some rows and on fewer.

        In between, the memory is taken to grow evenly. It does not: with few rows the update needs
        most, with many the activations do. So it is rather less.
        """
        many, few = self._count(model, rows), self._count(model, fewer)
        grown = _in_step(many) - _in_step(few)
        row = max(grown / (rows - fewer), 0.0) if rows > fewer else 0.0
        return dataclasses.replace(
            self.sizes,
            slots=many.bytes(kind="slots"),
            activations=round(row),
            working=max(round(_in_step(many) - rows * row), 0),
            passing=min(round(row), many.bytes(kind="temporaries") // rows),
            unknown=sum(one.unknown for one in many.held),
        )

    def _count(self, model: keras.Model, rows: int) -> MemoryReport:
        parallel = make_parallel(model, 1)
        batch = compile_for(parallel, self.batch)
        return memory(parallel, take_rows(batch, rows))


def _in_step(report: MemoryReport) -> int:
    """What a step needs beside the model's state."""
    return report.peak - report.bytes(kind="weights") - report.bytes(kind="slots")


def _check_modes(modes: Sequence[str], counts: Sequence[int], batch_size: int) -> None:
    """One known mode or more; in mode `"data"` every device needs a row."""
    if isinstance(modes, str) or not modes:
        raise ValueError(
            f"`modes` must be a sequence of one mode or more. Received: modes={modes!r}. Give "
            f"`modes=({modes or 'data'!r},)`."
        )
    for mode in modes:
        check_mode(mode)
    if "data" in modes and max(counts) > batch_size:
        raise ValueError(
            f"In mode 'data' `n_gpus` must not exceed the batch_size={batch_size} rows of a batch: "
            f"further devices would get no rows. Received: n_gpus={tuple(counts)!r}. Give fewer "
            "devices, or a larger batch."
        )


def _known_step(given: Any, batch_size: int) -> StepTime | None:
    """The step time that the user gave, if any."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        return StepTime(0.0, quantity("step_seconds", given) / batch_size)
    others = [rows for rows in given if rows != batch_size]
    if batch_size not in given or len(others) != 1 or not 0 < others[0] < batch_size:
        raise ValueError(
            f"`step_seconds` must have the time of a step on batch_size={batch_size} rows and on "
            f"one smaller batch. Received: step_seconds={given!r}. Give "
            f"{{{batch_size}: ..., {max(batch_size // 2, 1)}: ...}}, or one time."
        )
    times = {rows: quantity("step_seconds", one) for rows, one in given.items()}
    return StepTime.through(batch_size, times[batch_size], others[0], times[others[0]])


def _check_rows(name: str, arrays: Any, batch_size: int) -> None:
    """Raises a `ValueError` if an array has fewer rows than a batch."""
    shapes = [tuple(np.shape(part)) for part in keras.tree.flatten(arrays)]
    if not shapes or any(not shape or shape[0] < batch_size for shape in shapes):
        raise ValueError(
            f"`{name}` must have at least batch_size={batch_size} rows, to time a step on a whole "
            f"batch. Received: {name} of the shapes {shapes}. Give `x[:{batch_size}]`."
        )
