"""What a reader of measured trainings must beware of."""

from __future__ import annotations

from collections.abc import Sequence

from keras_multigpu import engines
from keras_multigpu.arguments import number_of
from keras_multigpu.reports.scaling_report import Run


def find_short(there: int, sizes: Sequence[int | None]) -> list[str]:
    """Says so if the data have fewer rows than a batch was asked to have."""
    if all(size is None or size <= there for size in sizes):
        return []
    asked = ", ".join(str(size) for size in dict.fromkeys(sizes))
    return [
        f"The data have {number_of(there, 'row')}, so that no batch has more. Asked for: {asked}."
    ]


def find_undivided(
    runs: Sequence[Run], devices: Sequence[str], together: int, size: int | None
) -> list[str]:
    """Where slices, of so many devices `together`, can't share the batches, of `size` if known."""
    divides, notes = engines.current().divides, []
    for run in runs:
        rows, width = run.batch_size or size or 0, min(together, run.devices)
        slices = run.devices // width
        if rows and not divides(devices[: run.devices], rows, width):
            batches = f"batches of {number_of(rows, 'row')}"
            why = f"{run.devices} devices don't divide {batches}, so that each"
            if not rows % slices:
                why = f"On processors each device of {run.devices}, with one row of {rows},"
            notes.append(
                f"{why} computes all of them. Give a multiple of {slices} rows, two or more for "
                "each device."
            )
        elif 0 < rows < slices:
            notes.append(
                f"Batches of {number_of(rows, 'row')} leave {slices - rows} of {slices} devices "
                "without work."
            )
    return notes


def doubt_times(runs: Sequence[Run], steps: int | None, epochs: int) -> list[str]:
    """What a reader of the figures must beware of."""
    notes = []
    if steps is not None and any(run.steps != steps * epochs for run in runs):
        made = " or ".join(map(str, sorted({run.steps or 0 for run in runs})))
        notes.append(
            f"The data ended early: you asked for steps={steps} in each of "
            f"{number_of(epochs, 'epoch')}, and the runs had {made} batches. The times are of "
            "these batches."
        )
    if not all(run.step_times for run in runs):
        notes.append(
            "An epoch has a single batch, so its time includes the overhead of an epoch. Give "
            "more batches to separate the two."
        )
    return notes
