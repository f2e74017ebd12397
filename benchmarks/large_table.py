"""Trains an `Embedding` that no single device could hold with its slots; counts what each has.

    python -m benchmarks.large_table --rows 10000000 --units 32
    KERAS_BACKEND=jax python -m benchmarks.large_table

Virtual devices of the CPU stand in: they show where the bytes are, not how fast GPUs would be.
"""

from __future__ import annotations

import time

import keras
import numpy as np
from keras import layers

from benchmarks.processes import host, make_parser, markdown_table
from keras_multigpu import make_parallel, reports, use_virtual_devices

_DEVICES, _BATCH, _STEPS = 4, 512, 8


def main() -> None:
    parser = make_parser("large_table", __doc__)
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the table")
    parser.add_argument("--units", type=int, default=32, help="numbers in a row")
    chosen = parser.parse_args()
    use_virtual_devices(_DEVICES)
    print(f"- {host()}, Keras {keras.__version__} on {keras.backend.backend()}\n")
    rng = np.random.default_rng(0)
    x = rng.integers(0, chosen.rows, (_BATCH * _STEPS, 1))
    y = rng.normal(size=(_BATCH * _STEPS, 1))

    def build() -> keras.Model:
        number = keras.Input((1,), dtype="int32")
        rows = layers.Flatten()(layers.Embedding(chosen.rows, chosen.units)(number))
        return keras.Model(number, layers.Dense(1)(rows))

    parallel = make_parallel(build, _DEVICES, shard="weights")
    parallel.compile("adam", "mse")
    begin = time.perf_counter()
    losses = parallel.fit(x, y, batch_size=_BATCH, epochs=2, verbose=0).history["loss"]
    print(f"Two epochs of {_STEPS} steps: {time.perf_counter() - begin:.0f} s, losses {losses}\n")
    whole = chosen.rows * chosen.units * 4 / 1e9
    found = reports.memory(parallel, (x[:_BATCH], y[:_BATCH]))
    table = [["all, of plain Keras", f"{whole:.2f}", f"{2 * whole:.2f}", f"{3 * whole:.2f}"]]
    for name in found.devices:
        parts = [found.bytes(name, kind) / 1e9 for kind in ("weights", "slots")]
        table.append([name, *(f"{part:.2f}" for part in (*parts, sum(parts)))])
    print(markdown_table(["device", "weights, GB", "slots, GB", "both, GB"], table))


if __name__ == "__main__":
    main()
