"""`join`: processes that run the same steps, connected through JAX's runtime."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import Any

import jax

from keras_multigpu.engines.cluster import group, processes
from keras_multigpu.engines.cluster.board import BEAT, under
from keras_multigpu.engines.cluster.calls import Call
from keras_multigpu.engines.cluster.remote import Address
from keras_multigpu.engines.cluster.rendezvous import Record, not_joined
from keras_multigpu.engines.jax import devices

# Extra seconds before JAX kills the process, so that our error comes first.
_GRACE = 60
_FAR = 24 * 3600
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


class _Processes(processes.Processes[Group]):
    """Those with JAX's distributed runtime."""

    def __init__(self) -> None:
        super().__init__("JAX", jax.__version__, Group)

    def has_started(self) -> bool:
        return jax.distributed.is_initialized() or devices.has_started()

    def facts(self, address: Address, number: int) -> dict[str, str]:
        _check_version()
        return {}

    def start(self, group: Group, address: Address, records: Sequence[Record]) -> None:
        _initialize(address, len(records), group.number, group.timeout)
        jax.devices()  # starts JAX's runtime while all processes are here


PROCESSES = _Processes()


def current() -> Group | None:
    """The group of processes that this one has joined, if any."""
    return PROCESSES.group


def check_not_joined_elsewhere() -> None:
    """Raises a `ValueError` if JAX's or Keras's own function has joined processes."""
    if current() is None and jax.distributed.is_initialized():
        raise ValueError(
            "Processes are joined by `keras_multigpu.cluster.join`, so that a parallel model "
            "notices when one is lost. Received: a process that `jax.distributed.initialize` or "
            "`keras.distribution.initialize` has joined to others. Call `join` instead."
        )


def _check_version() -> None:
    known = inspect.signature(jax.distributed.initialize).parameters
    if "shutdown_timeout_seconds" not in known:
        raise RuntimeError(
            "`join` needs JAX 0.8.1 or later, where the time for waiting can be set. "
            f"Received: jax.__version__={jax.__version__!r}. Install it: `pip install -U jax`."
        )


def _initialize(address: Address, count: int, number: int, timeout: float) -> None:
    if jax.config.jax_cpu_collectives_implementation is None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if devices.count("cpu") < 2 and not devices.count("gpu"):
        # With a single device JAX computes inside the call, so that no Python thread could notice
        # that another process is lost.
        devices.make_virtual(2)
    # Otherwise JAX ends this process as soon as another one is lost, without an exception.
    jax.config.update("jax_enable_recoverability", True)
    # JAX would take the signal by which schedulers end a process, and go on.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            address.numeric,
            count,
            number,
            cluster_detection_method="deactivate",
            coordinator_bind_address=address.numeric,
            initialization_timeout=_FAR,
            heartbeat_timeout_seconds=round(timeout) + _GRACE,
            shutdown_timeout_seconds=round(timeout),
        )
    except Exception as error:  # of many types: JAX's, and its service's
        raise not_joined(address, str(error).splitlines()[0]) from error
