"""Starts the processes of a layout, and goes on after a job that fails."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
from support.joined_table.job import Job
from support.worker_processes import free_port

KINDS = ("weights", "outputs", "logs")
PATIENCE_S = 300.0  # for one job: far more than it takes


def run(layout: str, jobs: list[Job], folder: pathlib.Path) -> dict[str, str]:
    """Trains the jobs in a layout's processes; `"alone"` is plain Keras.

    Returns:
        By the name of a job that failed, what its processes printed at last. The results of the
        others are in the folder.
    """
    folder.mkdir(parents=True)
    (folder / "jobs.json").write_text(json.dumps([dataclasses.asdict(job) for job in jobs]))
    failed: dict[str, str] = {}
    left = [job.name for job in jobs]
    while left:
        done = [job.name for job in jobs if job.name not in left]
        (folder / "done").write_text("\n".join(done))
        text = _run_once(layout, left, folder)
        count = layout.count(",") + 1
        missing = [name for name in left if not _has_all(folder, name, count)]
        if missing:
            failed[missing[0]] = text
        left = missing[1:]
    return failed


def _run_once(layout: str, names: list[str], folder: pathlib.Path) -> str:
    """Runs the processes until they end, or do nothing for too long; returns what they printed."""
    is_alone = layout == "alone"
    layout = "1" if is_alone else layout
    address = [] if is_alone else [f"127.0.0.1:{free_port()}"]
    numbers = range(layout.count(",") + 1)
    command = [sys.executable, "-m", "support.joined_table.worker", str(folder), layout]
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
    with contextlib.ExitStack() as files:
        outputs = [files.enter_context((folder / f"output.{k}").open("w+")) for k in numbers]
        processes = [
            subprocess.Popen(
                [*command, str(k), *address],
                stdout=outputs[k],
                stderr=subprocess.STDOUT,
                env=environment,
            )
            for k in numbers
        ]
        try:
            reason = _await(processes, names, folder)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for output in outputs:
            output.seek(0)
        return reason + "\n".join(f"process {k}: {outputs[k].read()[-3000:]}" for k in numbers)


def _await(processes: list[subprocess.Popen], names: list[str], folder: pathlib.Path) -> str:
    found, since = 0, time.monotonic()
    while any(process.poll() is None for process in processes):
        time.sleep(0.2)
        now = sum(_has_all(folder, name, len(processes)) for name in names)
        if now > found:
            found, since = now, time.monotonic()
        if time.monotonic() > since + PATIENCE_S:
            return f"nothing for {PATIENCE_S:.0f} s\n"
    return ""


def _has_all(folder: pathlib.Path, name: str, count: int) -> bool:
    return all((folder / f"{name}.{number}.npz").exists() for number in range(count))


def differences(job: Job, layout: str, folder: pathlib.Path, alone: pathlib.Path) -> list[float]:
    """The largest differences of any process from plain Keras: one for each of `KINDS`."""
    with np.load(alone / f"{job.name}.0.npz") as opened:
        expected = dict(opened)
    worst = dict.fromkeys(KINDS, 0.0)
    for number in range(layout.count(",") + 1):
        with np.load(folder / f"{job.name}.{number}.npz") as found:
            assert set(found) == set(expected), (job, set(found) ^ set(expected))
            for key, value in expected.items():
                kind = key.split()[0]
                worst[kind] = max(worst[kind], _gap(found[key], value))
    return list(worst.values())


def _gap(one: np.ndarray, other: np.ndarray) -> float:
    assert one.shape == other.shape, (one.shape, other.shape)
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return float("inf")
    gaps = np.abs(np.asarray(one, "float64") - np.asarray(other, "float64"))
    return float(gaps.max(initial=0.0))
