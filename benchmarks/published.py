"""Published step times against what `reports.advise` computes from their descriptions.

What was published is little: the models' layers, and times. The rest is assumed, and told.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.processes import markdown_table
from keras_multigpu.reports import Cut, Link, ScalingReport
from keras_multigpu.reports.links import PRESETS
from keras_multigpu.reports.loads import find_load
from keras_multigpu.reports.prediction import Sizes, StepTime, Workload, predict

_FLOAT = 4
_LENGTH, _EMBEDDING, _FILTERS, _WIDTH, _DENSE = 800, 50, 10, 3, 64
# What two towers hand from layer to layer, for one row: embedding, convolution, pooling, dense.
_WITHIN = 2 * (_LENGTH * _EMBEDDING + (_LENGTH - _WIDTH + 1) * _FILTERS + _FILTERS + _DENSE)
_ROWS, _BATCH_SIZE = 100_000, 100
_ONE, _BRANCHES, _ALTERNATING = 20.5, 22.5, 23.0

_AUTOENCODER = ((1, 2, 3, 4), (857.7, 562.5, 384.4, 263.6), (0.0281, 0.0283, 0.0262, 0.0258))


def deepconn() -> str:
    """The epochs of DeepCoNN on two GPUs: as published, and as predicted."""
    link = PRESETS["pcie3"]
    cuts = {
        "a branch on each": (_BRANCHES, 0.20, _DENSE, 1),
        "alternating from layer to layer": (_ALTERNATING, 0.25, _WITHIN, 8),
    }
    rows = [["one device", f"{_ONE:.1f}", "-", "-", "-", "-", "-"]]
    for name, (published, share, values, copies) in cuts.items():
        size = values * _FLOAT
        moved = 2 * _ROWS * size / 1e6
        best, worst = (
            _epoch(Cut(_BATCH_SIZE * size, copies, share=part), link) for part in (0.5, 1.0)
        )
        moving = worst - _ONE
        figures = [published, share * published, moving, best, worst]
        errors = f"{worst / published - 1:+.0%}"
        rows.append([name, *(f"{one:.1f}" for one in figures), f"{moved:.0f}", errors])
        rows[-1] = [name, *(f"{one:.1f}" for one in figures), f"{moved:.0f} MB", errors]
    rows[0] += ["-"]
    header = [
        "placement",
        "published, s",
        "of that in copies, s",
        "copies predicted, s",
        "predicted, devices side by side, s",
        "predicted, devices in turn, s",
        "bytes that cross",
        "error of the latter",
    ]
    return markdown_table(header, rows)


def _epoch(cut: Cut, link: Link) -> float:
    """The time of an epoch, in seconds, with a model spread over two devices."""
    steps = _ROWS / _BATCH_SIZE
    work = Workload(StepTime(_ONE / steps, 0.0), _BATCH_SIZE, _NO_SIZES, cuts={2: cut})
    return steps * predict("model", 2, find_load("model", work, 2), link).step_s


_NO_SIZES = Sizes(0, 0, 0, 0, 0, None)


def autoencoder() -> str:
    """The trainings of the autoencoder on 1 to 4 GPUs: as published, and as predicted.

    All the costs of data mode that do not shrink, and all its bytes, grow as (n - 1) / n. So one
    number, taken from the time on two devices, stands for all of them.
    """
    counts, seconds, losses = _AUTOENCODER
    report = ScalingReport.from_figures(counts, seconds, losses)
    lost = 2 * (seconds[1] - seconds[0] / 2)
    free = [seconds[0] / count for count in counts]
    fitted = [seconds[0] / count + lost * (count - 1) / count for count in counts]
    rows = [
        [
            str(count),
            f"{second:.1f}",
            f"{speedup:.2f}",
            *_beside(first, second),
            *_beside(two, second),
        ]
        for count, second, speedup, first, two in zip(
            counts, seconds, report.speedups, free, fitted
        )
    ]
    header = ["devices", "published, s", "speed-up", "nothing to move, s", "error"]
    return markdown_table([*header, "as much to move as on 2, s", "error"], rows)


def _beside(predicted: float, published: float) -> Sequence[str]:
    return f"{predicted:.1f}", f"{predicted / published - 1:+.0%}"
