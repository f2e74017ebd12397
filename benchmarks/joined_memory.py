"""The memory of joined processes that train one model, with `shard` and without it (JAX).

    KERAS_BACKEND=jax python -m benchmarks.joined_memory [--width 2048] [--layers 4] [--rows 64]

Two processes on this machine, with one device each, train an MLP with Adam. The table has what
XLA's memory analysis says of a step on each device: the state that the device keeps, and what the
step needs beside. And it has the peak of each process's memory (`VmHWM`, Linux) above what the
process used before the model was made: while the model is made, and while it trains, after the
first step, which XLA compiles.

With `--limit MB` a device is taken to have so much memory, and the table says what fits.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

from benchmarks.processes import free_ports, host, make_parser, markdown_table, progress

_COUNT, _STEPS = 2, 4


def _kilobytes(name: str) -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1])


class Peak:
    """The most memory since it was made, or since `restart`, above what there was at first."""

    def __init__(self) -> None:
        self._base = _kilobytes("VmRSS")
        self.restart()

    def restart(self) -> None:
        """Forgets the peak so far, and gives free memory back to the system (glibc)."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        pathlib.Path("/proc/self/clear_refs").write_text("5")

    @property
    def megabytes(self) -> float:
        """The peak in MB."""
        return (_kilobytes("VmHWM") - self._base) * 1024 / 1e6


def measure(
    shard: str | None, width: int, layers: int, rows: int, number: int, address: str
) -> dict[str, Any]:
    """Trains in one process; returns the figures of its device, in MB."""
    import keras
    import numpy as np

    import keras_multigpu

    keras_multigpu.cluster.join(address, _COUNT, number, timeout=120)
    names = keras_multigpu.list_devices()
    devices = names[:: len(names) // _COUNT]  # one of each process
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(1).normal(size=(rows, width)).astype("float32")
    y = np.zeros((rows, 1), "float32")

    def build() -> keras.Model:
        hidden = [keras.layers.Dense(width, "relu") for _ in range(layers)]
        return keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(1)])

    peak = Peak()
    parallel = keras_multigpu.make_parallel(build, devices=devices, shard=shard)
    parallel.compile("adam", "mse")
    parallel.optimizer.build(parallel.trainable_variables)
    made = peak.megabytes
    parallel.fit(x, y, batch_size=rows, verbose=0)  # compiles, which takes memory of its own
    peak.restart()
    losses = parallel.fit(x, y, epochs=_STEPS, batch_size=rows, verbose=0).history["loss"]
    trained = peak.megabytes
    step = parallel._parallel_steps.compile_step((x, y), True).program.memory_analysis()
    state = 3 * sum(int(np.prod(one.shape)) * 4 for one in parallel.trainable_variables)
    return {
        "state": state / 1e6,
        "kept": step.argument_size_in_bytes / 1e6,
        "needed": (step.temp_size_in_bytes + step.output_size_in_bytes - step.alias_size_in_bytes)
        / 1e6,
        "made": made,
        "trained": trained,
        "loss": losses[-1],
    }


def run(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of all processes, with one `shard`."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    started = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.joined_memory", "--work"),
                json.dumps({**request, "number": number, "address": address}),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "KERAS_BACKEND": "jax"},
        )
        for number in range(_COUNT)
    ]
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]


def main() -> None:
    parser = make_parser("joined_memory", __doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--limit", type=float, metavar="MB", help="memory of a device")
    parser.add_argument("--work", metavar="JSON", help="what one of the processes does")
    options = parser.parse_args()
    if options.work:
        print(json.dumps(measure(**json.loads(options.work))))
        return
    size = {key: getattr(options, key) for key in ("width", "layers", "rows")}
    rows = []
    for shard in (None, "optimizer", "weights"):
        found = run({"shard": shard, **size})
        progress(f"shard={shard!r}: {found}")
        most = {key: max(one[key] for one in found) for key in found[0]}
        figures = ("kept", "needed", "made", "trained")
        cells = [f"`{shard!r}`", *(f"{most[key]:.0f}" for key in figures), f"{most['loss']:.6f}"]
        if options.limit is not None:
            cells.append("yes" if most["kept"] + most["needed"] <= options.limit else "no")
        rows.append(cells)
    print(f"- {host()}\n- {_COUNT} processes with one device each; `{size}`, Adam")
    print(f"- weights and slots: {found[0]['state']:.0f} MB; the larger figure of the processes\n")
    header = ["shard", "kept, MB", "a step beside, MB", "peak while made, MB", "while training, MB"]
    limit = [] if options.limit is None else [f"fits into {options.limit:g} MB"]
    print(markdown_table([*header, "loss", *limit], rows))


if __name__ == "__main__":
    main()
