"""Health checks of workers, with TensorFlow's own `GetStatus`."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import grpc

from keras_multigpu.engines.cluster.remote import Address
from keras_multigpu.engines.tensorflow.cluster import watchdog
from keras_multigpu.engines.tensorflow.cluster.link import Link
from keras_multigpu.engines.tensorflow.cluster.sockets import end_connections, hand_over

# The answer is a protocol buffer that contains the names of the devices as plain text.
_DEVICE = re.compile(rb"/job:(\w+)/replica:0/task:0/device:(CPU|GPU):(\d+)")

_PATIENCE = 0.7  # of the timeout; the rest is for raising the error


@dataclasses.dataclass(frozen=True)
class Status:
    """What a worker answers to `GetStatus`.

    Attributes:
        job: the name of its job, which contains its version of TensorFlow.
        devices: its devices, `"gpu:0"`.
        identity: bytes that differ from one process to the next.
    """

    job: str
    devices: tuple[str, ...]
    identity: bytes


class Caller:
    """Sends `GetStatus` to one worker, on a separate channel."""

    def __init__(self, worker: Address):
        self._channel = grpc.insecure_channel(worker.numeric, options=watchdog.OPTIONS)
        self._call = self._channel.unary_unary(watchdog.STATUS)

    def ask(self, seconds: float, *, patient: bool = False) -> Status | None:
        """The worker's answer within some seconds; `None` without a valid one.

        If `patient`, it also waits for a worker that does not listen yet.
        """
        try:
            answer = self._call(b"", timeout=seconds, wait_for_ready=patient)
        except grpc.RpcError:
            return None
        found = _DEVICE.findall(answer)
        devices = tuple(f"{kind.decode().lower()}:{int(index)}" for _, kind, index in found)
        return Status(found[0][0].decode(), devices, answer) if found else None

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()


class Guard:
    """A thread that checks a worker, and ends the connections to it when it is lost.

    Otherwise a call to a frozen process would wait forever: its machine keeps the connection.
    The worker is lost after `timeout` seconds of silence at the latest.

    Attributes:
        lost: a sentence about what happened to it; `None` while it answers.
        misses: how many of the latest checks had no answer.
    """

    def __init__(
        self,
        worker: Address,
        status: Status,
        timeout: float,
        watchdog: Watchdog,
        guards: Sequence[Guard],
    ):
        self.worker = worker
        self.lost: str | None = None
        self.misses = 0
        self.link: Link | None = None  # once there are connections that carry tensors
        self._guards = guards
        self._status = status
        self._timeout = timeout
        self._watchdog = watchdog
        self._heard = time.monotonic()
        self._caller = Caller(worker)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def check(self) -> str | None:
        """Asks the worker; returns what happened to it, or `None` if it is well."""
        if self.lost is None:
            end = time.monotonic() + _PATIENCE * self._timeout
            answer = self._caller.ask(end - time.monotonic())
            left = end - time.monotonic()
            if answer is None and left > 0:
                # gRPC delays retries on a failed channel, so ask on a new one.
                with contextlib.closing(Caller(self.worker)) as fresh:
                    answer = fresh.ask(left)
            self._note(answer, silence=self._timeout)
        return self.lost

    def stop(self) -> None:
        """Stops asking."""
        self._stopped.set()
        self._thread.join()
        self._caller.close()

    def _run(self) -> None:
        # Three misses, because the first calls time out if this process itself was suspended.
        pause = self._timeout / 10
        while not self._stopped.wait(pause):
            if self.lost is not None:  # TensorFlow reconnects, and would wait again
                end_connections(self.worker.ip, self.worker.port)
                pause = 0.5
                continue
            self._watchdog.hand_over(self.worker)
            answer = self._caller.ask(pause)
            self.misses = self.misses + 1 if answer is None else 0
            self._note(answer, time.monotonic() - self._heard if self.misses >= 3 else 0.0)
            is_silent = self.link is not None and self.link.is_silent(_PATIENCE * self._timeout)
            # If a worker is frozen, the numbers sent to others come late too.
            if is_silent and not any(guard.misses for guard in self._guards):
                self.lost = (
                    "The worker answers, but the connections that carry its tensors are silent: "
                    "something between the machines has dropped them."
                )
                end_connections(self.worker.ip, self.worker.port)

    def _note(self, answer: Status | None, silence: float) -> None:
        if answer is not None and answer.identity != self._status.identity:
            self.lost = "The worker was restarted after `connect`."
        elif answer is None and silence > _PATIENCE * self._timeout:
            self.lost = "The worker does not answer: it has ended, is frozen, or is cut off."
        elif answer is not None:
            self._heard = time.monotonic()
        if self.lost is not None:
            end_connections(self.worker.ip, self.worker.port)


class Watchdog:
    """A process that ends connections while no thread of this one can run: see `watchdog`."""

    def __init__(self, workers: Sequence[Address], timeout: float):
        self._workers = list(workers)
        self._socket, its = socket.socketpair()
        self._socket.setblocking(False)
        with its:
            arguments = [str(its.fileno()), str(timeout), *(one.numeric for one in workers)]
            self._process = subprocess.Popen(
                [sys.executable, watchdog.__file__, *arguments],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the process that trains
            )

    def hand_over(self, worker: Address) -> None:
        """Passes the connections to a worker to the process."""
        hand_over(self._socket, self._workers.index(worker), worker.ip, worker.port)

    def stop(self) -> None:
        """Ends the process."""
        self._socket.close()
        self._process.kill()
        self._process.wait()
