"""Processes that run the same steps, and how each notices a lost one."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, ClassVar

from keras_multigpu.engines.board import BEAT, Board
from keras_multigpu.engines.calls import Call
from keras_multigpu.engines.differences import DIFFERENCES, SAME_LENGTH
from keras_multigpu.engines.errors import ClusterError

_RESTART = (
    "Start the script again in all processes: with `keras.callbacks.BackupAndRestore` it continues "
    "from the last backup."
)
# After a network error, this many seconds of silence suffice to call a process lost.
_SURELY_LOST = 4 * BEAT


class Group:
    """Processes that run the same script, as one of them sees them.

    Every wait ends: when the others have arrived, or with a `ClusterError` if one of them shows no
    sign of life for `timeout` seconds, has ended, has failed, or makes another call.

    Args:
        board: what the processes write for each other.
        number: this process's number.
        names: how errors call each process: `"gpu7 (process 1, pid 4242)"`.
        timeout: in seconds.
        data: what each process gives: `"same"`, the whole batch, or `"parts"`, its rows of it.

    Attributes:
        number, names, timeout, data: the arguments.
        broken: the error after which the processes don't compute together any more.
    """

    failures: ClassVar[tuple[type[Exception], ...]] = ()
    """The backend's errors that a lost process may cause."""

    def __init__(
        self,
        board: Board,
        number: int,
        names: tuple[str, ...],
        timeout: float,
        data: str = "same",
    ):
        self.number, self.names, self.timeout, self.data = number, names, timeout, data
        self._board = board
        self._count = 0
        # Those that are open, each begun within the one before it: a callback of a `fit` may train
        # another model. The first stands for steps outside of any.
        self._calls = [Call(0, is_loop=False)]
        self._past: list[tuple[Call, int]] = []  # ended calls, and how many had begun by then
        self.broken: ClusterError | None = None

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the files."""
        return self.number == 0

    @property
    def call(self) -> Call:
        """The innermost call that is open."""
        return self._calls[-1]

    def open(self, is_loop: bool) -> Call:
        """Opens a call, within the one that is open."""
        if self.broken is not None:
            raise self.broken
        before = {call.number: call.begun for call in self._calls}
        if not self.call.is_loop:
            self.close(self.call)
        self._count += 1
        self._forget_past()
        call = Call(self._count, is_loop, before)
        self._calls.append(call)
        return call

    def meet(self, name: str, facts: dict[str, str]) -> None:
        """Waits until all processes have opened the call; compares facts that must be equal."""
        mine = {"call": name, **facts}
        told = self._gather("loops", json.dumps({**mine, "steps": self.call.before}), self.call)
        first, *others = (json.loads(told[number]) for number in range(len(self.names)))
        first.pop("steps", None)
        for number, other in enumerate(others, 1):
            for fact, value in first.items():
                if other.get(fact) != value:
                    raise self._break(
                        number,
                        f"Its {fact} is {other.get(fact)}. In process 0 it is {value}.",
                        "Run the same script in all processes, with the same data, files and "
                        "seeds (`keras.utils.set_random_seed`).",
                    )

    def resume(self, call: Call) -> bool:
        """Goes on with a call after single steps within it; returns whether it is still open."""
        if call is not self.call and not self.call.is_loop:
            self.close(self.call)
        return call is self.call

    def end(self, call: Call) -> None:
        """Waits until all processes have come to the end of a call; compares their steps."""
        if call.has_ended:
            return
        self.resume(call)
        told = self._gather("ends", str(call.begun), call)
        for number in range(len(self.names)):
            if told[number] != told[0]:
                raise self._break(number, *self._other_length(told[number], told[0]))
        call.has_ended = True

    def close(self, call: Call | None) -> None:
        """Leaves a call, and those within it."""
        if call in self._calls:
            place = max(1, self._calls.index(call))  # the first one stays
            for one in self._calls[place:]:
                one.take_part = None  # it has the model
                self._past.append((one, self._count))
            del self._calls[place:]

    def _forget_past(self) -> None:
        """Deletes what was written in calls that all have left: a later one has begun since."""
        for call, count in self._past:
            for key in (*call.written, *call.asked) if count < self._count - 1 else ():
                self._board.write(key, None)
        self._past = [(call, count) for call, count in self._past if count >= self._count - 1]

    def differing(self, what: str, digest: str) -> int | None:
        """The first process where the checksum of `what` is not that of process 0, if any."""
        told = self._gather(f"{what} {len(self.call.written)}", digest, self.call)
        return next((k for k in range(len(self.names)) if told[k] != told[0]), None)

    def fail(self, error: BaseException, call: Call | None = None) -> None:
        """Tells the others that this process has left a call (or none) with an error."""
        call = self._calls[0] if call is None else call
        if self.broken is not None:
            # The others then name the process that this one has given up, not this one.
            broken = [self.broken.host, self.broken.problem, self.broken.cure]
            self._board.write(f"given up/{self.number}", json.dumps(broken))
            return
        if isinstance(error, KeyboardInterrupt):
            # It strikes anywhere: what this process has begun to compute, others may not have.
            self._break(self.number, f"It has stopped with {type(error).__name__}.", _RESTART)
        kind = f"failures/{call.number}"
        call.written.append(f"{kind}/{self.number}")
        words = [f"{type(error).__name__}:", *str(error).split()]
        text = " ".join(words)[:300].rstrip(".:")
        self._board.write(f"{kind}/{self.number}", f"stopped with {text}")

    def leave(self) -> None:
        """Tells the others that this process ends.

        Process 0 leaves last: it hosts the backend's coordination service, without which the
        others would be ended.
        """
        self._board.write(f"ended/{self.number}", "ended")
        awaited = range(len(self.names)) if self.number == 0 else [self.number]
        while self._board.service_silence() < self.timeout:
            ended = self._board.read("ended/", seconds=0.05)
            if all(str(k) in ended or self._board.silence(k) > self.timeout for k in awaited):
                break
        if self.number == 0:
            # After that they disconnect from the service, and their signs of life stop.
            until = time.monotonic() + self.timeout
            others = range(1, len(self.names))
            while time.monotonic() < until and any(
                self._board.silence(k) < 3 * BEAT for k in others
            ):
                time.sleep(BEAT / 4)
        self._board.stop(self.timeout)

    def differs(self, number: int, what: str, mine: str = "") -> ClusterError:
        """The error for a process that differs from process 0 in its rows, weights, ...

        Some differences (`what`) take a text of this process, `mine`: all processes then call this,
        and the error has the texts of both.
        """
        problem, cure = DIFFERENCES[what]
        texts = dict.fromkeys(range(len(self.names)), "unknown")
        if mine:
            key = f"{what} {len(self.call.written)}"
            texts |= self._gather(key, mine, self.call, longest=self.timeout)
        told = problem.format(step=self.call.begun, its=texts[number], first=texts[0])
        return self._break(number, told, cure)

    def count_step(self) -> None:
        """Notes that a step begins."""
        self.call.steps += 1

    @contextlib.contextmanager
    def counting(self, arrived: Callable[[], int]) -> Iterator[None]:
        """Scope of one or more steps; `arrived` tells, at any time, how many batches have come."""
        call, before = self.call, arrived()
        call.coming = lambda: arrived() - before
        try:
            yield
        finally:
            more, call.coming = call.coming(), lambda: 0
            call.steps += more

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Scope that raises a `ClusterError` if the backend's error comes from a lost process."""
        try:
            yield
        except self.failures as error:
            # It does not say whose connection broke. The lost process is the silent one.
            if self.broken is not None:
                raise self.broken from error
            silence = min(self.timeout, _SURELY_LOST)
            until = time.monotonic() + silence + 3 * BEAT
            while time.monotonic() < until:
                try:
                    self.check(silence)
                except ClusterError as lost:
                    raise lost from error
                time.sleep(BEAT / 4)
            raise

    def check(self, silence: float | None = None) -> None:
        """Raises a `ClusterError` if a process is lost, by default after `timeout` of silence."""
        silence = self.timeout if silence is None else silence
        calls, count = list(self._calls), self._count
        told = self._board.read("")
        others = [number for number in range(len(self.names)) if number != self.number]
        for number in others:
            # The reasons first: a process that has failed ends.
            if f"given up/{number}" in told:
                raise self._given_up(number, *json.loads(told[f"given up/{number}"]))
            failures = [f"failures/{call.number}" for call in calls]
            for kind in (*failures, "ended"):
                if f"{kind}/{number}" in told:
                    raise self._break(number, f"It has {told[f'{kind}/{number}']}.", _RESTART)
            # A thread may check; what it has read must still be so.
            error = self._find_other_length(number, told, calls, count)
            if error is not None and (calls, count) == (self._calls, self._count):
                raise self._break(number, *error)
        if self._board.service_silence() > silence and self.number:
            raise self._silent(0, self._board.service_silence())
        for number in others:
            if self._board.silence(number) > silence:
                raise self._silent(number, self._board.silence(number))

    def _find_other_length(
        self, number: int, told: dict[str, str], calls: list[Call], count: int
    ) -> tuple[str, str] | None:
        """What is wrong, and its cure, if another process has ended or left an open call too early.

        `calls` are the open ones, and `count` is how many have begun.
        """
        news = json.loads(told.get(f"loops/{count + 1}/{number}", "{}"))
        left = news.get("steps", {})
        for call in calls:
            ended = told.get(f"ends/{call.number}/{number}")
            if ended is None:
                steps = left.get(str(call.number))
                if steps is not None and call.begun > steps:
                    return self._other_length(steps, f"{call.begun} or more", "left")
            elif call.begun > int(ended):
                return self._other_length(ended, f"{call.begun} or more")
            elif call is not calls[-1] and f"loops/{calls[-1].number}/{number}" not in told:
                return self._other_length(ended, "a further call within it")
        return None

    def _gather(
        self, kind: str, value: str, call: Call, longest: float = math.inf
    ) -> dict[int, str]:
        """Waits for what each process writes of a kind in a call; `longest` in seconds."""
        prefix = f"{kind}/{call.number}/"
        call.written.append(f"{prefix}{self.number}")
        self._board.write(call.written[-1], value)
        begun = time.monotonic()
        due = begun + BEAT
        is_told = False
        while True:
            found = self._board.read(prefix, seconds=BEAT / 4)
            if len(found) == len(self.names) or time.monotonic() > begun + longest:
                return {int(number): text for number, text in found.items()}
            self.attend()
            if time.monotonic() > due:
                self.check()
                due = time.monotonic() + BEAT
            if time.monotonic() > begun + self.timeout and not is_told:
                is_told = True
                absent = [n for k, n in enumerate(self.names) if str(k) not in found]
                warnings.warn(
                    f"A parallel model has waited {self.timeout:g} seconds for "
                    f"{', '.join(absent)}: alive, but not at the same call. All processes must "
                    "make the same calls of parallel models in the same order.",
                    stacklevel=4,
                )

    def _given_up(self, number: int, host: str, problem: str, cure: str) -> ClusterError:
        """The error for what another process has stopped with."""
        if host == self.names[self.number]:  # this process, which goes on all the same
            return self._break(number, f"It has stopped with ClusterError: {host}: {problem}", cure)
        return self._break(self.names.index(host), problem, cure)

    def attend(self) -> None:
        """Does what another process waits for meanwhile, if a backend has that."""

    def _silent(self, number: int, seconds: float) -> ClusterError:
        return self._break(
            number,
            "It has ended without a word, or the network is broken."
            if seconds == math.inf
            else f"It has given no sign of life for {seconds:.0f} seconds: it was killed or "
            "frozen, or the network is broken.",
            f"Check that host. {_RESTART}",
        )

    def _other_length(self, steps: str, expected: str, how: str = "ended") -> tuple[str, str]:
        """What is wrong with a process that ends or leaves a call after other steps; the cure."""
        problem = f"It {how} a loop after {steps} steps, and others after {expected}."
        return problem, SAME_LENGTH[self.data]

    def _break(self, number: int, problem: str, cure: str) -> ClusterError:
        self.broken = ClusterError(self.names[number], problem, cure)
        return self.broken


def in_thread(call: Callable[[], Any]) -> futures.Future[Any]:
    """Starts a call in a thread, because a backend may wait in it for ever."""
    future: futures.Future[Any] = futures.Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
