"""Several processes, each with devices of its own host, that train one model."""

from __future__ import annotations

import atexit
import importlib.metadata
import json
import os
import random
import socket
import sys
import threading
import time
import zlib
from typing import Any

import jax
import keras
import numpy as np

from keras_multigpu.engines.errors import ClusterError
from keras_multigpu.engines.jax import devices
from keras_multigpu.engines.jax.board import BEAT, Board
from keras_multigpu.engines.jax.group import Group
from keras_multigpu.engines.remote import Address

# So long JAX waits more before it ends the processes itself, without an exception of Python's.
_GRACE = 60
_FAR = 24 * 3600
# The first bytes of HTTP/2 from a client, and the kind of frame with which a server answers.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = b"\x04"
_joined: tuple[tuple[str, int, int], Group] | None = None


def current() -> Group | None:
    """The group of processes that this one has joined."""
    return _joined[1] if _joined else None


def check_not_joined_elsewhere() -> None:
    """Refuses processes that were joined by JAX's or Keras's own function.

    Raises:
        ValueError: if they were.
    """
    if _joined is None and jax.distributed.is_initialized():
        raise ValueError(
            "Processes are joined by `keras_multigpu.cluster.join`, for a parallel model to notice "
            "when one is lost. Received: a process that `jax.distributed.initialize` or "
            "`keras.distribution.initialize` has joined. Call `join` in its place."
        )


def join(address: Address, count: int, number: int, timeout: float) -> tuple[str, ...]:
    """Joins this process to a group; gives the names of its processes.

    Args:
        address: where the first of them is reached.
        count: how many processes there are.
        number: this one's.
        timeout: after how many seconds of silence a process is lost.

    Raises:
        ClusterError: if they don't come together in time, or don't fit together.
        RuntimeError: if JAX's runtime has started.
    """
    global _joined
    request = (address.numeric, count, number)
    if _joined is not None and _joined[0] == request:
        return _joined[1].names
    if _joined is not None or jax.distributed.is_initialized() or devices.has_started():
        raise RuntimeError(
            "`join` must come once in a process, before the first tensor or model. Received: "
            f"coordinator={address.name!r}, num_processes={count}, process_id={number}, in a "
            "process where JAX has started already. Restart the process (or the notebook's "
            "kernel) and call it right after the imports."
        )
    until = time.monotonic() + timeout
    if number:
        _await_answer(address, until)
    else:
        _check_port(address)
    _initialize(address, count, number, until, timeout)
    board = Board(_client(), number)
    try:
        records = _introduce(board, address, count, number, until)
        _check_alike(records)
    except ClusterError:
        atexit.register(_end_at_once)
        time.sleep(0 if number else 2 * BEAT)  # the others read what was written
        raise
    names = tuple(f"{r['host']} (process {k}, pid {r['pid']})" for k, r in enumerate(records))
    group = Group(board, number, names, timeout)
    _joined = (request, group)
    atexit.register(_leave, group)
    if any(record["random numbers"] != records[0]["random numbers"] for record in records):
        keras.utils.set_random_seed(int(records[0]["seed"]))
    jax.devices()  # now, and not when a process is alone with it
    return names


def _check_port(address: Address) -> None:
    """Refuses an address on which this process can't serve."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.ip, address.port))
        except OSError as error:
            raise ClusterError(
                address.name,
                f"Process 0 can't listen there ({error.strerror}).",
                "Give an address of the host of process 0, with a port that nothing else uses.",
            ) from error


def _await_answer(address: Address, until: float) -> None:
    """Waits until a server of the protocol that JAX's coordinator speaks answers there."""
    reason = ""
    while time.monotonic() < until:
        try:
            with socket.create_connection((address.ip, address.port), timeout=2.0) as probe:
                probe.sendall(_GREETING)
                answer = probe.recv(9)
            if answer[3:4] == _SETTINGS:
                return
            reason = "something else than a coordinator answers there"
        except OSError as error:
            reason = str(error)
        time.sleep(0.1)
    raise _not_together(address, reason)


def _initialize(address: Address, count: int, number: int, until: float, timeout: float) -> None:
    if jax.config.jax_cpu_collectives_implementation is None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Otherwise JAX ends this process when another one is lost, before it can tell.
    jax.config.update("jax_enable_recoverability", True)
    errors: list[Exception] = []
    done = threading.Event()

    def initialize() -> None:
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
        except Exception as error:
            errors.append(error)
        done.set()

    # In a thread, for JAX ends the process where the others don't come in its own time.
    threading.Thread(target=initialize, daemon=True).start()
    if not done.wait(max(0.0, until - time.monotonic())):
        atexit.register(_end_at_once)
        raise _not_together(address, f"of {count} processes one or more are absent")
    if errors:
        raise _not_together(address, str(errors[0]).splitlines()[0]) from errors[0]


def _not_together(address: Address, reason: str) -> ClusterError:
    return ClusterError(
        address.name,
        f"The processes did not come together there in time ({reason}).",
        "Start all processes with the same `coordinator`, an address of the host of process 0 "
        "that the others reach, and the same `num_processes`; and each with a `process_id` of "
        "its own.",
    )


def _client() -> Any:
    """JAX's client of its coordination service.

    The one way by which processes can tell each other anything while a computation hangs; JAX
    exports it under no public name, and its other users take it from here too.
    """
    from jax._src import distributed  # noqa: TID251

    return distributed.global_state.client


def _introduce(
    board: Board, address: Address, count: int, number: int, until: float
) -> list[dict[str, str]]:
    """What each process says of itself, by their numbers."""
    mine = {
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "num_processes": str(count),
        "JAX": jax.__version__,
        "Keras": keras.__version__,
        "keras_multigpu": importlib.metadata.version("keras-multigpu"),
        "random numbers": _random_state(),
        "seed": str(random.SystemRandom().randrange(2**31)),
    }
    board.write(f"records/{number}", json.dumps(mine))
    while True:
        found = board.read("records/", seconds=0.25)
        records = {int(key): json.loads(value) for key, value in found.items()}
        if all(k in records for k in range(count)):
            return [records[k] for k in range(count)]
        if time.monotonic() > until:
            absent = ", ".join(str(k) for k in range(count) if k not in records)
            raise _not_together(address, f"absent: process {absent}")


def _random_state() -> str:
    """What tells whether processes will draw the same random numbers: their seed was set."""
    states = (random.getstate(), np.random.get_state(legacy=False))
    return str(zlib.crc32(repr(states).encode()))


def _check_alike(records: list[dict[str, str]]) -> None:
    for number, record in enumerate(records):
        for fact in ("num_processes", "JAX", "Keras", "keras_multigpu"):
            if record[fact] != records[0][fact]:
                raise ClusterError(
                    f"{record['host']} (process {number}, pid {record['pid']})",
                    f"It has {fact} {record[fact]}, and process 0 on {records[0]['host']} has "
                    f"{records[0][fact]}.",
                    "Make them equal, and start all processes again.",
                )


def _leave(group: Group) -> None:
    """Ends together with the others."""
    group.leave()
    if group.broken is not None:
        _end_at_once()


def _end_at_once() -> None:
    """Ends the process without JAX, which would wait for what can't end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
