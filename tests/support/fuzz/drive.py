"""Runs cases in processes that may crash, and counts the outcomes."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from . import quick_xla

BACKEND = os.environ.get("KERAS_BACKEND", "tensorflow")
_CHUNK = 100  # cases in one process, whose memory grows with each
_PATIENCE = 900.0  # seconds without a line until a process counts as hanging on a busy machine


@dataclasses.dataclass
class Lane:
    """The cases of one seed, run by one process at a time."""

    seed: int
    modes: str
    out: Path
    shrink: float
    models: int | None = None
    first: int = 0
    process: subprocess.Popen | None = None

    @property
    def path(self) -> Path:
        return self.out / f"{BACKEND}-{self.seed}.jsonl"

    def start(self, seconds: float) -> None:
        """Starts a process on the cases that follow the last one that began."""
        self.first = max(self.first, self.next_index())
        last = self.first - self.first % _CHUNK + _CHUNK
        last = last if self.models is None else min(last, self.models)
        command = [sys.executable, "-m", str(__package__), "--work", str(self.first), str(last)]
        command += ["--seed", str(self.seed), "--modes", self.modes, "--out", str(self.out)]
        command += ["--seconds", str(seconds), "--shrink", str(self.shrink)]
        environment = dict(os.environ)
        if self.first // _CHUNK % 4 != 3:  # one process in four compiles as users' do
            environment["XLA_FLAGS"] = quick_xla.flags(BACKEND)
        environment["JAX_COMPILATION_CACHE_DIR"] = str(self.out / "compiled")
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        with open(self.out / f"{BACKEND}-{self.seed}.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def next_index(self) -> int:
        """The case that follows the last one that began."""
        records = read(self.path)
        return records[-1]["index"] + 1 if records else 0

    def is_done(self) -> bool:
        """Whether all its models have been drawn and compared."""
        return self.models is not None and self.process is None and self.next_index() >= self.models

    def watch(self) -> None:
        """Notes if the process has ended or hangs in the middle of a case."""
        if self.process is None:
            return
        is_silent = self.path.exists() and time.time() - self.path.stat().st_mtime > _PATIENCE
        if self.process.poll() is None and not is_silent:
            return
        if is_silent:
            self.process.kill()
            self.process.wait()
        records = read(self.path)
        stage = records[-1].get("stage") if records else None
        if stage is not None:
            kind = "HUNG" if is_silent else "CRASHED"
            kind = kind if stage == "parallel" else "plain fails"
            detail = "no answer" if is_silent else f"the process ended: {self.process.returncode}"
            record = {"seed": self.seed, "index": records[-1]["index"]}
            with open(self.path, "a", encoding="utf-8") as lines:
                lines.write("\n" + json.dumps({**record, "outcome": kind, "detail": detail}) + "\n")
        self.process = None


def read(path: Path) -> list[dict]:
    """The lines written so far; the last one may be incomplete."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def drive(seconds: float, lanes: list[Lane]) -> None:
    """Runs the cases of some seeds, until enough are compared or the time is over."""
    for lane in lanes:
        lane.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end and not all(lane.is_done() for lane in lanes):
            for lane in lanes:
                lane.watch()
                if lane.process is None and not lane.is_done():
                    lane.start(end - time.monotonic())
            time.sleep(1.0)
        _wait(lanes)
    finally:
        for lane in lanes:
            if lane.process is not None:
                lane.process.kill()
                lane.process.wait()


def _wait(lanes: list[Lane]) -> None:
    """Waits for the processes, which end after their current case."""
    while any(lane.process is not None for lane in lanes):
        for lane in lanes:
            lane.watch()
        time.sleep(1.0)


def count(out: Path) -> collections.Counter:
    """The outcomes of all the cases in a folder."""
    records = [record for path in sorted(out.glob("*.jsonl")) for record in read(path)]
    return collections.Counter(r["outcome"] for r in records if "outcome" in r)


def trained(out: Path) -> str:
    """How many models were drawn, the trainings with other data, and the time they took."""
    records = [record for path in sorted(out.glob("*.jsonl")) for record in read(path)]
    drawn = {(record["seed"], record["index"]) for record in records}
    ended = [record for record in records if "outcome" in record]
    trials, wall, cpu = (
        sum(record.get(name, 0) for record in ended) for name in ("trials", "seconds", "cpu")
    )
    return (
        f"{len(drawn)} drawn models, {len(ended)} outcomes, {trials} further trainings; "
        f"{wall:.0f} seconds, {cpu:.0f} of the processor"
    )


def summary(out: Path) -> str:
    """The counts, and the refusals, warnings and differences, most frequent first."""
    counts = count(out)
    lines = [
        trained(out),
        f"{sum(counts.values())} compared: " + ", ".join(f"{n} {k}" for k, n in counts.items()),
    ]
    records = [record for path in sorted(out.glob("*.jsonl")) for record in read(path)]
    for kind in ("refused", "warned", "CRASHED", "DIFFERENT", "HUNG"):
        said = collections.Counter()
        for record in records:
            if record.get("outcome") == kind:
                text = record["warned"][0] if kind == "warned" else record.get("detail", "")
                said[text[:110] if kind != "DIFFERENT" else " ".join(record["layers"])] += 1
        lines += [f"  {kind} {number}: {text}" for text, number in said.most_common(12)]
    return "\n".join(lines)


def environment() -> None:
    """Quiet processes with one thread each, because several run in parallel."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
