"""Processes that belong together, and how each notices a lost one."""

from __future__ import annotations

import abc
import contextlib
import math
import os
import time
from collections.abc import Iterator
from typing import ClassVar

from keras_multigpu.engines.cluster.board import BEAT, Board
from keras_multigpu.engines.cluster.errors import ClusterError

RESTART = (
    "Start the script again in all processes: with `keras.callbacks.BackupAndRestore` it continues "
    "from the last backup."
)
# After a network error, this many seconds of silence suffice to call a process lost.
_SURELY_LOST = 4 * BEAT


class Members(abc.ABC):
    """Processes that give each other signs of life, as one of them sees them.

    Args:
        board: what the processes write for each other.
        number: this process's number.
        names: how errors call each process: `"gpu7 (process 1, pid 4242)"`.
        timeout: in seconds.

    Attributes:
        number, names, timeout: the arguments.
        broken: the error after which the processes don't compute together any more.
    """

    failures: ClassVar[tuple[type[Exception], ...]] = ()
    """The backend's errors that a lost process may cause."""

    def __init__(self, board: Board, number: int, names: tuple[str, ...], timeout: float):
        self.number, self.names, self.timeout = number, names, timeout
        self._board = board
        self.broken: ClusterError | None = None
        self._process = os.getpid()
        self._is_lost = False  # whether it is for a process that is lost, for all one can see

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the files."""
        return self.number == 0

    @property
    def _is_copy(self) -> bool:
        """Whether this is a child, by `os.fork`, of the process that has joined: no member."""
        return os.getpid() != self._process

    @property
    def _others(self) -> list[int]:
        return [number for number in range(len(self.names)) if number != self.number]

    @abc.abstractmethod
    def check(self, silence: float | None = None) -> None:
        """Raises a `ClusterError` if a process is lost, by default after `timeout` of silence."""

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

    def leave(self) -> None:
        """Tells the others that this process ends.

        Process 0 leaves last: it hosts the backend's coordination service, without which the
        others would be ended.
        """
        if self._is_copy:
            return
        self._board.write(f"ended/{self.number}", "ended")
        awaited = range(len(self.names)) if self.number == 0 else [self.number]
        while self.number == 0 or self._board.silence(0) < self.timeout:
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

    def _check_signs(self, silence: float | None) -> None:
        """Raises a `ClusterError` for a process without a sign of life, by default in `timeout`."""
        for number in self._others:
            seconds = self._board.silence(number)
            if seconds > (self.timeout if silence is None else silence):
                raise self._silent(number, seconds)

    def _given_up(
        self, number: int, host: str, problem: str, cure: str, is_lost: bool
    ) -> ClusterError:
        """The error for what another process has stopped with: all name the same process."""
        if is_lost and host == self.names[self.number]:  # this process, which goes on all the same
            return self._break(number, f"It has stopped with ClusterError: {host}: {problem}", cure)
        return self._break(self.names.index(host), problem, cure, is_lost)

    def _silent(self, number: int, seconds: float) -> ClusterError:
        return self._break(
            number,
            "It has ended without a word, or the network is broken."
            if seconds == math.inf
            else f"It has given no sign of life for {seconds:.0f} seconds: it was killed or "
            "frozen, or the network is broken.",
            f"Check that host. {RESTART}",
            is_lost=True,
        )

    def _break(self, number: int, problem: str, cure: str, is_lost: bool = False) -> ClusterError:
        self.broken, self._is_lost = ClusterError(self.names[number], problem, cure), is_lost
        return self.broken
