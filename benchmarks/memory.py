"""Compares the memory that `reports.memory` predicts for a training step with what a process uses.

    python -m benchmarks.memory --models mlp convnet
    KERAS_BACKEND=jax python -m benchmarks.memory

On one device, each model in a fresh process. Needs Linux and glibc.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import keras

from benchmarks.memory_models import NAMES
from benchmarks.memory_worker import ENVIRONMENT
from benchmarks.processes import (
    make_parser,
    markdown_table,
    progress,
    report_setting,
    run_module,
    show_rounds,
)

_HEADER = ["model", "batch", "weights, MB", "slots, MB", "batch, MB"]


def row(model: str, found: Mapping[str, Any]) -> list[str]:
    """A row of the table."""
    if "error" in found:
        return [model, *["-"] * (len(_HEADER) - 1), found["error"], "-", "-"]
    parts = [f"{found[kind] / 1e6:.1f}" for kind in ("weights", "slots", "batch")]
    measured = [size / 1e6 for size in found["measured"]]
    predicted = found["predicted"] / 1e6
    error = predicted / statistics.median(measured) - 1
    shown = [f"{predicted:.1f}", show_rounds(measured, 1), f"{error:+.0%}"]
    return [model, str(found["rows"]), *parts, *shown]


def main() -> None:
    parser = make_parser("memory", __doc__)
    parser.add_argument("--models", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each model")
    options = parser.parse_args()
    found = {}
    for model in options.models:
        request = {"model": model, "steps": options.steps}
        found[model] = run_module("benchmarks.memory_worker", request, environment=ENVIRONMENT)
        progress(" ".join(row(model, found[model])))
    setting = f"{keras.backend.backend()}, one CPU device, {options.steps} steps of each model"
    report_setting(found.values(), setting)
    header = [*_HEADER, "predicted, MB", "measured, MB (steps)", "error"]
    print(markdown_table(header, [row(*one) for one in found.items()]))


if __name__ == "__main__":
    main()
