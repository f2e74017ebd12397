"""Calls (`fit`, ...) that several processes make together."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from keras_multigpu.engines.cluster.board import Board


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
        class_weight: its argument of this name, as text.
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
    class_weight: str = ""

    @property
    def begun(self) -> int:
        """How many steps have begun. A thread may ask."""
        # In this order: a step that ends meanwhile is rather not counted than counted twice.
        return self.steps + self.coming()


class Calls:
    """The calls that are open, each begun within the one before it.

    A callback of a `fit` may train another model.

    Args:
        board: what the processes write for each other.

    Attributes:
        now: those calls. The first one stands for steps outside of any.
    """

    def __init__(self, board: Board):
        self._board = board
        self.now = [Call(0, is_loop=False)]
        self._past: list[tuple[Call, int]] = []  # ended calls, and how many had begun by then
        self._count, self._thread = 0, 0

    @property
    def latest(self) -> Call:
        """The innermost call."""
        return self.now[-1]

    def here(self, what: str) -> str:
        """Where this process is, for people: ``"step 5 of `fit`"``."""
        loops = [call.name for call in self.now[::-1] if call.is_loop] or [self.latest.name]
        return f"{what} of {' within '.join(loops)}"

    def open(self, name: str, is_loop: bool) -> Call:
        """Opens a call, within the one that is open."""
        if not any(one.is_loop for one in self.now):
            self._thread = threading.get_ident()
        elif self._thread != threading.get_ident():
            raise RuntimeError(
                "Joined processes make their calls in one thread, in the same order. Received: "
                f"`{name}` in another thread than {self.latest.name}. Make one after the other."
            )
        if not self.latest.is_loop:
            self.close(self.latest)
        self._count += 1
        self._forget_past()
        call = Call(self._count, f"`{name}`" if name.isidentifier() else name, is_loop)
        self.now.append(call)
        return call

    def resume(self, call: Call) -> bool:
        """Goes on with a call after single steps within it; returns whether it is still open."""
        if call is not self.latest and not self.latest.is_loop:
            self.close(self.latest)
        return call is self.latest

    def close(self, call: Call | None) -> None:
        """Leaves a call, and those within it."""
        if call in self.now:
            place = max(1, self.now.index(call))  # the first one stays
            for one in self.now[place:]:
                one.take_part = None  # it has the model
                self._past.append((one, self._count))
            del self.now[place:]

    def _forget_past(self) -> None:
        """Deletes what was written in calls that all have left: a later one has begun since."""
        for call, count in self._past:
            for key in (*call.written, *call.asked) if count < self._count - 1 else ():
                self._board.write(key, None)
        self._past = [(call, count) for call, count in self._past if count >= self._count - 1]
