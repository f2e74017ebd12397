"""Step times that `reports.advise` predicts, against those that `reports.scaling` measures.

    python -m benchmarks.prediction --models mlp convnet --devices 1 2 4
    python -m benchmarks.prediction --published

Every model is a process of its own (`prediction_worker`), on logical CPU devices with one thread
each, which share the processor: the prediction is told so. Progress goes to stderr, the tables to
stdout.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

import keras

from benchmarks import published
from benchmarks.models import MODELS
from benchmarks.processes import host, markdown_table, merge_versions, progress, run_module
from benchmarks.step_time import ONE_THREAD

_TIMEOUT_S = 1800.0


def measure(model: str, devices: Sequence[int], steps: int, repeats: int) -> dict[str, Any]:
    """The figures of a model, from a process of its own, or an `error`."""
    request = {"model": model, "devices": list(devices), "steps": steps, "repeats": repeats}
    is_jax = keras.backend.backend() == "jax"
    result = run_module(
        "benchmarks.prediction_worker",
        json.dumps(request),
        timeout=_TIMEOUT_S,
        environment={"XLA_FLAGS": ONE_THREAD} if is_jax else None,
    )
    progress(f"{model}: {result.get('error', 'done')}")
    return result


def compare(models: Sequence[str], devices: Sequence[int], steps: int, repeats: int) -> str:
    """Predicts and measures, and makes a Markdown table of both."""
    results = {model: measure(model, devices, steps, repeats) for model in models}
    rows: list[list[str]] = []
    errors: dict[str, list[float]] = {"step": [], "speed-up": []}
    for model, found in results.items():
        if "error" in found:
            rows.append([model, *["-"] * 7, found["error"]])
            continue
        for place, count in enumerate(devices):
            rows.append([model, *_row(found, place, count)])
            if count > 1:
                errors["step"].append(_error(found, place, ""))
                errors["speed-up"].append(_error(found, place, "_speedup"))
    header = ["model", "batch", "devices", "predicted, ms", "measured, ms (lowest..highest)"]
    header += ["error", "speed-up predicted", "measured", "processors"]
    setting = (
        f"- {host()}\n- {merge_versions(results.values())}\n- {repeats} repeats in turn of {steps} "
        "steps; logical CPU devices with one intra-op thread each"
    )
    parts = [setting, markdown_table(header, rows)]
    parts += [
        f"Error of the {name} on more than one device: median {statistics.median(values):.0%}, "
        f"largest {max(values):.0%}, over {len(values)} predictions."
        for name, values in errors.items()
        if values
    ]
    return "\n\n".join(parts)


def _error(found: dict[str, Any], place: int, figure: str) -> float:
    return abs(found["predicted" + figure][place] / found["measured" + figure][place] - 1)


def _row(found: dict[str, Any], place: int, count: int) -> list[str]:
    predicted, measured = found["predicted"][place], found["measured"][place]
    ends = (f"{1e3 * end(found['repeats'][place]):.1f}" for end in (min, max))
    return [
        str(found["batch_size"]),
        str(count),
        f"{1e3 * predicted:.1f}",
        f"{1e3 * measured:.1f} ({'..'.join(ends)})",
        f"{predicted / measured - 1:+.0%}",
        f"{found['predicted_speedup'][place]:.2f}",
        f"{found['measured_speedup'][place]:.2f}",
        f"{found['processors']:.2f}",
    ]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prediction", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2, 4], metavar="N")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default: 10)")
    parser.add_argument("--repeats", type=int, default=3, help="of either (default: 3)")
    parser.add_argument("--published", action="store_true", help="only the published figures")
    return parser.parse_args()


def main() -> None:
    options = _parse()
    if not options.published:
        print(compare(options.models, options.devices, options.steps, options.repeats))
        print()
    print(f"{published.deepconn()}\n\n{published.autoencoder()}")


if __name__ == "__main__":
    main()
