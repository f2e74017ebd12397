"""Processes that make the same calls and steps, and what each tells the others of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping

from keras_multigpu.arguments import number_of
from keras_multigpu.engines.cluster.board import BEAT, Board
from keras_multigpu.engines.cluster.calls import Call, Calls
from keras_multigpu.engines.cluster.errors import DIFFERENCES, SAME_CALLS, TOLD_ALIKE, ClusterError
from keras_multigpu.engines.cluster.listing import Listing, around_difference
from keras_multigpu.engines.cluster.members import RESTART, Members
from keras_multigpu.engines.cluster.places import END, Places, odd_one

_UNKNOWN = "unknown"


class Group(Members):
    """Processes that run the same script, as one of them sees them.

    Every wait ends: when the others have arrived, or with a `ClusterError` if one of them shows no
    sign of life for `timeout` seconds, has ended, has failed, or waits elsewhere.

    Args:
        board, number, names, timeout: as in `Members`.
        data: what each process gives: `"same"`, the whole batch, or `"parts"`, its rows of it.

    Attributes:
        data: the argument.
        places: where the processes are in what they do together.
        models: numbers for models, alike in all processes: in the order of their first calls.
        calls: those that the processes make together.
    """

    def __init__(
        self, board: Board, number: int, names: tuple[str, ...], timeout: float, data: str = "same"
    ):
        super().__init__(board, number, names, timeout)
        self.data = data
        self.places = Places(board, number, len(names), timeout)
        self.models = itertools.count()
        self.calls = Calls(board)

    @property
    def call(self) -> Call:
        """The innermost call that is open."""
        return self.calls.latest

    def open(self, name: str, is_loop: bool) -> Call:
        """Opens a call, within the one that is open."""
        if self.broken is not None:
            raise self.broken
        return self.calls.open(name, is_loop)

    def meet(self, facts: Mapping[str, str | Listing]) -> None:
        """Waits until all processes have opened the call; compares facts that must be equal.

        Of many facts a checksum crosses, and they themselves if some differ.
        """
        call, outer = self.call, self.calls.now[-2]
        place = f"the beginning of {call.name}"
        if outer.is_loop:
            place += f" within {outer.name}, after {number_of(outer.begun, 'step')}"
        mine = {"call": call.name}
        for key, one in facts.items():
            mine[key] = one if isinstance(one, str) else str(one.checksum)
        told = self._gather("loops", json.dumps(mine), call, place)
        every = [json.loads(told[number]) for number in range(len(self.names))]
        for fact in mine:
            found = odd_one([one.get(fact) for one in every])
            if found is not None:
                raise self._unlike(fact, facts.get(fact, ""), *found, every)

    def _unlike(
        self, fact: str, mine: str | Listing, number: int, other: int, every: list[dict[str, str]]
    ) -> ClusterError:
        """The error for a process that differs in a fact; `every` are those of all."""
        its, first = (str(every[one].get(fact)) for one in (number, other))
        problem = f"Its {fact} is {its}. In process {other} it is {first}."
        if isinstance(mine, Listing):
            its, first = around_difference(*self._tell(fact, mine, number, other))
            if _UNKNOWN not in (its, first):
                problem = f"Its {fact} is another than in process {other}: {its}; there {first}."
        return self._break(
            number,
            problem,
            "Run the same script in all processes, with the same data, files and seeds "
            "(`keras.utils.set_random_seed`).",
        )

    def check_reached(self, unreached: Mapping[int, str]) -> None:
        """Waits until all have tried to reach the others, before the backend starts.

        `unreached` are the addresses of those that this process can't reach, by their numbers.
        """
        told = self._gather("unreached", json.dumps(unreached), self.call, "the start")
        for number, addresses in sorted(told.items()):
            for other, address in json.loads(addresses).items():
                raise self._break(
                    int(other),
                    f"Process {number} can't reach it at {address}.",
                    "Let the hosts reach each other at all ports, not only at that of the "
                    "`coordinator`, whose network is the one that all processes use.",
                )

    def end(self, call: Call) -> None:
        """Waits until all processes have come to the end of a call."""
        if call.has_ended:
            return
        self.calls.resume(call)
        place = f"the end of {call.name}, after {number_of(call.begun, 'step')}"
        self._gather(END, str(call.begun), call, place)
        call.has_ended = True

    def differing(self, what: str, digest: str) -> tuple[int, int] | None:
        """The first process with another checksum of `what` than most, and one of these."""
        kind = f"{what} {len(self.call.written)}"
        place = self.calls.here(f"the comparison of {what} after step {self.call.begun}")
        told = self._gather(kind, digest, self.call, place)
        return odd_one([told[number] for number in range(len(self.names))])

    def compare(self, what: str, listing: Listing, name: str = "") -> None:
        """Raises a `ClusterError` if another process has another listing of `what`, called so."""
        found = self.differing(name or what, str(listing.checksum))
        if found is not None:
            raise self.differs(*found, what, listing)

    def fail(self, error: BaseException, call: Call | None = None) -> None:
        """Tells the others that this process has left a call (or none) with an error."""
        if self._is_copy:
            return
        call = self.calls.now[0] if call is None else call
        if self.broken is not None:
            # The others then name the process that this one has given up, not this one.
            broken = [self.broken.host, self.broken.problem, self.broken.cure, self._is_lost]
            self._board.write(f"given up/{self.number}", json.dumps(broken))
            return
        if isinstance(error, KeyboardInterrupt):
            # It strikes anywhere: what this process has begun to compute, others may not have.
            self._break(self.number, f"It has stopped with {type(error).__name__}.", RESTART)
        kind = f"failures/{call.number}"
        call.written.append(f"{kind}/{self.number}")
        # Not `str`, which an error's class may have replaced by something that fails.
        _, *told = "".join(traceback.format_exception_only(type(error), error)).split()
        words = [f"{type(error).__name__}:", *told]
        text = " ".join(words)[:300].rstrip(".:").encode(errors="backslashreplace").decode()
        self._board.write(f"{kind}/{self.number}", f"stopped with {text}")

    def differs(
        self,
        number: int,
        other: int,
        what: str,
        mine: str | Listing = "",
        ahead: int = 0,
        both: tuple[str, str] | None = None,
    ) -> ClusterError:
        """The error for a process that differs from another one in its rows, weights, ...

        The step in question is `ahead` of the one that has begun.

        Some differences (`what`) take a text of this process, or what it computes, `mine`: all
        processes then call this, and the error has the texts of `both`, if these aren't known yet.
        """
        problem, cure = DIFFERENCES[what]
        its, first = both or self._tell(what, mine, number, other)
        step = self.call.begun + ahead
        if its == first != _UNKNOWN:
            first = TOLD_ALIKE.get(what, first)
        text = problem.format(step=step, other=other, its=its, first=first)
        if what == "weights" and its != _UNKNOWN:
            text += f" It has {its}; there is {first}."
        return self._break(number, text, cure)

    def _tell(self, what: str, mine: str | Listing, number: int, other: int) -> tuple[str, str]:
        """What two processes have where they differ, from what each tells of itself."""
        if isinstance(mine, Listing):
            told = self._of_all(f"all of {what}", json.dumps(mine.digests))
            both = [json.loads(told[one]) for one in (number, other) if one in told]
            mine = mine.told(*both) if len(both) == 2 else ""
        texts = self._of_all(what, mine) if mine else {}
        return texts.get(number, _UNKNOWN), texts.get(other, _UNKNOWN)

    def _of_all(self, kind: str, mine: str) -> dict[int, str]:
        """What each process says when all have found that they differ."""
        key = f"{kind} {len(self.call.written)}"
        return self._gather(key, mine, self.call, longest=self.timeout)

    @contextlib.contextmanager
    def counting(self, arrived: Callable[[], int]) -> Iterator[None]:
        """Scope of one or more steps; `arrived` tells at any time how many batches have come."""
        call, before = self.call, arrived()
        call.coming = lambda: arrived() - before
        try:
            with self.places.at_steps(call.coming, lambda: self.calls.here(f"step {call.begun}")):
                yield
        finally:
            more, call.coming = call.coming(), lambda: 0
            call.steps += more

    def check(self, silence: float | None = None, *, heeds_failures: bool = True) -> None:
        """Raises a `ClusterError` if a process is lost, by default after `timeout` of silence.

        Without `heeds_failures`, one that has left the call with an error is no loss until it ends.
        """
        if self.broken is not None:
            raise self.broken
        calls, told = list(self.calls.now), self._board.read("")
        for number in self._others:
            # The reasons first: a process that has failed ends.
            if f"given up/{number}" in told:
                raise self._given_up(number, *json.loads(told[f"given up/{number}"]))
            reasons = [f"failures/{call.number}/{number}" for call in calls]
            if heeds_failures or f"ended/{number}" in told:
                for key in (*reasons, f"ended/{number}"):
                    if key in told:
                        raise self._break(number, f"It has {told[key]}.", RESTART)
        found = self.places.find_odd(told)
        if found is not None:
            raise self._break(*found, SAME_CALLS[self.data])
        self._check_signs(silence)
        late = self.places.find_late(told)
        if late is not None:
            place, names = late[0], ", ".join(self.names[number] for number in late[1])
            warnings.warn(
                f"A parallel model has waited {self.timeout:g} seconds at {place} for {names}: "
                "alive, but not there. It may build its first step, write a file or wait for data. "
                "All processes must make the same calls of parallel models, in the same order.",
                stacklevel=5,
            )

    def _gather(
        self, kind: str, value: str, call: Call, place: str = "", longest: float = math.inf
    ) -> dict[int, str]:
        """Waits for what each process writes of a kind in a call; `longest` in seconds.

        Without a `place`, all processes are known to come.
        """
        prefix = f"{kind}/{call.number}/"
        with self.places.at(prefix, place) if place else self.places.aside():
            call.written.append(f"{prefix}{self.number}")
            self._board.write(call.written[-1], value)
            return self._await(prefix, longest)

    def _await(self, prefix: str, longest: float) -> dict[int, str]:
        """Waits for what each process writes under a prefix, up to `longest` seconds."""
        begun = time.monotonic()
        due = begun + BEAT
        while True:
            found = self._board.read(prefix, seconds=BEAT / 4)
            if len(found) == len(self.names) or time.monotonic() > begun + longest:
                return {int(number): text for number, text in found.items()}
            self.attend()
            if time.monotonic() > due:
                self.check()
                due = time.monotonic() + BEAT

    def attend(self) -> None:
        """Does what another process waits for meanwhile, if a backend has that."""
