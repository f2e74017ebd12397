"""A step on the devices of another machine, over a link of limited bandwidth.

    python -m benchmarks.network --rate 1gbit --devices 4 --rounds 3

The other machine is a network namespace of Linux, and the link a pair of virtual interfaces, each
with a token bucket filter (`tc`) that limits the rate: it needs root, `ip` and `tc`. A worker
(`python -m keras_multigpu serve`) with logical CPU devices runs in the namespace, the training
process outside. Three ways are compared: weights and gradients cross once, and hubs pass them on;
the same in bfloat16; a copy to every device, and every device's gradient back. The sides take
turns, each in a separate process; the interface counts the bytes. Progress goes to stderr, the
table to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import processes
from benchmarks.models import MODELS

_SPACE, _HERE, _THERE = "kmg-worker", "kmg-here", "kmg-there"
_DRIVER, _WORKER, _PORT = "10.231.77.1", "10.231.77.2", 2222
_SIDES = {
    "hubs": "once, passed on by hubs",
    "bfloat16": "once, in bfloat16",
    "naive": "a copy to every device",
}
_WARM_UP = 2
_TIMEOUT_S = 600.0


@contextlib.contextmanager
def limited_link(rate: str) -> Iterator[None]:
    """A network namespace behind a link with a rate, as `tc` writes it."""
    bucket = f"root tbf rate {rate} burst 1mb latency 100ms"
    inside = f"ip netns exec {_SPACE}"
    try:
        for command in (
            f"ip netns add {_SPACE}",
            f"ip link add {_HERE} type veth peer name {_THERE} netns {_SPACE}",
            f"ip addr add {_DRIVER}/30 dev {_HERE}",
            f"ip link set {_HERE} up",
            f"{inside} ip addr add {_WORKER}/30 dev {_THERE}",
            f"{inside} ip link set {_THERE} up",
            f"{inside} ip link set lo up",
            f"tc qdisc add dev {_HERE} {bucket}",
            f"{inside} tc qdisc add dev {_THERE} {bucket}",
        ):
            subprocess.run(command.split(), check=True)
        yield
    finally:
        subprocess.run(["ip", "link", "del", _HERE], check=False)
        subprocess.run(["ip", "netns", "del", _SPACE], check=False)


@contextlib.contextmanager
def worker(devices: int) -> Iterator[None]:
    """A worker in the namespace."""
    served = [sys.executable, "-m", "keras_multigpu", "serve", "--bind", f"{_WORKER}:{_PORT}"]
    process = subprocess.Popen(
        ["ip", "netns", "exec", _SPACE, *served, f"--virtual-devices={devices}"],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(side: str, model: str, steps: int) -> dict[str, Any]:
    """Times the steps of one side, in this process.

    Args:
        side: one of `_SIDES`.
        model: a name in `MODELS`.
        steps: how many steps to time.
    """
    import keras
    import tensorflow as tf

    from benchmarks.step_worker import Clock
    from keras_multigpu import cluster, make_parallel
    from keras_multigpu.engines.tensorflow.weights import exchange

    if side == "naive":
        exchange.host_of = lambda device: device  # as if each device were a separate host
    devices = cluster.connect([f"{_WORKER}:{_PORT}"], timeout=60)
    keras.utils.set_random_seed(0)
    benchmark, clock, crossed = MODELS[model], Clock(), []
    counter = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: crossed.append(_crossed())
    )
    options = {"wire_dtype": "bfloat16"} if side == "bfloat16" else {}
    parallel = make_parallel(benchmark.build(), devices=devices, **options)
    benchmark.compile(parallel, jit_compile=False)
    data = tf.data.Dataset.from_tensors(benchmark.make_batch()).repeat(1 + _WARM_UP + steps)
    parallel.fit(data, verbose=0, callbacks=[clock, counter])
    seconds = [end - begin for begin, end in itertools.pairwise(clock.wall)]
    first, last = crossed[_WARM_UP], crossed[-1]
    return {
        "step_s": statistics.median(seconds[1 + _WARM_UP :]),
        "out_mb": (last[0] - first[0]) / steps / 1e6,
        "back_mb": (last[1] - first[1]) / steps / 1e6,
        "weights_mb": 4 * parallel.count_params() / 1e6,
    }


def _crossed() -> tuple[int, int]:
    """The bytes that the link's interface has sent and received."""
    counts = pathlib.Path(f"/sys/class/net/{_HERE}/statistics")
    sent, received = (int((counts / f"{way}_bytes").read_text()) for way in ("tx", "rx"))
    return sent, received


def report(model: str, rounds: list[dict[str, dict[str, Any]]]) -> list[list[str]]:
    """The table's rows of one model."""
    rows = []
    for side, name in _SIDES.items():
        results = [found[side] for found in rounds]
        errors = [result["error"] for result in results if "error" in result]
        if errors or any("error" in found["naive"] for found in rounds):
            rows.append([model, name, *["-"] * 4, (errors or ["nothing to compare with"])[0]])
            continue
        medians = {
            figure: statistics.median(result[figure] for result in results)
            for figure in ("weights_mb", "out_mb", "back_mb", "step_s")
        }
        ratios = [found[side]["step_s"] / found["naive"]["step_s"] for found in rounds]
        cells = [f"{medians[figure]:.1f}" for figure in ("weights_mb", "out_mb", "back_mb")]
        step = f"{1000 * medians['step_s']:,.0f}"
        rows.append([model, name, *cells, step, processes.show_rounds(ratios, 2)])
    return rows


def main() -> None:
    parser = processes.make_parser("network", __doc__)
    parser.add_argument("--rate", default="1gbit", help="as `tc` writes it (default: 1gbit)")
    parser.add_argument("--models", nargs="+", default=["mlp", "convnet"], choices=list(MODELS))
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--measure", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        processes.answer(measure, ("keras", "tensorflow"), options.measure)
        return
    results: list[dict[str, Any]] = []
    rows = []
    with limited_link(options.rate), worker(options.devices):
        for model in options.models:
            rounds = []
            for _ in range(options.rounds):
                found = {}
                for side in _SIDES:
                    request = {"side": side, "model": model, "steps": options.steps}
                    found[side] = processes.run_module(
                        "benchmarks.network", "--measure", request, timeout=_TIMEOUT_S
                    )
                    processes.progress(f"{model}, {side}: {found[side]}")
                rounds.append(found)
                results += found.values()
            rows += report(model, rounds)
    processes.report_setting(
        results,
        f"{options.devices} logical CPU devices of one worker, {options.rate} each way; "
        f"{options.rounds} rounds in turn of {options.steps} steps",
    )
    header = ["model", "how weights cross", "weights, MB", "MB out", "MB back", "step, ms"]
    print(processes.markdown_table([*header, "of the naive copy"], rows))


if __name__ == "__main__":
    main()
