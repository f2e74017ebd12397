"""The training speed of wide models: indices, dense rows, SciPy CSR, and Vowpal Wabbit.

    python -m benchmarks.wide --repeats 3
    KERAS_BACKEND=jax python -m benchmarks.wide --devices 1 2

Every measurement runs in a separate process (`wide_worker`). The sides take turns, round by round,
so that other programs on the machine disturb all of them alike; ratios are computed within a
round. Progress goes to stderr, the tables to stdout.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import keras

from benchmarks import processes
from benchmarks.wide_worker import BATCH, COLUMNS

_BACKEND = keras.backend.backend()
# Batches in an epoch: enough for about a second.
_BATCHES = {"dense": 3, "csr": 8, "indices": 24, "sparse": 12, "vw": 24}
_LINEAR_FACTOR = {"dense": 1, "csr": 2, "indices": 4, "sparse": 4, "vw": 2}
_NAMES = {
    "dense": "dense rows, made batch by batch",
    "csr": "SciPy CSR through `fit`",
    "indices": "indices, MultiHotDense",
    "sparse": "indices, MultiHotDense, sparse gradients",
    "vw": "Vowpal Wabbit, from its text",
}
_MODELS = {"hidden": "Dense(32), Dense(1), Adam", "linear": "linear, Ftrl"}

Key = tuple[str, str, int]


def keys(models: Sequence[str], devices: Sequence[int]) -> list[Key]:
    """The measurements of a round: model, side, number of devices."""
    sides = ["dense", "csr", *(["sparse"] if _BACKEND == "tensorflow" else [])]
    found: list[Key] = []
    for model in models:
        found += [(model, side, 1) for side in sides]
        found += [(model, "indices", count) for count in devices]
    return found + ([("linear", "vw", 1)] if "linear" in models else [])


def measure(key: Key) -> dict[str, Any]:
    """Runs one measurement in a separate process."""
    model, side, devices = key
    factor = _LINEAR_FACTOR[side] if model == "linear" else 1
    request = {
        "side": side,
        "model": model,
        "rows": BATCH * _BATCHES[side] * factor,
        "devices": devices,
    }
    found = processes.run_module("benchmarks.wide_worker", request)
    if "error" not in found:
        found["rate"] = statistics.median(found["rates"])
    processes.progress(f"{key}: {found.get('error') or round(found['rate'])}")
    return found


def report(rounds: Sequence[dict[Key, dict[str, Any]]], model: str) -> str:
    """A Markdown table of one model: rates, memory, and the speed of indices beside the others."""
    rows = []
    for key in [key for key in rounds[0] if key[0] == model]:
        results = [found[key] for found in rounds]
        ours = [found[model, "indices", 1] for found in rounds]
        done = [pair for pair in zip(ours, results) if not any("error" in one for one in pair)]
        if done:
            rates = processes.show_rounds([other["rate"] for _, other in done], 0)
            failed = len(results) - len(done)
            peak = f"{max(other['peak_mib'] for _, other in done):,.0f}"
            ratios = processes.show_rounds([one["rate"] / other["rate"] for one, other in done], 1)
            cells = [f"{rates}; {failed} failed" if failed else rates, peak, ratios]
        else:
            cells = [results[0].get("error", "nothing to compare with"), "-", "-"]
        rows.append([_NAMES[key[1]], str(key[2]), *cells])
    header = ["input", "devices", "examples/s", "peak memory, MiB", "indices are times as fast"]
    return f"{_MODELS[model]}:\n\n{processes.markdown_table(header, rows)}"


def main() -> None:
    parser = processes.make_parser("wide", __doc__)
    parser.add_argument("--models", nargs="+", default=list(_MODELS), choices=list(_MODELS))
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    options = parser.parse_args()
    plan = keys(options.models, sorted({1, *options.devices}))
    rounds = [{key: measure(key) for key in plan} for _ in range(options.repeats)]
    results = itertools.chain.from_iterable(found.values() for found in rounds)
    processes.report_setting(
        results,
        f"{COLUMNS} columns, 25,360 indices, 80 ones in a row, batches of {BATCH:,}; "
        f"{options.repeats} rounds, medians (lowest..highest)",
    )
    print("\n\n".join(report(rounds, model) for model in options.models))


if __name__ == "__main__":
    main()
