"""The command line. The exit status is 1 if a training differed or failed."""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import sys
import tempfile

from support.cases import CASES
from support.joined_table import drive, job

TOLERANCES = {"float32": 2e-5, "float64": 1e-9}
_HEADER = "| model | {} |\n| --- | {} |"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layouts", nargs="+", default=["1,1"], help="devices of each process")
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--random", type=int, help="as many trainings with drawn sizes, float64")
    parser.add_argument("--seed", type=int, default=1, help="what they are drawn from")
    parser.add_argument("--shard", choices=["weights", "optimizer"])
    chosen = parser.parse_args()
    jobs = job.table(chosen.cases, "float32")
    if chosen.random:
        jobs = job.draw(chosen.cases, chosen.seed, chosen.random)
    jobs = [dataclasses.replace(one, shard=chosen.shard) for one in jobs]
    with tempfile.TemporaryDirectory() as folder:
        found = compare(jobs, chosen.layouts, pathlib.Path(folder))
    tolerance = TOLERANCES[jobs[0].floatx]
    show(jobs, chosen.layouts, found)
    return int(any(not max(gaps) < tolerance for row in found.values() for gaps in row.values()))


def compare(
    jobs: list[job.Job], layouts: list[str], folder: pathlib.Path
) -> dict[str, dict[str, list[float]]]:
    """The differences from plain Keras, by layout and job; infinite for a training that failed."""
    broken = drive.run("alone", jobs, folder / "alone")
    assert not broken, broken
    found: dict[str, dict[str, list[float]]] = {}
    for layout in layouts:
        place = folder / layout.replace(",", "_")
        failed = drive.run(layout, jobs, place)
        for name, text in failed.items():
            print(f"{layout}, {name}: {text}", file=sys.stderr, flush=True)
        found[layout] = {}
        for one in jobs:
            gaps = [math.inf] * len(drive.KINDS)
            if one.name not in failed:
                gaps = drive.differences(one, layout, place, folder / "alone")
            found[layout][one.name] = gaps
            print(f"{layout}, {one}: {gaps}", file=sys.stderr, flush=True)
    return found


def show(jobs: list[job.Job], layouts: list[str], found: dict[str, dict[str, list[float]]]) -> None:
    """Prints the largest difference of each model, and of each kind of numbers."""
    rules = " | ".join(["---:"] * len(layouts))
    print(_HEADER.format(" | ".join(layouts), rules))
    for case in dict.fromkeys(one.case for one in jobs):
        names = [one.name for one in jobs if one.case == case]
        cells = [max(max(found[layout][name]) for name in names) for layout in layouts]
        print(f"| `{case}` | {' | '.join(f'{cell:.0e}' for cell in cells)} |")
    for place, kind in enumerate(drive.KINDS):
        cells = [max(gaps[place] for gaps in found[layout].values()) for layout in layouts]
        print(f"| **all {kind}** | {' | '.join(f'{cell:.0e}' for cell in cells)} |")


if __name__ == "__main__":
    sys.exit(main())
