"""Compares step times that `reports.advise` predicts from one device with measured ones.

    python -m benchmarks.prediction --random 6                 # chosen models, and drawn ones
    python -m benchmarks.prediction --seed 7 --devices 2 4     # the same drawn models again
    python -m benchmarks.prediction --published                # the published figures only

Half of the models are drawn at random; the seed is printed. Every model runs in a separate process
(`prediction_worker`), on logical CPU devices with one thread each. They share the processor, and
`advise` gets to know by how much (`processors`). One device and several take turns, so that other
work on the machine slows them all down alike. Progress goes to stderr, the tables to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from benchmarks import processes, published
from benchmarks.prediction_models import CHOSEN
from benchmarks.step_time import ONE_THREAD

_TIMEOUT_S = 1800.0
_CLOSE = 0.15


def measure(model: str, devices: Sequence[int], steps: int, scaling: bool) -> dict[str, Any]:
    """The figures of a model, from a separate process, or an `error`."""
    request = {"model": model, "devices": list(devices), "steps": steps, "scaling": scaling}
    is_jax = keras.backend.backend() == "jax"
    load = os.getloadavg()[0]
    result = processes.run_module(
        "benchmarks.prediction_worker",
        request,
        timeout=_TIMEOUT_S,
        environment={"XLA_FLAGS": ONE_THREAD} if is_jax else None,
    )
    processes.progress(f"{model}: {result.get('error', 'done')}, load {load:.0f}")
    return result | {"load": (load + os.getloadavg()[0]) / 2}


def table(results: Mapping[str, dict[str, Any]], devices: Sequence[int]) -> str:
    """A row for each model and number of devices."""
    rows: list[list[str]] = []
    for model, found in results.items():
        if "error" in found:
            rows.append([model, *["-"] * 9, found["error"]])
            continue
        for place, count in enumerate(devices):
            rows.append([model, *_row(found, place, count)])
    header = ["model", "batch", "devices", "one device, ms", "predicted, ms (range)"]
    header += ["measured, ms (rounds)", "error", "in range", "speed-up predicted", "measured"]
    return processes.markdown_table([*header, "fixed part paid"], rows)


def _row(found: dict[str, Any], place: int, count: int) -> list[str]:
    low, likely, high = found["predicted"][place]
    timed, alone = (statistics.median(one) for one in (found["timed"][place], found["alone"]))
    paid = found["paid"][place]
    return [
        str(found["batch_size"]),
        str(count),
        _times(found["alone"]),
        f"{1e3 * likely:.1f} ({1e3 * low:.1f}..{1e3 * high:.1f})",
        _times(found["timed"][place]),
        f"{likely / timed - 1:+.0%}",
        "yes" if low <= timed <= high else f"within {_outside(found, place):.0%}",
        f"{alone / likely:.2f} ({alone / high:.2f}..{alone / low:.2f})",
        f"{alone / timed:.2f}",
        "-" if paid is None else f"{paid:.1f} times",
    ]


def _times(rounds: Sequence[float]) -> str:
    return processes.show_rounds([1e3 * one for one in rounds], 1)


def _outside(found: dict[str, Any], place: int) -> float:
    """The distance of a time from the range, divided by the time."""
    low, _, high = found["predicted"][place]
    timed = statistics.median(found["timed"][place])
    return max(low / timed - 1, 1 - high / timed, 0.0)


def summarize(results: Mapping[str, dict[str, Any]], devices: Sequence[int]) -> str:
    """The errors of all models, and the errors of the models drawn at random."""
    rows = []
    for name, prefix in (("all", ""), ("drawn at random", "random-")):
        cells = [
            (found, place)
            for model, found in results.items()
            if model.startswith(prefix) and "error" not in found
            for place in range(len(devices))
        ]
        if not cells:
            continue
        steps = [
            abs(found["predicted"][place][1] / statistics.median(found["timed"][place]) - 1)
            for found, place in cells
        ]
        outside = [_outside(found, place) for found, place in cells]
        ranges = [found["predicted"][place] for found, place in cells]
        narrow = [one for one, (low, _, high) in zip(outside, ranges) if high <= 1.3 * low]
        close = sum(one <= _CLOSE for one in narrow)
        rows.append(
            [
                *(name, str(len(cells))),
                *(f"{statistics.median(steps):.0%}", f"{max(steps):.0%}"),
                f"{sum(one == 0 for one in outside)}",
                f"{sum(one <= _CLOSE for one in outside)}",
                f"{close} of {len(narrow)}",
            ]
        )
    header = ["models", "steps", "median error", "largest error", "within the range"]
    header += [f"within {_CLOSE:.0%} of it", f"within {_CLOSE:.0%} of a narrow range (30%)"]
    return processes.markdown_table(header, rows)


def compare_with_scaling(results: Mapping[str, dict[str, Any]], devices: Sequence[int]) -> str:
    """The steps that `advise` measures on devices that are here, beside those of `scaling`."""
    rows = []
    for model, found in results.items():
        for count, ours, theirs in zip(
            (1, *devices),
            [found["alone"], *found["timed"]] if "scaling" in found else [],
            found.get("scaling", []),
        ):
            own = statistics.median(ours)
            error = f"{own / theirs - 1:+.0%}"
            rows.append([model, str(count), f"{1e3 * own:.1f}", f"{1e3 * theirs:.1f}", error])
    header = ["model", "devices", "measured by advise, ms", "by scaling, ms", "difference"]
    return processes.markdown_table(header, rows) if rows else ""


def measure_all(models: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """The figures of models; the file `--json` is read first, and written after each model."""
    path = pathlib.Path(options.json) if options.json else None
    results = json.loads(path.read_text()) if path and path.exists() else {}
    for model in models:
        if model not in results:
            results[model] = measure(model, options.devices, options.steps, options.scaling)
        if path:
            path.write_text(json.dumps(results))
    return results


def compare(results: Mapping[str, dict[str, Any]], devices: Sequence[int], steps: int) -> str:
    """Markdown with the predicted and the measured steps."""
    loads = [found["load"] for found in results.values()]
    setting = (
        f"- {processes.host()}, load average {min(loads):.1f} to {max(loads):.1f}\n"
        f"- {processes.merge_versions(results.values())}\n"
        f"- {steps} steps and more, in 3 rounds in turn; logical CPU devices with one "
        "intra-op thread each"
    )
    parts = [setting, table(results, devices), summarize(results, devices)]
    return "\n\n".join(part for part in [*parts, compare_with_scaling(results, devices)] if part)


def _parse() -> argparse.Namespace:
    parser = processes.make_parser("prediction", __doc__)
    parser.add_argument("--models", nargs="*", default=list(CHOSEN), choices=list(CHOSEN))
    parser.add_argument("--random", type=int, default=7, help="models to draw (default: 7)")
    parser.add_argument("--seed", type=int, help="of the drawn models (default: drawn, printed)")
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 4], metavar="N")
    parser.add_argument("--steps", type=int, default=12, help="timed steps (default: 12)")
    parser.add_argument(
        "--scaling", action="store_true", help="measure with `reports.scaling`, too"
    )
    parser.add_argument("--json", help="a file for the figures; models in it are not run again")
    parser.add_argument("--published", action="store_true", help="only the published figures")
    return parser.parse_args()


def main() -> None:
    options = _parse()
    if not options.published:
        seed = random.randrange(1000) if options.seed is None else options.seed
        drawn = [f"random-{seed + place}" for place in range(options.random)]
        print(f"Seed of the drawn models: {seed}\n")
        models = [*options.models, *drawn]
        results = measure_all(models, options)
        print(compare(results, options.devices, options.steps), end="\n\n")
    print(f"{published.deepconn()}\n\n{published.autoencoder()}")


if __name__ == "__main__":
    main()
