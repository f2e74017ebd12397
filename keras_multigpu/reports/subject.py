"""The model that a prediction is about: its sizes, its steps, its memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_multigpu.arguments import check_model
from keras_multigpu.parallel import make_parallel
from keras_multigpu.reports.advice_arguments import check_rows
from keras_multigpu.reports.inspection import find_sizes, make_inputs
from keras_multigpu.reports.memory_report import MemoryReport, memory
from keras_multigpu.reports.placement import find_cut
from keras_multigpu.reports.prediction import Cut, Sizes
from keras_multigpu.reports.timing import Measured, compile_for, measure_steps, take_rows


@dataclasses.dataclass(frozen=True)
class Subject:
    """A built model, with rows to train it on, and its sizes.

    Attributes:
        model: the model.
        batch_size: the rows of a batch on all devices together.
        inputs: as many rows of inputs.
        targets: as many rows of targets; `None` to train towards zeros.
        sizes: the model's bytes: estimated, or counted.
        rows: the rows for which they were counted.
        unknown: how many tensors the counted ones leave out.
    """

    model: keras.Model
    batch_size: int
    inputs: Any
    targets: Any
    sizes: Sizes
    rows: int = 0
    unknown: int = 0

    @classmethod
    def make(cls, model: keras.Model, batch_size: int, inputs: Any, targets: Any) -> Subject:
        """A subject with estimated sizes. Without inputs it gets random ones."""
        check_model(model, built=True)
        if inputs is None:
            inputs = make_inputs(model, batch_size)
        check_rows("inputs", inputs, batch_size)
        if targets is not None:
            check_rows("targets", targets, batch_size)
        one_row = take_rows(inputs, 1)
        sizes = find_sizes(model, model(one_row), one_row)
        return cls(model, batch_size, inputs, targets, sizes)

    def find_cuts(
        self,
        counts: Sequence[int],
        known: Mapping[int, Cut] | None = None,
        placement: Mapping[str, int] | None = None,
    ) -> dict[int, Cut]:
        """How mode `"model"` divides the model, for each number of devices."""
        found = dict(known or {})
        for count in counts:
            if count > 1 and count not in found:
                found[count] = find_cut(self.model, count, self.batch_size, self.sizes, placement)
        return found

    def time(
        self,
        rows: tuple[int, int],
        steps: int,
        here: Mapping[str, Sequence[int]],
        placement: Mapping[str, int] | None = None,
    ) -> Measured:
        """Times steps on a number of rows and on a smaller one; see `measure_steps`."""
        batch = self.inputs, self.targets
        return measure_steps(self.model, batch, rows, steps, here, placement)

    def counted(self, rows: tuple[int, int]) -> Subject:
        """The same with counted sizes, from the memory of a number of rows and of a smaller one.

        In between, the memory is taken to grow evenly. It does not: with few rows the update needs
        most, with many the activations do. So it is rather less.
        """
        many, few = (self._count(count) for count in rows)
        grown = [_in_step(many) - _in_step(few), rows[0] - rows[1]]
        row = max(grown[0] / grown[1], 0.0) if grown[1] else 0.0
        sizes = dataclasses.replace(
            self.sizes,
            slots=many.bytes(kind="slots"),
            activations=round(row),
            working=max(round(_in_step(many) - rows[0] * row), 0),
            passing=min(round(row), many.bytes(kind="temporaries") // rows[0]),
        )
        unknown = sum(one.unknown for one in many.held)
        return dataclasses.replace(self, sizes=sizes, rows=rows[0], unknown=unknown)

    def _count(self, rows: int) -> MemoryReport:
        parallel = make_parallel(self.model, 1)
        batch = compile_for(parallel, (self.inputs, self.targets))
        return memory(parallel, take_rows(batch, rows))


def _in_step(report: MemoryReport) -> int:
    """What a step needs beside the model's state."""
    return report.peak - report.bytes(kind="weights") - report.bytes(kind="slots")
