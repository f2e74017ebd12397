"""Reads what a child writes, and notices when nothing comes."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any


class HangError(Exception):
    """A child wrote nothing for too long, or ended by a signal or an error."""


@dataclasses.dataclass
class Tally:
    """What has been trained.

    Attributes:
        modes: the trainings that ended, by mode.
        outcomes: how many ended in which way.
        steps: how many there were.
        longest: the longest time between two steps of a loop, in seconds.
        longest_first: the longest time to the first step of a loop, which is compiled then.
        latest: the training that began last.
        errors: what the others ended with: refusals, plain Keras's own errors, and crashes.
    """

    modes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    steps: int = 0
    longest: float = 0.0
    longest_first: float = 0.0
    latest: dict[str, Any] = dataclasses.field(default_factory=dict)
    errors: list[str] = dataclasses.field(default_factory=list)

    def note(self, line: dict[str, Any]) -> None:
        """Counts one line of a child."""
        kind = line["kind"]
        if kind == "begin":
            self.latest = line
        elif kind == "end":
            self.outcomes[line["outcome"]] += 1
            self.modes[self.latest["mode"]] += 1
            if line["detail"]:
                place = f"{self.latest['name']}, {self.latest['mode']}"
                self.errors.append(f"{line['outcome']}, {place}: {line['detail'][:200]}")
        else:
            self.steps += 1
            name = "longest_first" if kind == "first step" else "longest"
            setattr(self, name, max(getattr(self, name), line["seconds"]))

    def __str__(self) -> str:
        """The counts in one line."""

        def counts(counter: collections.Counter[str]) -> str:
            return ", ".join(f"{number} {name}" for name, number in sorted(counter.items()))

        return (
            f"{sum(self.modes.values())} trainings ({counts(self.modes)}; "
            f"{counts(self.outcomes)}), {self.steps} steps, at most {self.longest:.1f} s "
            f"between two steps and {self.longest_first:.1f} s to the first of a loop"
        )


def watch(command: Sequence[str], tally: Tally, limit: float) -> None:
    """Runs a child to its end, and counts what it does.

    Raises:
        HangError: if it writes nothing for `limit` seconds, or fails. Python's stacks are on
            stderr then.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            for line in _lines(child, limit):
                tally.note(line)
            if child.wait():
                raise HangError(f"The process ended with {child.returncode}.")
        finally:
            child.kill()


def _lines(child: subprocess.Popen[bytes], limit: float) -> Iterator[dict[str, Any]]:
    assert child.stdout is not None
    rest = b""
    while True:
        ready, _, _ = select.select([child.stdout], [], [], limit)
        if not ready:
            child.send_signal(signal.SIGUSR1)  # `faulthandler` writes the stacks
            time.sleep(2)
            raise HangError(f"Nothing came for {limit:.0f} s.")
        read = os.read(child.stdout.fileno(), 1 << 16)
        if not read:
            return
        *whole, rest = (rest + read).split(b"\n")
        yield from (json.loads(line) for line in whole if line.startswith(b"{"))
