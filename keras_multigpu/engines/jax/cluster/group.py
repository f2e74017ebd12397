"""The processes of a cluster, which take the same steps, and what tells one of a lost other."""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from keras_multigpu.engines.errors import ClusterError
from keras_multigpu.engines.jax.cluster.board import BEAT, Board

_RESTART = (
    "Start the script again in all processes: with `keras.callbacks.BackupAndRestore` it goes on "
    "where it was."
)
_CURES = {
    "batch": "Give the same data, in the same order, in all processes: each takes its rows of it. "
    "What shuffles itself needs the same seed in all.",
    "weights": "Build the model with the same seed in all processes, or load the same file: "
    "`keras.utils.set_random_seed` after `join` sets it.",
}
# After an error of the network, so many seconds of silence are enough to call a process lost.
_SURELY_LOST = 4 * BEAT


class Group:
    """Processes that run the same script, as one of them sees them.

    Every wait for the others ends: when they are there, or with a `ClusterError` when one of
    them has given no sign of life for `timeout` seconds, has stopped with an error or has ended,
    or does something else.

    Args:
        board: what the processes write for each other.
        number: this process's.
        names: what to call each process: `"gpu7 (process 1, pid 4242)"`.
        timeout: in seconds.
        records: what each process wrote of itself when they came together, by its number.
    """

    def __init__(
        self,
        board: Board,
        number: int,
        names: tuple[str, ...],
        timeout: float,
        records: dict[str, str] | None = None,
    ):
        self.number, self.names, self.timeout = number, names, timeout
        self._board = board
        self._records = records or {}
        self._loop = 0
        self._steps = 0
        self.broken: ClusterError | None = None

    @property
    def is_writer(self) -> bool:
        """Whether it is this process that writes files."""
        return self.number == 0

    def begin(self, call: str, facts: dict[str, str]) -> None:
        """Begins a loop together with the others.

        Args:
            call: what was called: `"fit"`, say.
            facts: what must be equal in all processes, by what to call it.

        Raises:
            ClusterError: if it is not, or a process is lost.
        """
        if self.broken is not None:
            raise self.broken
        self._loop, self._steps = self._loop + 1, 0
        for kind in ("loops", "ends"):
            self._board.write(f"{kind}/{self._loop - 2}/{self.number}", None)
        mine = {"call": call, **facts}
        told = self._gather(f"loops/{self._loop}/", json.dumps(mine))
        first, *others = (json.loads(told[number]) for number in range(len(self.names)))
        for number, other in enumerate(others, 1):
            for fact, value in first.items():
                if other.get(fact) != value:
                    raise self._break(
                        number,
                        f"Its {fact} differs from that of process 0: {other.get(fact)} there, and "
                        f"{value} in process 0.",
                        "Run the same script in all processes, with the same data, files and "
                        "seeds (`keras.utils.set_random_seed`).",
                    )

    def end(self) -> None:
        """Ends a loop together with the others.

        Raises:
            ClusterError: if they took another number of steps, or a process is lost.
        """
        told = self._gather(f"ends/{self._loop}/", str(self._steps))
        for number in range(len(self.names)):
            if told[number] != told[0]:
                raise self._other_length(number, told[number], told[0])

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process has left the loop with an error."""
        kind = "stopped" if self.broken is not None else f"failures/{self._loop}"
        words = [f"{type(error).__name__}:", *str(error).split()]
        text = " ".join(words)[:300].rstrip(".:")
        self._board.write(f"{kind}/{self.number}", f"stopped with {text}")

    def leave(self) -> None:
        """Tells the others that this process ends. The first of them waits for them to end.

        With it ends the service of JAX's by which they know of each other, and JAX would end them.
        """
        self._board.write(f"ended/{self.number}", "ended")
        awaited = range(len(self.names)) if self.number == 0 else [self.number]
        while self._board.service_silence() < self.timeout:
            ended = self._board.read("ended/", seconds=0.05)
            if all(str(k) in ended or self._is_silent(k) for k in awaited):
                break
        if self.number == 0:
            time.sleep(BEAT)  # by then those that have told so are gone

    def differs(self, number: int, what: str) -> ClusterError:
        """The error of a process that has something else than process 0.

        Args:
            number: the process's.
            what: what differs, a key of `_CURES`.
        """
        return self._break(
            number,
            f"Its {what} at step {self._steps} differs from that of process 0.",
            _CURES[what],
        )

    def count_step(self) -> None:
        """Notes that a step begins."""
        self._steps += 1

    def wait(self, values: Any) -> None:
        """Waits until arrays that all processes compute together are there.

        Raises:
            ClusterError: if a process is lost.
        """
        pause, due = 1e-4, time.monotonic() + BEAT
        for leaf in jax.tree.leaves(values):
            while isinstance(leaf, jax.Array) and not leaf.is_ready():
                time.sleep(pause)
                pause = min(1.5 * pause, 0.01)
                if time.monotonic() > due:
                    self.check()
                    due = time.monotonic() + BEAT
        jax.block_until_ready(values)  # raises what went wrong

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """A scope in which an error of JAX's that comes from a lost process is told as that.

        Raises:
            ClusterError: if a process is lost.
        """
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            # JAX says that a connection broke, and not to whom: its silence tells.
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
        """Refuses to go on where a process is lost.

        Args:
            silence: the seconds without a sign of life after which it is, if not `timeout`.

        Raises:
            ClusterError: if there is such a process.
        """
        silence = self.timeout if silence is None else silence
        if self._board.service_silence() > silence and self.number:
            raise self._silent(0, self._board.service_silence())
        stopped = self._board.read("ended/") | self._board.read("stopped/")
        stopped |= self._board.read(f"failures/{self._loop}/")
        ends = self._board.read(f"ends/{self._loop}/")
        records = self._board.read("records/")
        for number in range(len(self.names)):
            if number == self.number:
                continue
            known = self._records.get(str(number))
            if records.get(str(number), known) != known:
                raise self._break(number, "It has ended, and was started again.", _RESTART)
            if self._is_silent(number, silence):
                raise self._silent(number, self._board.silence(number))
            if str(number) in stopped:
                raise self._break(number, f"It has {stopped[str(number)]}.", _RESTART)
            if int(ends.get(str(number), self._steps)) < self._steps:
                raise self._other_length(number, ends[str(number)], f"{self._steps} or more")

    def _gather(self, prefix: str, value: str) -> dict[int, str]:
        """What each process has written under a prefix, once all of them have."""
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
                    f"For {self.timeout:g} seconds a parallel model has waited for "
                    f"{', '.join(absent)}: alive, but not at the same call of a parallel model. "
                    "All processes must make the same calls in the same order.",
                    stacklevel=4,
                )

    def _is_silent(self, number: int, silence: float | None = None) -> bool:
        return self._board.silence(number) > (self.timeout if silence is None else silence)

    def _silent(self, number: int, seconds: float) -> ClusterError:
        return self._break(
            number,
            f"It has given no sign of life for {seconds:.0f} seconds: it was killed or frozen, or "
            "the network is broken.",
            f"See to that host. {_RESTART}",
        )

    def _other_length(self, number: int, steps: str, expected: str) -> ClusterError:
        return self._break(
            number,
            f"It has ended a loop after {steps} steps, and others after {expected}.",
            "Give the same data, with the same number of batches, in all processes.",
        )

    def _break(self, number: int, problem: str, cure: str) -> ClusterError:
        self.broken = ClusterError(self.names[number], problem, cure)
        return self.broken
