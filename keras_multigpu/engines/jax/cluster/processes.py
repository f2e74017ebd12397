"""`join`: connects the processes of several hosts through JAX's runtime."""

from __future__ import annotations

import atexit
import inspect
import os
import sys
import time
from concurrent import futures
from typing import Any

import jax
import keras

from keras_multigpu.engines.cluster.board import BEAT
from keras_multigpu.engines.cluster.descriptions import describe_process
from keras_multigpu.engines.cluster.remote import Address
from keras_multigpu.engines.cluster.rendezvous import meet, not_joined
from keras_multigpu.engines.jax import devices
from keras_multigpu.engines.jax.cluster.board import Board
from keras_multigpu.engines.jax.cluster.group import Group
from keras_multigpu.engines.shared import in_thread

# Extra seconds before JAX kills the process, so that our error comes first.
_GRACE = 60
_FAR = 24 * 3600
# What must be equal in all processes.
_EQUAL = ("num_processes", "data", "Python", "JAX", "Keras", "keras_multigpu")
_joined: tuple[tuple[str, int, int, str], Group] | None = None


def current() -> Group | None:
    """The group of processes that this one has joined, if any."""
    return _joined[1] if _joined else None


def check_not_joined_elsewhere() -> None:
    """Raises a `ValueError` if JAX's or Keras's own function has joined processes."""
    if _joined is None and jax.distributed.is_initialized():
        raise ValueError(
            "Processes are joined by `keras_multigpu.cluster.join`, so that a parallel model "
            "notices when one is lost. Received: a process that `jax.distributed.initialize` or "
            "`keras.distribution.initialize` has joined to others. Call `join` instead."
        )


def join(address: Address, count: int, number: int, timeout: float, data: str) -> tuple[str, ...]:
    """Joins this process, `number` of `count`, to the others; returns what to call each."""
    global _joined
    request = (address.numeric, count, number, data)
    if _joined is not None and _joined[0] == request:
        return _joined[1].names
    if _joined is not None or jax.distributed.is_initialized() or devices.has_started():
        raise RuntimeError(
            "`join` must come once in a process, before the first tensor or model. Received: "
            f"coordinator={address.name!r}, num_processes={count}, process_id={number}, in a "
            "process where JAX has started already. Restart the process (or the notebook's "
            "kernel) and call it right after the imports."
        )
    _check_version()
    until = time.monotonic() + timeout
    # First among us: JAX would give a number to the latest process that asks for it.
    records = meet(
        address, number, count, describe_process(count, data, JAX=jax.__version__), _EQUAL, until
    )
    _initialize(address, count, number, time.monotonic() + timeout, timeout)
    names = tuple(f"{r['host']} (process {k}, pid {r['pid']})" for k, r in enumerate(records))
    board = Board(_client(), number, of=records[0]["seed"])
    group = Group(board, number, names, timeout, data)
    _joined = (request, group)
    atexit.register(_leave, group)
    if len({record["random numbers"] for record in records}) > 1:
        keras.utils.set_random_seed(int(records[0]["seed"]))
    started = in_thread(jax.devices)  # starts JAX's runtime while all processes are here
    while not futures.wait([started], BEAT).done:
        group.check()
    started.result()  # raises the error, if there was one
    return names


def _check_version() -> None:
    known = inspect.signature(jax.distributed.initialize).parameters
    if "shutdown_timeout_seconds" not in known:
        raise RuntimeError(
            "`join` needs JAX 0.8.1 or later, where the time for waiting can be set. "
            f"Received: jax.__version__={jax.__version__!r}. Install it: `pip install -U jax`."
        )


def _initialize(address: Address, count: int, number: int, until: float, timeout: float) -> None:
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

    def initialize() -> None:
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

    joined = in_thread(initialize)
    if not futures.wait([joined], max(0.0, until - time.monotonic())).done:
        atexit.register(_end_at_once)
        raise not_joined(address, f"one or more of {count} processes are absent")
    error = joined.exception()
    if error is not None:
        raise not_joined(address, str(error).splitlines()[0]) from error


def _client() -> Any:
    """JAX's client of its coordination service.

    Only through it can processes talk to each other while a computation hangs. JAX has no public
    name for it; other libraries import it from here too.
    """
    from jax._src import distributed  # noqa: TID251

    return distributed.global_state.client


def _leave(group: Group) -> None:
    """Leaves the group when the process ends."""
    group.leave()
    if group.broken is not None:
        _end_at_once()


def _end_at_once() -> None:
    """Exits without JAX's own clean-up, which would wait for a computation that never ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
