"""`join`: brings processes of several hosts together, and starts the backend's runtime in all."""

from __future__ import annotations

import abc
import atexit
import importlib.metadata
import os
import platform
import random
import socket
import sys
import time
import zlib
from collections.abc import Sequence
from concurrent import futures
from typing import Generic, TypeVar

import keras
import numpy as np

from keras_multigpu.engines.cluster.board import BEAT, Board
from keras_multigpu.engines.cluster.group import Group
from keras_multigpu.engines.cluster.remote import Address
from keras_multigpu.engines.cluster.rendezvous import Record, meet
from keras_multigpu.engines.shared import in_thread

_EQUAL = ("num_processes", "data", "Python", "Keras", "keras_multigpu")
AnyGroup = TypeVar("AnyGroup", bound=Group)


class Processes(abc.ABC, Generic[AnyGroup]):
    """Those that this process has joined, once; of an engine.

    Args:
        backend: its title.
        version: its version, which all must have.
        kind: the class of the group.

    Attributes:
        group: what this process has joined, if anything.
    """

    def __init__(self, backend: str, version: str, kind: type[AnyGroup]):
        self._backend, self._version, self._kind = backend, version, kind
        self._request: tuple[str, int, int, str] | None = None
        self.group: AnyGroup | None = None

    @abc.abstractmethod
    def has_started(self) -> bool:
        """Whether the backend's runtime has started in this process: too late to join."""

    def facts(self, address: Address, number: int) -> dict[str, str]:
        """What the others are told of this process, beside what all backends tell."""
        return {}

    @abc.abstractmethod
    def start(self, group: AnyGroup, address: Address, records: Sequence[Record]) -> None:
        """Starts the runtime, in a thread, while all processes are there."""

    def join(
        self, address: Address, count: int, number: int, timeout: float, data: str
    ) -> tuple[str, ...]:
        """Joins this process, `number` of `count`, to the others; returns what to call each."""
        request = (address.numeric, count, number, data)
        if self.group is not None and self._request == request:
            return self.group.names
        if self.group is not None or self.has_started():
            raise RuntimeError(
                "`join` must come once in a process, before the first tensor or model. Received: "
                f"coordinator={address.name!r}, num_processes={count}, process_id={number}, in a "
                f"process where {self._backend} has started already. Restart the process (or the "
                "notebook's kernel) and call it right after the imports."
            )
        until = time.monotonic() + timeout
        mine = {self._backend: self._version, **self.facts(address, number)}
        facts = _describe(count, data, **mine)
        # First among us: the backend may give a number to the latest process that asks for it.
        records, kept = meet(address, number, count, facts, (*_EQUAL, self._backend), until)
        names = tuple(f"{r['host']} (process {k}, pid {r['pid']})" for k, r in enumerate(records))
        group = self._kind(Board(number, kept), number, names, timeout, data)
        atexit.register(_leave, group)
        started = in_thread(lambda: self.start(group, address, records))
        while not futures.wait([started], BEAT).done:
            group.check()
        try:
            started.result()
        except BaseException as error:
            group.fail(error)
            raise
        self._request, self.group = request, group
        if len({record["random numbers"] for record in records}) > 1:
            keras.utils.set_random_seed(int(records[0]["seed"]))
        return names


def _describe(count: int, data: str, **facts: str) -> dict[str, str]:
    """What the others are told of this process, `facts` of the backend included."""
    states = (random.getstate(), np.random.get_state(legacy=False))
    return {
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "num_processes": str(count),
        "data": data,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "Keras": keras.__version__,
        "keras_multigpu": importlib.metadata.version("keras-multigpu"),
        # A checksum: equal in processes that have set the same seed.
        "random numbers": str(zlib.crc32(repr(states).encode())),
        "seed": str(random.SystemRandom().randrange(2**31)),
        **facts,
    }


def _leave(group: Group) -> None:
    """Leaves the group when the process ends."""
    group.leave()
    if group.broken is not None:
        # The backend's own clean-up would wait for operations that never end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
