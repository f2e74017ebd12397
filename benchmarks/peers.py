"""What the peers of keras_multigpu do with four devices in cases that one device handles.

    python -m benchmarks.peers --jax-python /path/to/an/environment/with/jax/bin/python

Every cell of the table runs in a separate process (`peer_cells`). A cell shows the difference from
plain Keras on one device, or the exception. Progress goes to stderr, the table to stdout.

Only `--machines` measures the row of several machines: its two processes call each other
at 127.0.0.1, but TensorFlow's servers listen on every interface of the host while they run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import os
import subprocess
import sys
from typing import Any

from benchmarks import processes

_SIDES = {
    "plain": "one device",
    "mirrored": "`tf.distribute.MirroredStrategy`",
    "jax": "`keras.distribution.DataParallel` (JAX)",
    "ours": "keras_multigpu",
}
_CASES = {
    "uneven": "2 epochs of SGD, last batch incomplete: weights",
    "few_rows": "`evaluate` on 1, 2, 3 and 5 samples: loss",
    "csr": "SciPy CSR matrix given to `fit`: weights",
    "built_before": "wrapping a model that was built before: weights",
}
_MACHINES = "several machines, `MultiWorkerMirroredStrategy`: weights"
_NO_JAX = {"text": "JAX not installed"}


def run_cell(case: str, side: str, jax_python: str | None, timeout: float) -> dict[str, Any]:
    """One cell: its `text`, and the `versions` in use."""
    if side == "jax" and jax_python is None:
        return _NO_JAX
    found = processes.run_module(
        "benchmarks.peer_cells",
        case,
        side,
        timeout=timeout,
        python=jax_python if side == "jax" and jax_python else sys.executable,
        environment={"KERAS_BACKEND": "jax" if side == "jax" else "tensorflow"},
    )
    return _with_text(f"{case}, {side}", found)


def run_machines(timeout: float) -> dict[str, Any]:
    """The cell of several machines: two processes that reach each other over loopback."""
    addresses = [f"127.0.0.1:{port}" for port in processes.free_ports(2)]

    def run_worker(index: int) -> dict[str, Any]:
        task = {"type": "worker", "index": index}
        cluster = json.dumps({"cluster": {"worker": addresses}, "task": task})
        environment = {"KERAS_BACKEND": "tensorflow", "TF_CONFIG": cluster}
        arguments = ("several_machines", "workers")
        return processes.run_module(
            "benchmarks.peer_cells", *arguments, timeout=timeout, environment=environment
        )

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        chief, _ = pool.map(run_worker, range(2))
    return _with_text("several_machines", chief)


def _with_text(name: str, found: dict[str, Any]) -> dict[str, Any]:
    cell = {"text": found.get("error"), **found}
    processes.progress(f"{name}: {cell['text']}")
    return cell


def _has_jax(python: str) -> bool:
    command = [python, "-c", "import jax, keras, scipy"]
    variables = {**os.environ, "KERAS_BACKEND": "jax"}
    return not subprocess.run(command, env=variables, capture_output=True, check=False).returncode


def _parse() -> argparse.Namespace:
    parser = processes.make_parser("peers", __doc__)
    parser.add_argument(
        "--jax-python",
        default=sys.executable,
        metavar="PYTHON",
        help="an interpreter with keras, jax and scipy (default: this one)",
    )
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one cell")
    parser.add_argument("--machines", action="store_true", help="also start two servers")
    return parser.parse_args()


def main() -> None:
    options = _parse()
    jax_python = options.jax_python if _has_jax(options.jax_python) else None
    cells = {
        case: [run_cell(case, side, jax_python, options.timeout) for side in _SIDES]
        for case in _CASES
    }
    machines = run_machines(options.timeout) if options.machines else {"text": "not measured"}
    rows = [[_CASES[case], *(cell["text"] for cell in row)] for case, row in cells.items()]
    rows.append([_MACHINES, "-", machines["text"], "-", "not yet"])
    print(f"- {processes.host()}")
    print(f"- {processes.merge_versions([*itertools.chain(*cells.values()), machines])}")
    print("- four virtual devices, 70 samples (64 where batches are whole), batches of 32\n")
    print(processes.markdown_table(["case", *_SIDES.values()], rows))


if __name__ == "__main__":
    main()
