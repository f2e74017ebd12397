"""Repeats attacks, and collects what came of them in a table."""

import collections
import dataclasses
import time


@dataclasses.dataclass
class Row:
    """What came of one attack.

    Attributes:
        attack: its name.
        outcomes: how often each outcome came.
        longest: the seconds from the attack until it was over, at most.
        broken: what was wrong afterwards: empty if nothing.
    """

    attack: str
    outcomes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    longest: float = 0.0
    broken: list = dataclasses.field(default_factory=list)

    def __str__(self):
        outcomes = "; ".join(f"{count} x {text}" for text, count in self.outcomes.items())
        return f"| {self.attack} | {outcomes} | {self.longest:.1f} | {self.broken or 'usable'} |"


def repeat(name, times, attack, check):
    """Repeats an attack; prints and returns its row.

    Args:
        name: the attack's name.
        times: how often.
        attack: attacks; returns the outcome, and the seconds that it took.
        check: tries what is left afterwards; returns what is wrong with it, or "".
    """
    row = Row(name)
    for _ in range(times):
        outcome, seconds = attack()
        row.outcomes[outcome] += 1
        row.longest = max(row.longest, seconds)
        wrong = check()
        if wrong:
            row.broken.append(wrong)
    print(row, flush=True)
    return row


class Clock:
    """The seconds since it was made."""

    def __init__(self):
        self.begun = time.monotonic()

    def __call__(self):
        return time.monotonic() - self.begun
