"""Processes that run the same steps, and how each notices a lost one."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import Any, ClassVar, Protocol

from keras_multigpu.engines.errors import ClusterError

BEAT = 1.0
"""Seconds between two signs of life."""

_RESTART = (
    "Start the script again in all processes: with `keras.callbacks.BackupAndRestore` it continues "
    "from the last backup."
)
_CURES = {
    "rows": "Give the same data, in the same order, in all processes: each takes its part. "
    "Data that shuffle themselves need the same seed in all.",
    "weights": "Build the model with the same seed in all processes (`keras.utils.set_random_seed` "
    "after `join`), or load the same file. After Ctrl-C, load the last file in all.",
}
# After a network error, this many seconds of silence suffice to call a process lost.
_SURELY_LOST = 4 * BEAT


class Board(Protocol):
    """A board that all processes write to and read. Each gives signs of life on it."""

    def write(self, key: str, value: str | None) -> None:
        """Writes an entry, or deletes it if it is `None`; returns at once."""

    def read(self, prefix: str, seconds: float = 0.0) -> dict[str, str]:
        """The entries whose keys start with a prefix, which is removed from the keys.

        With `seconds`, it first waits up to that long for news.
        """

    def silence(self, number: int) -> float:
        """Seconds since the last sign of life of a process; endless if its connection ended."""

    def service_silence(self) -> float:
        """Seconds since news came last, by way of process 0."""

    def stop(self, seconds: float) -> None:
        """Ends its work within some seconds."""


def under(entries: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The entries whose keys start with a prefix, which is removed from the keys."""
    return {
        key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)
    }


class Group:
    """Processes that run the same script, as one of them sees them.

    Every wait ends: when the others have arrived, or with a `ClusterError` if one of them shows no
    sign of life for `timeout` seconds, has ended, has failed, or makes another call.

    Args:
        board: what the processes write for each other.
        number: this process's number.
        names: how errors call each process: `"gpu7 (process 1, pid 4242)"`.
        timeout: in seconds.
    """

    failures: ClassVar[tuple[type[Exception], ...]] = ()
    """The backend's errors that a lost process may cause."""

    def __init__(self, board: Board, number: int, names: tuple[str, ...], timeout: float):
        self.number, self.names, self.timeout = number, names, timeout
        self._board = board
        self._loop = 0
        self._steps = 0
        self.broken: ClusterError | None = None

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the files."""
        return self.number == 0

    def begin(self, call: str, facts: dict[str, str]) -> None:
        """Begins a call (`"fit"`) together with the others; compares facts that must be equal."""
        if self.broken is not None:
            raise self.broken
        self._loop, self._steps = self._loop + 1, 0
        for kind in ("loops", "ends", "weights", "new weights"):
            self._board.write(f"{kind}/{self._loop - 2}/{self.number}", None)
        mine = {"call": call, **facts}
        told = self._gather(f"loops/{self._loop}/", json.dumps(mine))
        first, *others = (json.loads(told[number]) for number in range(len(self.names)))
        for number, other in enumerate(others, 1):
            for fact, value in first.items():
                if other.get(fact) != value:
                    raise self._break(
                        number,
                        f"Its {fact} is {other.get(fact)}. In process 0 it is {value}.",
                        "Run the same script in all processes, with the same data, files and "
                        "seeds (`keras.utils.set_random_seed`).",
                    )

    def end(self) -> None:
        """Ends a call together with the others; compares the numbers of steps."""
        told = self._gather(f"ends/{self._loop}/", str(self._steps))
        for number in range(len(self.names)):
            if told[number] != told[0]:
                raise self._other_length(number, told[number], told[0])

    def compare(self, what: str, digest: str) -> None:
        """Raises a `ClusterError` if the checksum of `what` is another one in another process."""
        other = self.differing(what, digest)
        if other is not None:
            raise self.differs(other, what)

    def differing(self, what: str, digest: str) -> int | None:
        """The first process where the checksum of `what` is not that of process 0, if any."""
        told = self._gather(f"{what}/{self._loop}/", digest)
        return next((k for k in range(len(self.names)) if told[k] != told[0]), None)

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process has left the call with an error."""
        kind = "stopped" if self.broken is not None else f"failures/{self._loop}"
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

    def differs(self, number: int, what: str) -> ClusterError:
        """The error for a process whose rows or weights (`what`) differ from process 0's."""
        return self._break(
            number,
            f"Its {what} and those of process 0 differ at step {self._steps}.",
            _CURES[what],
        )

    def count_step(self, count: int = 1) -> None:
        """Notes that a step begins; with -1, that it was none."""
        self._steps += count

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
        told = self._board.read("")
        others = [number for number in range(len(self.names)) if number != self.number]
        for number in others:
            # The reasons first: a process that has failed ends.
            for kind in (f"failures/{self._loop}", "stopped", "ended"):
                if f"{kind}/{number}" in told:
                    raise self._break(number, f"It has {told[f'{kind}/{number}']}.", _RESTART)
            steps = told.get(f"ends/{self._loop}/{number}", str(self._steps))
            if int(steps) < self._steps:
                raise self._other_length(number, steps, f"{self._steps} or more")
        if self._board.service_silence() > silence and self.number:
            raise self._silent(0, self._board.service_silence())
        for number in others:
            if self._board.silence(number) > silence:
                raise self._silent(number, self._board.silence(number))

    def _gather(self, prefix: str, value: str) -> dict[int, str]:
        """Waits for what each process writes under a prefix."""
        self._board.write(f"{prefix}{self.number}", value)
        begun = time.monotonic()
        due = begun + BEAT
        is_told = False
        while True:
            found = self._board.read(prefix, seconds=BEAT / 4)
            if len(found) == len(self.names):
                return {int(number): text for number, text in found.items()}
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

    def _silent(self, number: int, seconds: float) -> ClusterError:
        return self._break(
            number,
            "It has ended without a word, or the network is broken."
            if seconds == math.inf
            else f"It has given no sign of life for {seconds:.0f} seconds: it was killed or "
            "frozen, or the network is broken.",
            f"Check that host. {_RESTART}",
        )

    def _other_length(self, number: int, steps: str, expected: str) -> ClusterError:
        return self._break(
            number,
            f"It ended a loop after {steps} steps, and others after {expected}.",
            "Give the same data, with the same number of batches, in all processes.",
        )

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
