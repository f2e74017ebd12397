"""A training step on 2 and 4 hosts behind links of limited bandwidth, against Keras 2.

    python -m benchmarks.hosts --rate 1gbit --hosts 2 4 --rounds 3 --tf-keras FOLDER

Each host is a network namespace of Linux with one interface. A bridge joins them, and token bucket
filters (`tc`) limit what each host sends and what it receives: it needs root, `ip` and `tc`. Or
without root: `unshare -rnm sh -c 'mount -t tmpfs none /run && python -m benchmarks.hosts'`.

Three sides take turns, each in fresh processes, with one device on every host: `cluster.join`,
`cluster.connect` (the first host drives all), and Keras 2 (`tf_keras`) with TensorFlow's
`MultiWorkerMirroredStrategy`. The latter is left out without `tf_keras`, which conflicts with
nothing in a folder of its own: `pip install --no-deps --target FOLDER tf_keras`. Progress goes to
stderr, the table to stdout.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import processes

_BRIDGE, _PORT = "kmg-switch", 2222
_ROOT = pathlib.Path(__file__).resolve().parent.parent
_SIDES = {
    "join": "`cluster.join`",
    "connect": "`cluster.connect`",
    "mwms": "`MultiWorkerMirroredStrategy`, Keras 2",
    "mwms_packs": "the same, `bytes_per_pack` of 4 MiB",
}
_MODELS = {
    "mlp": ("mlp", True),
    "convnet": ("convnet", True),
    "convnet, statistics of each host": ("convnet", False),
}
_TIMEOUT_S = 400.0
_RING = "2 P (h - 1) / h"


@contextlib.contextmanager
def linked_hosts(count: int, rate: str) -> Iterator[None]:
    """Network namespaces on a bridge, behind links with a rate as `tc` writes it."""
    bucket = f"root tbf rate {rate} burst 1mb latency 100ms"
    inside = f"ip netns exec {_BRIDGE}"
    commands = [f"ip netns add {_BRIDGE}", f"{inside} ip link add switch type bridge"]
    commands.append(f"{inside} ip link set switch up")
    for number in range(count):
        space = _space(number)
        commands += [
            f"ip netns add {space}",
            f"{inside} ip link add to{number} type veth peer name eth0 netns {space}",
            f"{inside} ip link set to{number} master switch up",
            f"{inside} tc qdisc add dev to{number} {bucket}",
            f"ip netns exec {space} ip addr add {_ip(number)}/24 dev eth0",
            f"ip netns exec {space} ip link set lo up",
            f"ip netns exec {space} ip link set eth0 up",
            f"ip netns exec {space} tc qdisc add dev eth0 {bucket}",
        ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield
    finally:
        for space in [_BRIDGE, *map(_space, range(count))]:
            subprocess.run(["ip", "netns", "del", space], check=False)


def _space(number: int) -> str:
    return f"kmg-host{number}"


def _ip(number: int) -> str:
    return f"10.231.78.{number + 1}"


def run_side(side: str, request: dict[str, Any], count: int, folder: str | None) -> dict[str, Any]:
    """Trains with one side in all namespaces; what the busiest host has measured."""
    addresses = [f"{_ip(number)}:{_PORT}" for number in range(count)]
    asked = {**request, "side": side, "addresses": addresses}
    trained = 1 if side == "connect" else count
    served = [["keras_multigpu", "serve", "--bind", one] for one in addresses[trained:]]
    words = [
        ["benchmarks.hosts_worker", json.dumps({**asked, "number": k})] for k in range(trained)
    ]
    started = [_start(k, one, folder, side) for k, one in enumerate([*words, *served])]
    try:
        found = [_answer(process) for process in started[:trained]]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    errors = [one for one in found if "error" in one]
    if errors:
        return errors[0]
    steps = found[0]["all_steps_s"]
    times = {"step_s": statistics.median(steps), "fastest_s": min(steps)}
    return max(found, key=lambda one: one["sent"]) | times


def _start(number: int, words: list[str], folder: str | None, side: str) -> subprocess.Popen:
    variables = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    if side.startswith("mwms"):
        paths = [folder, variables.get("PYTHONPATH")]
        variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    is_measured = words[0] != "keras_multigpu"
    return subprocess.Popen(
        ["ip", "netns", "exec", _space(number), sys.executable, "-m", *words],
        cwd=_ROOT,
        env=variables,
        stdout=subprocess.PIPE if is_measured else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _answer(process: subprocess.Popen) -> dict[str, Any]:
    try:
        output, _ = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {_TIMEOUT_S:.0f} s"}
    if process.returncode:
        return {"error": f"process ended with code {process.returncode}"}
    return json.loads(output.splitlines()[-1])


def has_keras_2(folder: str | None) -> bool:
    """Whether `tf_keras` can be imported, from a folder too."""
    paths = [path for path in (folder, os.environ.get("PYTHONPATH")) if path]
    command = "import importlib.util, sys; sys.exit(importlib.util.find_spec('tf_keras') is None)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return not subprocess.run([sys.executable, "-c", command], env=environment).returncode


def report(model: str, count: int, rounds: list[dict[str, dict[str, Any]]]) -> list[list[str]]:
    """The table's rows of one model on a number of hosts."""
    return [[model, str(count), _SIDES[side], *_cells(count, side, rounds)] for side in rounds[0]]


def _cells(count: int, side: str, rounds: list[dict[str, dict[str, Any]]]) -> list[str]:
    """What a side has measured, beside Keras 2 in the same round."""
    results = [found[side] for found in rounds]
    errors = [one["error"] for one in results if "error" in one]
    if errors:
        return [errors[0], *["-"] * 6]
    cells = []
    for time in ("step_s", "fastest_s"):
        cells.append(processes.show_rounds([1000 * one[time] for one in results]))
        peers = [found.get("mwms", {}).get(time) for found in rounds]
        ratios = [own[time] / peer for own, peer in zip(results, peers) if peer]
        cells.append(processes.show_rounds(ratios, 2) if ratios else "-")
    ring = 2 * results[0]["weights"] * (count - 1) / count
    sent, received = (
        statistics.median(one[way] for one in results) for way in ("sent", "received")
    )
    return [*cells, f"{sent / 1e6:.2f}", f"{sent / ring:.2f}", f"{received / ring:.2f}"]


def measure_all(options: Any, sides: list[str]) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """The table's rows, and all that was measured."""
    rows, results = [], []
    for count in options.hosts:
        with linked_hosts(count, options.rate):
            for model in options.models:
                kind, is_synchronized = _MODELS[model]
                request = {"model": kind, "is_synchronized": is_synchronized}
                request |= {"rows": options.batch, "steps": options.steps}
                rounds: list[dict[str, dict[str, Any]]] = []
                for _ in range(options.rounds):
                    rounds.append({})
                    for side in sides:
                        found = run_side(side, request, count, options.tf_keras)
                        rounds[-1][side] = found
                        processes.progress(f"{model}, {count} hosts, {side}: {found}")
                results += [found for one in rounds for found in one.values()]
                rows += report(model, count, rounds)
    return rows, results


def main() -> None:
    parser = processes.make_parser("hosts", __doc__)
    parser.add_argument("--rate", default="1gbit", help="as `tc` writes it (default: 1gbit)")
    parser.add_argument("--models", nargs="+", default=list(_MODELS), choices=list(_MODELS))
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--sides", nargs="+", default=list(_SIDES), choices=list(_SIDES))
    parser.add_argument("--batch", type=int, default=64, help="rows on all hosts together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tf-keras", metavar="FOLDER", help="where `tf_keras` is installed")
    options = parser.parse_args()
    sides = list(options.sides)
    if not has_keras_2(options.tf_keras):
        sides = [side for side in sides if not side.startswith("mwms")]
        processes.progress(
            "Without Keras 2. Install it in a folder of its own, and name that by --tf-keras: "
            "pip install --no-deps --target FOLDER tf_keras"
        )
    rows, results = measure_all(options, sides)
    control = pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    processes.report_setting(
        results,
        f"batches of {options.batch} rows on all hosts, {options.rate} each way on each host "
        f"(TCP: {control}); {options.rounds} rounds in turn of {options.steps} steps, SGD",
    )
    header = ["model", "hosts", "side", "step, ms", "of Keras 2", "fastest step, ms", "of Keras 2"]
    header += ["MB sent by a host", f"of {_RING}", "received"]
    print(processes.markdown_table(header, rows))


if __name__ == "__main__":
    main()
