"""Trains jobs in one process: `python -m support.joined_table.worker FOLDER LAYOUT NUMBER ADDRESS`.

Reads the jobs from `jobs.json` in the folder; `done` there has the names of those to leave out.
Without an address it trains by plain Keras on one device. Results are written after each job.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import keras
import numpy as np
from support.cases import CASES, build_equal, compile_case
from support.joined_table.job import Job
from support.parity import take, variables

import keras_multigpu
from keras_multigpu import cluster, make_parallel
from keras_multigpu.engines.tensorflow.weights import homes

TIMEOUT = 60.0


def train(job: Job, devices: tuple[str, ...] | None) -> dict[str, np.ndarray]:
    """What comes out of a training: `"weights 0"`, `"outputs 0"`, `"logs 0"`, and so on."""
    case = next(case for case in CASES if case.name == job.case)
    (model,) = build_equal(case, 1)
    if devices is not None:
        model = make_parallel(model, devices=devices, shard=job.shard)
    compile_case(case, model)
    x, y = _typed(case.data(np.random.default_rng(job.seed), max(job.rows, job.few)), job.floatx)
    rows, few = ([take(one, count) for one in (x, y)] for count in (job.rows, job.few))
    keras.utils.set_random_seed(3)
    shuffle = not hasattr(x, "tocsr")  # Keras shuffles no such matrix
    history = model.fit(*rows, batch_size=job.batch, epochs=job.epochs, shuffle=shuffle, verbose=0)
    evaluated = model.evaluate(*few, batch_size=job.few_batch, verbose=0, return_dict=True)
    outputs = model.predict(few[0], batch_size=job.few_batch, verbose=0)
    logs = [history.history, evaluated]
    kinds = {"weights": variables(model), "outputs": outputs, "logs": logs}
    return {
        f"{kind} {place}": np.asarray(value)
        for kind, found in kinds.items()
        for place, value in enumerate(keras.tree.flatten(found))
    }


def _typed(data: Any, floatx: str) -> Any:
    return keras.tree.map_structure(
        lambda one: one.astype(floatx) if getattr(one.dtype, "kind", "") == "f" else one, data
    )


def main(folder: str, layout: str, number: str, address: str = "") -> None:
    counts, place = [int(one) for one in layout.split(",")], int(number)
    kept = pathlib.Path(folder)
    done = set((kept / "done").read_text().split()) if (kept / "done").exists() else set()
    jobs = [Job(**one) for one in json.loads((kept / "jobs.json").read_text())]
    keras.config.set_floatx(jobs[0].floatx)
    keras.config.set_dtype_policy(jobs[0].floatx)
    keras_multigpu.use_virtual_devices(counts[place])
    devices = None
    homes.LEAST = 16
    if address:
        cluster.join(address, len(counts), place, timeout=TIMEOUT)
        devices = keras_multigpu.list_devices()
    for job in jobs:
        if job.name not in done:
            found = train(job, devices)
            np.savez(kept / f"part.{number}.npz", **found)
            (kept / f"part.{number}.npz").rename(kept / f"{job.name}.{number}.npz")


if __name__ == "__main__":
    main(*sys.argv[1:])
