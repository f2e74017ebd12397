"""The command line: runs cases for some time, runs a single case, or prints its script."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from . import drive


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.support.fuzz")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long at most")
    parser.add_argument("--models", type=int, help="how many of each seed at most")
    parser.add_argument("--seed", type=int, default=1, help="the first process's seed")
    parser.add_argument("--modes", default="data", help="of make_parallel: data,tower,model")
    parser.add_argument("--processes", type=int, default=1, help="how many, each with a seed")
    parser.add_argument("--out", type=Path, default=Path("fuzz"), help="folder for lines, scripts")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds to simplify each case")
    parser.add_argument("--only", type=int, help="run this index of the seed, and shrink it")
    parser.add_argument("--script", action="store_true", help="with --only: print the script")
    parser.add_argument("--count", action="store_true", help="summarize what is in --out")
    parser.add_argument("--work", type=int, nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    drive.environment()
    given = _arguments()
    modes = tuple(given.modes.split(","))
    if given.count:
        print(drive.summary(given.out))
        return 0
    if given.work is None and given.only is None:
        print(f"seeds {given.seed} to {given.seed + given.processes - 1}, into {given.out}")
        lanes = [
            drive.Lane(given.seed + number, given.modes, given.out, given.shrink, given.models)
            for number in range(given.processes)
        ]
        drive.drive(given.seconds, lanes)
        print(drive.summary(given.out))
        counts = drive.count(given.out)
        return int(any(counts[kind] for kind in ("DIFFERENT", "CRASHED", "HUNG")))
    from . import draw, scripts, worker

    worker.prepare(optimizes_graphs=given.work is None or given.work[0] // 100 % 2 == 0)
    if given.script:
        print(scripts.script(draw.draw_case(given.seed, given.only, modes), ""))
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    if given.only is not None:
        for record in worker.records(given.seed, given.only, modes, given.out, given.shrink):
            print(record)
        return 0
    end = time.monotonic() + given.seconds
    worker.work(given.seed, range(*given.work), modes, given.out, given.shrink, end)
    return 0


if __name__ == "__main__":
    sys.exit(main())
