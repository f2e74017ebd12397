"""Times the first `fit`, `evaluate` and `predict` of one model, in this process: see `first_calls`.

    python -m benchmarks.first_calls_worker '{"model": "EfficientNetV2B0", "devices": 4}'

The last line on stdout is a JSON object: for each call the seconds (`wall_s`) and the processor
time of all threads (`cpu_s`), and the versions.
"""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np

import keras_multigpu
from benchmarks.processes import answer


def measure(model: str, devices: int, rows: int, size: int) -> dict[str, Any]:
    """Times each call, on one batch.

    Args:
        model: a name in `keras.applications`.
        devices: the number of virtual devices; `0` is plain Keras, on the first of four.
        rows: of the batch.
        size: height and width of a picture.
    """
    keras_multigpu.use_virtual_devices(devices or 4)
    keras.utils.set_random_seed(0)
    build = getattr(keras.applications, model)
    network = build(weights=None, input_shape=(size, size, 3), classes=10)
    if devices:
        network = keras_multigpu.make_parallel(network, n_gpus=devices)
    network.compile("adam", "sparse_categorical_crossentropy")
    x = np.random.default_rng(0).random((rows, size, size, 3), "float32")
    y = np.arange(rows) % 10
    calls = {
        "fit": lambda: network.fit(x, y, batch_size=rows, verbose=0),
        "evaluate": lambda: network.evaluate(x, y, batch_size=rows, verbose=0),
        "predict": lambda: network.predict(x, batch_size=rows, verbose=0),
    }
    found: dict[str, Any] = {}
    for name, call in calls.items():
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        found[name] = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    return found


def main() -> None:
    answer(measure, ("keras", keras.backend.backend(), "keras_multigpu"))


if __name__ == "__main__":
    main()
