"""Predicts the step times of one model on n devices, then measures them: see `prediction`.

    python -m benchmarks.prediction_worker '{"model": "mlp", "devices": [1, 2, 4], "steps": 10}'

The last line on stdout is a JSON object: for each number of devices the step in seconds as it was
predicted (`predicted`) and measured (`measured`, and every repeat in `repeats`), the speed-ups of
both, how many devices' worth of processors there were (`processors`), and the versions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import keras_multigpu
from benchmarks.models import MODELS
from benchmarks.processes import answer
from benchmarks.step_worker import split_processor
from keras_multigpu import reports

_BACKEND = keras.backend.backend()


def compare(model: str, devices: list[int], steps: int, repeats: int) -> dict[str, Any]:
    """The figures of one model.

    Args:
        model: a name in `MODELS`.
        devices: the numbers of logical devices.
        steps: how many steps are timed, by either.
        repeats: how many times by `reports.scaling`.
    """
    split_processor(max(devices))
    keras.utils.set_random_seed(0)
    benchmark = MODELS[model]
    template = benchmark.build()
    benchmark.compile(template, jit_compile=_BACKEND == "jax")
    batch = benchmark.make_batch()
    one, all_cores = _cores_of_one(template, batch, steps), _cores_of_all()
    processors = max(all_cores / one, 1.0)
    advice = reports.advise(
        template,
        benchmark.batch_size,
        devices,
        inputs=batch[0],
        processors=processors,
        steps=steps,
    )
    data = tuple(np.concatenate([part] * steps) for part in batch)
    measured = reports.scaling(
        template, data, devices, batch_size=benchmark.batch_size, repeats=repeats, verbose=0
    )
    return {
        "batch_size": benchmark.batch_size,
        "processors": processors,
        "link": advice.settings["link"],
        "predicted": [one.step_s for one in advice.predictions],
        "measured": [run.step_seconds for run in measured.runs],
        "repeats": [[one / steps for one in run.seconds] for run in measured.runs],
        "predicted_speedup": [one.speedup for one in advice.predictions],
        "measured_speedup": measured.speedups,
    }


def _cores_of_one(model: keras.Model, batch: Any, steps: int) -> float:
    """How many cores one device gets: its processor time by the wall-clock time."""
    parallel = keras_multigpu.make_parallel(model, 1)
    for _ in range(2):  # the first is for tracing and compiling
        parallel.train_on_batch(*batch)
    return _rate(lambda: parallel.train_on_batch(*batch), steps)


def _cores_of_all() -> float:
    """How many cores this process gets when it asks for all, beside what else the machine does."""
    matrix = np.ones((1500, 1500), "float32")
    return _rate(lambda: matrix @ matrix, 30)  # NumPy multiplies on as many threads as cores


def _rate(function: Callable[[], Any], times: int) -> float:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(times):
        function()
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


def main() -> None:
    answer(compare, ("keras", _BACKEND, "keras_multigpu"))


if __name__ == "__main__":
    main()
