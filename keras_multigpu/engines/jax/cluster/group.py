"""Processes that run the same steps on JAX."""

from __future__ import annotations

import time
from typing import Any

import jax

from keras_multigpu.engines.cluster import group
from keras_multigpu.engines.cluster.board import BEAT, under
from keras_multigpu.engines.cluster.calls import Call

WEIGHTS, WEIGHTS_AND_SLOTS = -1, -2
"""What a process reads; negative, unlike checksums."""
_READINGS = "readings/"


class Group(group.Group):
    """A group that waits for JAX's computations."""

    failures = (jax.errors.JaxRuntimeError,)

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

    def ask(self, call: Call) -> None:
        """Asks the others to take part in a reading of spread weights within a call."""
        key = f"{_READINGS}{call.number}/{self.number}"
        call.asked = [key]  # not `written`: the others may have asked for none
        self._board.write(key, str(call.readings + 1))

    def attend(self, kinds: list[int] | None = None) -> None:
        """Takes part in a reading, if another process has asked for one.

        With `kinds`, what the processes have said in an exchange, one has: it waits for the words.
        """
        while True:
            told = self._board.read(_READINGS, seconds=0.0 if kinds is None else BEAT / 4)
            for call in self.calls.now[::-1]:
                asked = under(told, f"{call.number}/").values()
                if call.take_part is not None and any(int(n) > call.readings for n in asked):
                    call.take_part(kinds)
                    return
            if kinds is None:
                return
            self.check()
