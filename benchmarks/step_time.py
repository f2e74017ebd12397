"""How long a training step takes: keras_multigpu, the backend's own way and plain Keras in turn.

    python -m benchmarks.step_time --models mlp convnet --devices 1 2 8 --repeats 5
    python -m benchmarks.step_time --call predict
    python -m benchmarks.step_time --models convnet --only ours,mirrored,mirrored_sync
    KERAS_BACKEND=jax python -m benchmarks.step_time --models mlp --devices 2 8
    KERAS_BACKEND=jax python -m benchmarks.step_time --only ours,slots,sharded,distributed,laid_out

Every measurement runs in a separate process (`step_worker`), on logical CPU devices with one thread
each; on TensorFlow, on GPUs where there are any. The sides take turns, round by round, so that
other work on the machine affects them alike; ratios are computed within a round. Progress goes to
stderr, the tables to stdout.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from benchmarks import processes
from benchmarks.models import MODELS, TIMED

_BACKEND = keras.backend.backend()
_PEERS = {"tensorflow": ("mirrored", "MirroredStrategy"), "jax": ("distributed", "DataParallel")}
# Not measured unless named by `--only`.
_MORE = {
    "slots": "keras_multigpu, shard='optimizer'",
    "sharded": "keras_multigpu, shard='weights'",
    "laid_out": "ModelParallel, laid out by hand",
    "mirrored_sync": "MirroredStrategy, synchronized",
}
_KINDS = {
    "cpu": "logical CPU devices with one intra-op thread each",
    "gpu": "GPUs, or parts of one where the machine has fewer",
}
# One thread per operation, as if each device were one core.
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
FIGURES = {
    "step_ms": ("ms", "The median step. Here and below: the median round (lowest..highest)."),
    "fastest_ms": ("ms", "The fastest step, which other work on the machine disturbs least."),
    "cpu_ms": ("ms", "Processor time of the median step, all threads together."),
    "first_s": ("s", "First step, from the call: tracing and compiling."),
    "peak_mb": ("MB", "The most memory that the process had, the libraries' included."),
}


def turns(
    models: Sequence[str], devices: Sequence[int], repeats: int, sides: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The measurements in order: within a round, each side once for every number of devices.

    Plain Keras runs on one device, once a round. The backend's own way is left out on one
    device, where we compare with plain Keras.
    """
    for model in models:
        for number in range(repeats):
            if "plain" in sides:
                yield {"model": model, "side": "plain", "devices": 1, "round": number}
            for count in devices:
                for side in sides:
                    if side == "ours" or (side != "plain" and count > 1):
                        yield {"model": model, "side": side, "devices": count, "round": number}


def measure(turn: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Takes one turn in a separate process.

    Args:
        turn: one of `turns`.
        **settings: other arguments of `step_worker.measure`.

    Returns:
        The turn, with the figures named in `FIGURES` and every step's figures, or with an `error`.
    """
    request = {key: turn[key] for key in ("model", "side", "devices")}
    request |= settings
    found = processes.run_module(
        "benchmarks.step_worker",
        request,
        environment={"XLA_FLAGS": ONE_THREAD} if _BACKEND == "jax" else None,
    )
    result = {**turn, **found}
    if "error" not in found:
        result["step_ms"] = statistics.median(found["all_steps_ms"])
        result["fastest_ms"] = min(found["all_steps_ms"])
        result["cpu_ms"] = statistics.median(found["all_cpu_ms"])
    text = found.get("error") or f"{result['step_ms']:.1f} ms, first {found['first_s']:.1f} s"
    processes.progress("{model} round {round}: {side} on {devices}: ".format(**turn) + text)
    return result


class Figures:
    """The measurements of one run, by model, side and number of devices."""

    def __init__(self, results: Sequence[dict[str, Any]]):
        self._results = results

    def has(self, side: str) -> bool:
        """Whether a side was measured."""
        return any(result["side"] == side for result in self._results)

    def find(self, model: str, side: str, devices: int) -> dict[int, dict[str, Any]]:
        """The measurements by round; plain Keras is the same for every number of devices."""
        wanted = (model, side, 1 if side == "plain" else devices)
        return {
            result["round"]: result
            for result in self._results
            if (result["model"], result["side"], result["devices"]) == wanted
        }

    def show(self, key: str, model: str, side: str, devices: int) -> str:
        """Median and spread over the rounds, an error, or `-` if nothing was measured."""
        found = self.find(model, side, devices).values()
        values = [result[key] for result in found if key in result]
        if values:
            return processes.show_rounds(values, 1)
        return next((result["error"] for result in found), "-")

    def ratio(self, key: str, model: str, side: str, devices: int, of: str = "ours") -> str:
        """Median and spread of the ratio of our figure to another side's in the same round."""
        ratios = self.ratios(key, model, side, devices, of)
        return processes.show_rounds(ratios, 2) if ratios else "-"

    def ratios(
        self, key: str, model: str, side: str, devices: int, of: str = "ours"
    ) -> list[float]:
        """The ratios of the rounds in which both sides were measured."""
        ours, other = self.find(model, of, devices), self.find(model, side, devices)
        both = [(ours[number], other[number]) for number in ours if number in other]
        return [one[key] / two[key] for one, two in both if key in one and key in two]

    def mean(self, key: str, models: Sequence[str], side: str, devices: Sequence[int]) -> str:
        """The geometric mean of the median ratios of some models on some numbers of devices."""
        found = [self.ratios(key, model, side, count) for model in models for count in devices]
        medians = [statistics.median(ratios) for ratios in found if ratios]
        return f"{statistics.geometric_mean(medians):.2f}" if medians else "-"


def report(
    figures: Figures, models: Sequence[str], devices: Sequence[int], peer: tuple[str, str]
) -> str:
    """A Markdown table for each of `FIGURES`, with the ratios of the sides."""
    more = {side: name for side, name in _MORE.items() if figures.has(side)}
    sides = {"plain": "plain, 1 device", "ours": "keras_multigpu", peer[0]: peer[1], **more}
    others = (peer[0], "plain", *more)
    start = ["model", "batch", "devices"]
    parts = []
    for key, (unit, title) in FIGURES.items():
        header = [*start, *(f"{name}, {unit}" for name in sides.values())]
        rows = [
            [model, str(TIMED[model].batch_size), str(count)]
            + [figures.show(key, model, side, count) for side in sides]
            + [figures.ratio(key, model, side, count) for side in others]
            for model in models
            for count in devices
        ]
        for count in devices:
            means = [figures.mean(key, models, side, [count]) for side in others]
            rows.append(["geometric mean", "", str(count), *("" for _ in sides), *means])
        header += [f"ours/{name}" for name in (peer[1], "plain", *more.values())]
        parts += [title, processes.markdown_table(header, rows)]
    return "\n\n".join(parts)


def _parse() -> argparse.Namespace:
    parser = processes.make_parser("step_time", __doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(TIMED))
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2, 8], metavar="N")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps in a process")
    parser.add_argument("--only", help="some of the sides, with commas between")
    parser.add_argument("--call", default="fit", choices=["fit", "evaluate", "predict"])
    parser.add_argument("--jit", action="store_true", help="compile with jit_compile=True")
    parser.add_argument("--json", metavar="FILE", help="save the raw figures")
    options = parser.parse_args()
    sides = ["plain", "ours", _PEERS[_BACKEND][0]]
    options.only = options.only.split(",") if options.only else list(sides)
    own = ("slots", "sharded", "laid_out")
    sides += [side for side in _MORE if side not in own or side == "sharded"]
    if _BACKEND == "jax":
        sides = [*sides[:3], *own]
    unknown = set(options.only) - set(sides)
    if unknown:
        parser.error(f"--only takes some of {','.join(sides)}. Received: {','.join(unknown)}")
    return options


def main() -> None:
    options = _parse()
    plan = turns(options.models, options.devices, options.repeats, options.only)
    settings = {"steps": options.steps, "jit": options.jit, "call": options.call}
    results = [measure(turn, **settings) for turn in plan]
    kinds = {result["device"] for result in results if "device" in result}
    environment = {
        "host": processes.host(),
        "versions": processes.merge_versions(results),
        "setting": f"`{options.call}`, {options.repeats} rounds, medians of {options.steps} steps, "
        f"Adam, {', '.join(_KINDS[kind] for kind in sorted(kinds))}, "
        f"jit_compile={options.jit or _BACKEND == 'jax'}",
    }
    print("\n".join(f"- {text}" for text in environment.values()), end="\n\n")
    peer = _PEERS[_BACKEND]
    print(report(Figures(results), options.models, options.devices, peer))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"environment": environment, "measurements": results}, file, indent=1)


if __name__ == "__main__":
    main()
