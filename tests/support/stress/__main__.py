"""The command line: trains for some time, in one child process after the other."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import itertools
import sys
import time

from .watch import HangError, Tally, watch

_MODELS = 1000  # of one child at most


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.support.stress")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long")
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8, 16], help="how many")
    parser.add_argument("--seed", type=int, default=1, help="of the models")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that count as a hang")
    parser.add_argument("--each", type=float, default=60.0, help="seconds for each process")
    parser.add_argument("--only", type=int, help="train this index only, on the first `--devices`")
    return parser.parse_args()


def main() -> int:
    given, tally = _arguments(), Tally()
    end = time.monotonic() + given.seconds
    firsts = dict.fromkeys(given.devices, 0)
    count = 1 if given.only is not None else _MODELS
    for devices in itertools.cycle(firsts):
        first = firsts[devices] if given.only is None else given.only
        seconds = min(given.each, end - time.monotonic())
        numbers = map(str, (devices, given.seed, first, first + count, seconds))
        command = [sys.executable, "-m", f"{__package__}.child", *numbers]
        try:
            watch(command, tally, given.limit)
        except HangError as error:
            name, mode = tally.latest.get("name", "none"), tally.latest.get("mode", "")
            print(f"HUNG or died. {error} The training: {name}, mode {mode!r}.")
            print(f"Again: --seed {given.seed} --devices {devices}", end=" ")
            print(f"--only {tally.latest.get('index', first)}\n{tally}")
            return 1
        firsts[devices] = tally.latest.get("index", first) + 1
        print(f"{devices} devices: {tally}", flush=True)
        if time.monotonic() > end or given.only is not None:
            print(*tally.errors, sep="\n")
            return int(bool(tally.outcomes["CRASHED"]))


if __name__ == "__main__":
    sys.exit(main())
