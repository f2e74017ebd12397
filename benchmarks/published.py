"""Compares published step times with what `reports.advise` computes from their descriptions.

Only the models' layers and the times were published. The tables state the other assumptions.
"""

from __future__ import annotations

from benchmarks.processes import markdown_table
from keras_multigpu.reports import ScalingReport
from keras_multigpu.reports.interconnect import PRESETS
from keras_multigpu.reports.loads import find_load
from keras_multigpu.reports.prediction import predict
from keras_multigpu.reports.workload import Cut, Sizes, StepTime, Workload

_FLOAT = 4
_LENGTH, _EMBEDDING, _FILTERS, _WIDTH, _DENSE = 800, 50, 10, 3, 64
# The values that cross between all layers of two towers, for one row: embedding, convolution,
# pooling, dense.
_WITHIN = 2 * (_LENGTH * _EMBEDDING + (_LENGTH - _WIDTH + 1) * _FILTERS + _FILTERS + _DENSE)
_ROWS, _BATCH_SIZE = 100_000, 100
_ONE, _BRANCHES, _ALTERNATING = 20.5, 22.5, 23.0

_AUTOENCODER = ((1, 2, 3, 4), (857.7, 562.5, 384.4, 263.6), (0.0281, 0.0283, 0.0262, 0.0258))


def deepconn() -> str:
    """The epochs of DeepCoNN on two GPUs: published and predicted."""
    rows = [["one device", f"{_ONE:.1f}", *["-"] * 6]]
    for name, published, share, values, copies in (
        ("a branch on each", _BRANCHES, 0.20, _DENSE, 1),
        ("alternating from layer to layer", _ALTERNATING, 0.25, _WITHIN, 8),
    ):
        size = values * _FLOAT
        at_once, in_turn = (_epoch(size, copies, part) for part in (0.5, 1.0))
        seconds = (published, share * published, in_turn - _ONE, at_once, in_turn)
        figures = [f"{one:.1f}" for one in seconds]
        crossing = f"{2 * _ROWS * size / 1e9:.2f}"
        rows.append([name, *figures, crossing, f"{in_turn / published - 1:+.0%}"])
    header = ["placement", "published, s", "copies among it, s", "copies predicted, s"]
    header += ["devices at once, s", "devices in turn, s", "bytes that cross, GB", "error, in turn"]
    return "\n\n".join([_DEEPCONN, markdown_table(header, rows)])


def _epoch(size: int, copies: int, share: float) -> float:
    """The time of an epoch with a model spread over two devices, in seconds.

    Args:
        size: bytes that cross for a row in the forward pass.
        copies: tensors that cross for a batch in the forward pass.
        share: the part of the work that the busier device has.
    """
    steps = _ROWS / _BATCH_SIZE
    cut = Cut(_BATCH_SIZE * size, copies, share)
    step = StepTime(0.0, _ONE / steps / _BATCH_SIZE)  # all of it depends on the rows
    work = Workload(step, _BATCH_SIZE, _NO_SIZES, cuts={2: cut})
    return steps * predict("model", 2, find_load("model", work, 2), _LINK).step_s


_NO_SIZES = Sizes(0, 0, 0)
_LINK = PRESETS["pcie3"]
_DEEPCONN = f"""\
DeepCoNN on two GPUs, one epoch. Published: the layers, the times of an epoch, and the share of the
GPU's time spent on copies (20% and 25%). Assumed: {_ROWS:,} rows in batches of {_BATCH_SIZE}, and
{_LINK}. In turn: the devices wait for each
other. At once: each does half of the work, and neither waits."""
_AUTOENCODER_TEXT = """\
An autoencoder recommender, one training. Published: the times. Unknown: the model, the batch, the
GPUs, the link. The work that doesn't shrink and the copies both grow as (n - 1) / n, so one number,
fitted to the time on two devices, stands for both."""


def autoencoder() -> str:
    """The trainings of the autoencoder on 1 to 4 GPUs: published and predicted."""
    counts, seconds, losses = _AUTOENCODER
    report = ScalingReport.from_figures(counts, seconds, losses)
    lost = 2 * (seconds[1] - seconds[0] / 2)
    free = [seconds[0] / count for count in counts]
    fitted = [seconds[0] / count + lost * (count - 1) / count for count in counts]
    rows = [
        [f"{run.devices}", f"{run.median:.1f}", f"{speedup:.2f}"]
        + [cell for one in predicted for cell in _beside(one, run.median)]
        for run, speedup, *predicted in zip(report.runs, report.speedups, free, fitted)
    ]
    header = ["devices", "published, s", "speed-up", "predicted without copies, s", "error"]
    header += ["predicted with the loss on 2, s", "error"]
    return "\n\n".join([_AUTOENCODER_TEXT, markdown_table(header, rows)])


def _beside(predicted: float, published: float) -> list[str]:
    return [f"{predicted:.1f}", f"{predicted / published - 1:+.0%}"]
