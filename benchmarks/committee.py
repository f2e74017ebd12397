"""Committees of four against single models: how good they are, and how long a step takes.

    python -m benchmarks.committee quality --seeds 5
    python -m benchmarks.committee time --models mlp convnet --repeats 5

A committee is `make_parallel(model, 4, mode="tower", replicas="independent")`. Every seed, and
every measurement of time, runs in a separate process (`committee_worker`, `step_worker`). Progress
goes to stderr, the tables to stdout.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import processes
from benchmarks.models import MODELS
from benchmarks.step_time import FIGURES, Figures, measure

_MEMBERS = 4
_SIDES = {
    "single": "single model",
    "mix": "committee, by the loss of the mix",
    "mix, alone": "its members alone",
    "replicas": "committee, each by its own loss",
    "replicas, alone": "its members alone",
}


def train(seed: int) -> dict[str, Any]:
    """The scores of a seed, from a separate process, or an `error`."""
    request = json.dumps({"seed": seed})
    result = processes.run_module("benchmarks.committee_worker", request)
    processes.progress(f"seed {seed}: " + (result.get("error") or f"{result['seconds']:.0f} s"))
    return result


def compare_quality(seeds: int) -> str:
    """Trains all sides for every seed, and makes a Markdown table for each data set.

    Raises:
        RuntimeError: if a seed gave no scores.
    """
    results = [train(seed) for seed in range(seeds)]
    errors = [result["error"] for result in results if "error" in result]
    if errors:
        raise RuntimeError(f"{len(errors)} of {seeds} seeds gave no scores: {errors[0]}")
    parts = [
        f"- {processes.host()}\n- {processes.merge_versions(results)}\n"
        f"- seeds 0 to {seeds - 1}, mean ± standard deviation over the seeds"
    ]
    for task in results[0]["scores"]:
        scores = [result["scores"][task] for result in results]
        names = list(scores[0]["single"])
        rows = [
            [title, *(_show(scores, side, name) for name in names), _count_wins(scores, side)]
            for side, title in _SIDES.items()
        ]
        parts += [processes.markdown_table([task, *names, "NLL below the single model's"], rows)]
    return "\n\n".join(parts)


def _show(scores: Sequence[dict[str, dict[str, float]]], side: str, name: str) -> str:
    """Mean and standard deviation of a score, with digits that fit its size."""
    values = [one[side][name] for one in scores]
    middle = statistics.mean(values)
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    digits = 3 if middle < 1 else 2 if middle < 10 else 1
    return f"{middle:.{digits}f} ± {deviation:.{digits}f}"


def _count_wins(scores: Sequence[dict[str, dict[str, float]]], side: str) -> str:
    if side == "single":
        return "-"
    wins = sum(one[side]["NLL"] < one["single"]["NLL"] for one in scores)
    return f"{wins} of {len(scores)} seeds"


def compare_time(models: Sequence[str], repeats: int, steps: int) -> str:
    """Times both sides in turn, and makes a Markdown table of the step times and their ratios."""
    plan = [
        {"model": model, "side": side, "devices": _MEMBERS, "round": number}
        for model in models
        for number in range(repeats)
        for side in ("towers", "separate")
    ]
    results = [measure(turn, steps=steps) for turn in plan]
    setting = (
        f"- {processes.host()}\n- {processes.merge_versions(results)}\n"
        f"- {repeats} rounds, medians of {steps} steps, "
        f"Adam, {_MEMBERS} logical CPU devices, parts of one processor, with one intra-op thread"
    )
    figures = Figures(results)
    header = ["model", "batch", f"{_MEMBERS} towers", f"{_MEMBERS} models in turn", "ratio"]
    parts = [setting]
    for key, (unit, title) in FIGURES.items():
        rows = [
            [model, str(MODELS[model].batch_size)]
            + [figures.show(key, model, side, _MEMBERS) for side in ("towers", "separate")]
            + [figures.ratio(key, model, "separate", _MEMBERS, of="towers")]
            for model in models
        ]
        parts += [f"{title} In {unit}.", processes.markdown_table(header, rows)]
    return "\n\n".join(parts)


def _parse() -> argparse.Namespace:
    parser = processes.make_parser("committee", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    quality = commands.add_parser("quality", help="scores on two data sets")
    quality.add_argument("--seeds", type=int, default=5, help="how many (default: 5)")
    time = commands.add_parser("time", help="step times")
    models = ["mlp", "convnet"]
    time.add_argument("--models", nargs="+", default=models, choices=list(MODELS))
    time.add_argument("--repeats", type=int, default=5, help="rounds (default: 5)")
    time.add_argument("--steps", type=int, default=10, help="timed steps in a process")
    return parser.parse_args()


def main() -> None:
    options = _parse()
    if options.command == "quality":
        print(compare_quality(options.seeds))
    else:
        print(compare_time(options.models, options.repeats, options.steps))


if __name__ == "__main__":
    main()
