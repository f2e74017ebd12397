"""Predicts the step times of one model on n devices, and times them: see `prediction`.

    python -m benchmarks.prediction_worker '{"model": "random-7", "devices": [2, 4], "steps": 12}'

The last line on stdout is a JSON object: for each number of devices the step in seconds, predicted
from one device (`predicted`: the least, the likely one, the most) and measured (`timed`: each
round); the number of devices that the processors could keep busy (`processors`); the versions; and,
if asked for, the steps of `reports.scaling`.
"""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np

from benchmarks.prediction_models import find
from benchmarks.processes import answer
from benchmarks.step_worker import split_processor
from keras_multigpu import reports
from keras_multigpu.reports.timing import Measured, measure_steps

_BACKEND = keras.backend.backend()


def compare(model: str, devices: list[int], steps: int, scaling: bool) -> dict[str, Any]:
    """The figures of one model.

    Args:
        model: a name that `prediction_models.find` knows.
        devices: the numbers of logical devices, above one.
        steps: the least number of steps to time.
        scaling: whether `reports.scaling` measures them too.
    """
    split_processor(max(devices))
    keras.utils.set_random_seed(0)
    benchmark = find(model)
    template, batch, rows = benchmark.build(), benchmark.make_batch(), benchmark.batch_size
    benchmark.compile(template, jit_compile=_BACKEND == "jax")
    fewer = max(rows // max(devices), 1)
    begin, available = time.perf_counter(), _cores_of_all()
    # In turn: one device, a smaller batch on it, and the numbers of devices to predict.
    measured = measure_steps(template, batch, (rows, fewer), steps, {"data": devices})
    processors = max((available + _cores_of_all()) / 2 / measured.cores, 1.0)
    step = measured.step
    advice = reports.advise(
        template,
        rows,
        devices,
        inputs=batch[0],
        link=reports.measure_link(),
        processors=processors,
        step_seconds={rows: step.seconds(rows), fewer: step.seconds(fewer)},
    )
    alone = measured.alone.rounds
    found = [one.widened(alone) for one in advice.predictions]
    result = {
        "batch_size": rows,
        "processors": processors,
        "alone": list(alone),
        "predicted": [[one.least_s, one.step_s, one.most_s] for one in found],
        "timed": [list(measured.times["data", n, rows].rounds) for n in devices],
        "paid": [_paid(measured, n) for n in devices],
        "verdict": advice.verdicts["data"].split(":")[0],
        "seconds": time.perf_counter() - begin,
    }
    if scaling:
        data = tuple(np.concatenate([part] * (steps + 1)) for part in batch)
        report = reports.scaling(template, data, (1, *devices), batch_size=rows, verbose=0)
        result["scaling"] = [run.step_seconds for run in report.runs]
    return result


def _paid(measured: Measured, devices: int) -> float | None:
    """How often the devices pay the part that doesn't depend on the rows, by processor time."""
    rows, fewer = measured.rows, measured.fewer
    if fewer == rows:
        return None
    asked = (("data", 1, rows), ("data", devices, rows), ("data", 1, fewer))
    whole, several, small = (measured.times[one].cpu_seconds for one in asked)
    by_rows = (whole - small) / (1 - fewer / rows)
    fixed = whole - by_rows
    return (several - by_rows) / fixed if fixed > 0 else None


def _cores_of_all() -> float:
    """The cores that this process gets when it asks for all, next to other work on the machine."""
    matrix = np.ones((1200, 1200), "float32")
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(15):
        matrix @ matrix  # NumPy multiplies on as many threads as cores
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


def main() -> None:
    answer(compare, ("keras", _BACKEND, "keras_multigpu"))


if __name__ == "__main__":
    main()
