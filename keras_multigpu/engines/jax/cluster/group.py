"""Processes that run the same steps, and how each notices a lost one."""

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

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process has left the call with an error."""
        kind = "stopped" if self.broken is not None else f"failures/{self._loop}"
        words = [f"{type(error).__name__}:", *str(error).split()]
        text = " ".join(words)[:300].rstrip(".:")
        self._board.write(f"{kind}/{self.number}", f"stopped with {text}")

    def leave(self) -> None:
        """Tells the others that this process ends.

        Process 0 leaves last: it hosts JAX's coordination service, and JAX ends the others
        without it.
        """
        self._board.write(f"ended/{self.number}", "ended")
        awaited = range(len(self.names)) if self.number == 0 else [self.number]
        while self._board.service_silence() < self.timeout:
            ended = self._board.read("ended/", seconds=0.05)
            if all(str(k) in ended or self._board.silence(k) > self.timeout for k in awaited):
                break
        if self.number == 0:
            # After that they disconnect from JAX's service, and their signs of life stop.
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

    def count_step(self) -> None:
        """Notes that a step begins."""
        self._steps += 1

    def wait(self, values: Any) -> None:
        """Waits for arrays that all processes compute together.

        It polls, because a blocking wait in JAX can't be interrupted.
        """
        pause, due = 1e-4, time.monotonic() + BEAT
        for leaf in jax.tree.leaves(values):
            while isinstance(leaf, jax.Array) and not leaf.is_ready():
                time.sleep(pause)
                pause = min(1.5 * pause, 0.01)
                if time.monotonic() > due:
                    self.check()
                    due = time.monotonic() + BEAT
        jax.block_until_ready(values)  # raises the error, if there was one

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Scope that raises a `ClusterError` if JAX's error comes from a lost process."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            # JAX does not say whose connection broke. The lost process is the silent one.
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
        if self._board.service_silence() > silence and self.number:
            raise self._silent(0, self._board.service_silence())
        told = self._board.read("")
        for number in range(len(self.names)):
            if number == self.number:
                continue
            if self._board.silence(number) > silence:
                raise self._silent(number, self._board.silence(number))
            # The reason first: a process that has failed ends.
            for kind in (f"failures/{self._loop}", "stopped", "ended"):
                if f"{kind}/{number}" in told:
                    raise self._break(number, f"It has {told[f'{kind}/{number}']}.", _RESTART)
            steps = told.get(f"ends/{self._loop}/{number}", str(self._steps))
            if int(steps) < self._steps:
                raise self._other_length(number, steps, f"{self._steps} or more")

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
            f"It has given no sign of life for {seconds:.0f} seconds: it was killed or frozen, or "
            "the network is broken.",
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
