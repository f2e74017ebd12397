"""Calls (`fit`, ...) that several processes make together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(eq=False)
class Call:
    """A call that all processes make together.

    Attributes:
        number: counts the calls, alike in all processes.
        name: what errors call it: ``"`fit`"``.
        is_loop: whether the processes end it together (`fit`), or it is of single steps
            (`train_on_batch`) and lasts until another call begins.
        steps: how many have begun, but for those that `coming` counts.
        coming: how many batches have come to the steps that run now.
        written: what this process has written in it.
        asked: what it has written alone, to have the others take part in a reading.
        has_ended: whether all processes have come to its end.
        readings: how often the processes have read spread weights within it.
        take_part: takes part in such a reading, which another process has asked for.
    """

    number: int
    name: str = "no call"
    is_loop: bool = True
    steps: int = 0
    coming: Callable[[], int] = lambda: 0
    written: list[str] = dataclasses.field(default_factory=list)
    asked: list[str] = dataclasses.field(default_factory=list)
    has_ended: bool = False
    readings: int = 0
    take_part: Callable[[list[int] | None], None] | None = None

    @property
    def begun(self) -> int:
        """How many steps have begun. A thread may ask."""
        # In this order: a step that ends meanwhile is rather not counted than counted twice.
        return self.steps + self.coming()
