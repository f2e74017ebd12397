"""Where processes are in the sequence of operations that all make together."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from keras_multigpu.engines.cluster.board import Board, under
from keras_multigpu.engines.shared import unchanged

STEP, END = "step", "end"
"""So begin the kinds of operations that begin a step, or end a call."""
_PLACES = "places/"


class Place(NamedTuple):
    """An operation that all processes make together, as one of them comes to it.

    Attributes:
        number: how many of them this process has made before.
        kind: only operations of the same kind can meet.
        text: where that is, for people: ``"step 5 of `fit`"``.
    """

    number: int
    kind: str
    text: str


def odd_one(values: Sequence[Hashable]) -> tuple[int, int] | None:
    """The first process whose value differs from that of most, and the first one of these.

    If as many have one value as another, the first value counts.
    """
    most = max(values, key=values.count)
    odd = next((number for number, value in enumerate(values) if value != most), None)
    return None if odd is None else (odd, values.index(most))


class Places:
    """Tells the others where this process waits, and finds processes that wait elsewhere.

    If the operations of one number have different kinds, their processes wait for ever: each needs
    all processes. What is written on the board stays true when the process goes on, so a place
    that arrives late does no harm.

    Args:
        board: what the processes write for each other.
        number: this process's number.
        count: how many processes there are.
        timeout: seconds in which one is named that waits elsewhere, even if others are still on
            their way.
    """

    def __init__(self, board: Board, number: int, count: int, timeout: float):
        self._board, self._number, self._count, self._timeout = board, number, count, timeout
        self._made = 0
        self._where: Callable[[], Place | None] = lambda: None
        self._is_aside = self._is_meeting = False
        self._written: Place | None = None
        self._since: dict[str, tuple[int, float]] = {}  # the operation, and since when
        self._told_late: set[tuple[int, ...]] = set()

    @contextlib.contextmanager
    def at(self, kind: str, text: str, *, is_meeting: bool = True) -> Iterator[None]:
        """Scope of an operation that all processes make.

        At a meeting each waits for all others; elsewhere a slow one is alone for as long as it is.
        """
        if self._is_aside:
            yield
            return
        place = Place(self._made, kind, text)
        self._where, self._is_meeting = (lambda: place), is_meeting
        try:
            yield
        finally:
            self._leave(1)

    @contextlib.contextmanager
    def at_steps(self, come: Callable[[], int], text: Callable[[], str]) -> Iterator[None]:
        """Scope of steps that begin one after the other; `come` tells how many have."""
        made = self._made

        def where() -> Place | None:
            begun = come()
            return Place(made + begun - 1, STEP, text()) if begun else None

        self._where, self._is_meeting = where, False
        try:
            yield
        finally:
            self._leave(come())

    def _leave(self, made: int) -> None:
        self._where = lambda: None
        self._made += made

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Scope of operations for which the others leave their own places, and return to them."""
        return unchanged(self, "_is_aside", True)

    def find_odd(self, told: Mapping[str, str]) -> tuple[int, str] | None:
        """A process that waits elsewhere, and where; `told` is what is on the board.

        A thread may ask. It waits elsewhere than most. If as many wait at one operation as at
        another, it is the process that does not go on with the steps, or begins a further call.
        """
        mine = self._tell()
        if mine is None:
            return None
        places = {int(k): Place(*json.loads(text)) for k, text in under(told, _PLACES).items()}
        places[self._number] = mine
        if (ahead := self._find_ahead(places, mine)) is not None:
            return ahead
        here = {k: places[k] for k in sorted(places) if places[k].number == mine.number}
        if len({one.kind for one in here.values()}) == 1 or not self._may_judge(here):
            return None
        kinds = [one.kind for one in here.values()]
        usual = max(
            kinds, key=lambda one: (kinds.count(one), one.startswith(STEP), one.startswith(END))
        )
        odd = next(k for k, one in here.items() if one.kind != usual)
        other = next(k for k, one in here.items() if one.kind == usual)
        return odd, f"It is at {here[odd].text}, and process {other} is at {here[other].text}."

    def find_late(self, told: Mapping[str, str]) -> tuple[str, list[int]] | None:
        """Where this process has waited for `timeout`, and for which others; once for these.

        `told` is as above. A thread may ask.
        """
        mine = self._tell()
        if mine is None or self._waited(mine) < self._timeout:
            return None
        numbers = {int(k): json.loads(text)[0] for k, text in under(told, _PLACES).items()}
        others = [k for k in range(self._count) if k != self._number]
        late = [k for k in others if numbers.get(k, -1) < mine.number]
        if not late or tuple(late) in self._told_late:
            return None
        self._told_late.add(tuple(late))
        return mine.text, late

    def _tell(self) -> Place | None:
        """Writes this process's place on the board."""
        where = self._where
        place = where()
        if self._where is not where:  # it has gone on meanwhile
            return None
        if place is not None and place != self._written:
            self._written = place
            self._board.write(f"{_PLACES}{self._number}", json.dumps(place))
        return place

    def _find_ahead(self, places: Mapping[int, Place], mine: Place) -> tuple[int, str] | None:
        """As `find_odd`, if others have gone on while this process has met nobody for `timeout`.

        They have made another operation of that number, which needed nothing that this process has
        not made: they took the results of an earlier step, say.
        """
        ahead = sorted(k for k, one in places.items() if one.number > mine.number)
        if not ahead or not self._is_meeting or self._waited(mine) < self._timeout:
            return None
        here = [k for k in sorted(places) if places[k].number == mine.number]
        odd, other = (here[0], ahead[0]) if len(ahead) > len(here) else (ahead[0], here[0])
        return odd, f"It is at {places[odd].text}, and process {other} is at {places[other].text}."

    def _waited(self, mine: Place, what: str = "there") -> float:
        """For how many seconds this process has been at a place, or has known something of it."""
        now = time.monotonic()
        if self._since.get(what, (None, now))[0] != mine.number:
            self._since[what] = mine.number, now
        return now - self._since[what][1]

    def _may_judge(self, here: Mapping[int, Place]) -> bool:
        """Whether this process is to name one of those that are at different operations.

        The first of them does so, when it knows where all are, or after half the time. The others
        leave it to that one, so that all name the same process.
        """
        seconds = self._waited(here[self._number], "they differ")
        if self._number == min(here):
            return len(here) == self._count or seconds >= self._timeout / 2
        return seconds >= self._timeout
