"""Opens, tests, watches and closes one connection to workers."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.cluster.errors import ClusterError
from keras_multigpu.engines.cluster.remote import Address
from keras_multigpu.engines.tensorflow.cluster import runtime
from keras_multigpu.engines.tensorflow.cluster.garbage import Collector
from keras_multigpu.engines.tensorflow.cluster.health import Guard, Status, Watchdog
from keras_multigpu.engines.tensorflow.cluster.link import Link
from keras_multigpu.engines.tensorflow.cluster.sockets import close_to_others, end_connections
from keras_multigpu.engines.tensorflow.names import REMOTE_JOB, full_name, short_name, task_of

_DEVICE = re.compile(rf"/job:{REMOTE_JOB}/replica:0/task:\d+/device:\w+:\d+")
_CURE = (
    "Start it again if it has ended. Then call `connect` with the workers that are there, and "
    "`make_parallel(parallel.template, devices=...)`: the weights are those of the last finished "
    "step, except weights that only the lost worker stored (mode 'model', independent towers). Or "
    "restart this process, with `keras.callbacks.BackupAndRestore` in `fit` to continue from the "
    "last backup."
)


class Connection:
    """A connection of TensorFlow's runtime to workers, which reach this process at `local`.

    A worker is lost after `timeout` seconds of silence.

    Attributes:
        devices: the names of all workers' devices.
        chosen: the GPUs of each worker, or its CPU devices if it has none.

    Raises:
        ClusterError: if the machines can't connect to each other.
    """

    def __init__(
        self, workers: Sequence[Address], local: Address, statuses: Sequence[Status], timeout: float
    ):
        self.workers = tuple(workers)
        self.local = local
        self.timeout = timeout
        own = [
            [f"{worker.name}/{device}" for device in status.devices]
            for worker, status in zip(workers, statuses)
        ]
        gpus = [[name for name in names if "/gpu:" in name] for names in own]
        self.devices = tuple(name for names in own for name in names)
        self.chosen = tuple(name for some, names in zip(gpus, own) for name in some or names)
        self._watchdog = Watchdog(workers, timeout)
        self._collector = Collector()
        self._guards: list[Guard] = []
        for worker, status in zip(workers, statuses):
            self._guards.append(Guard(worker, status, timeout, self._watchdog, self._guards))
        try:
            self._open()
        except BaseException as error:
            fault = self._lost() if isinstance(error, tf.errors.OpError) else None
            self.close()
            if not isinstance(error, tf.errors.OpError):
                raise
            raise (fault or self._no_way_back()) from error

    def close(self) -> None:
        """Disconnects the workers, answering or not; later computations don't wait for them."""
        links = [guard.link for guard in self._guards if guard.link is not None]
        for link in links:
            link.stopped.set()
        until = time.monotonic() + 0.1 * self.timeout
        for link in links:
            link.stop(until)
        if runtime.has_started():
            runtime.update({})
        for guard in self._guards:
            guard.stop()
        self._collector.stop()
        self._watchdog.stop()

    def fault(self, error: tf.errors.OpError | None = None) -> ClusterError | None:
        """The error for a lost worker, if there is one; `error` is TensorFlow's."""
        lost = self._lost()
        if lost is None and isinstance(error, tf.errors.UnavailableError):
            named = [short_name(one).partition("/")[0] for one in _DEVICE.findall(error.message)]
            host = named[0] if named else ", ".join(one.name for one in self.workers)
            return ClusterError(host, "The connection to the worker was interrupted.", _CURE)
        return lost

    def _lost(self) -> ClusterError | None:
        """Asks all workers; returns the error for the first one that is lost."""
        with ThreadPoolExecutor(len(self._guards)) as pool:
            found = list(pool.map(Guard.check, self._guards))
        for guard, lost in zip(self._guards, found):
            if lost is not None:
                return ClusterError(guard.worker.name, lost, _CURE)
        return None

    def _open(self) -> None:
        if not runtime.has_started():
            # Without workers: TensorFlow holds Python's lock meanwhile, and one may freeze.
            runtime.start(self.local)
            close_to_others(self.local.ip, self.local.port, "workers", stacklevel=6)
        self._add_workers()
        for worker in self.workers:
            self._watchdog.hand_over(worker)
        # TensorFlow sends every new function to all workers, so all that are needed are made now.
        processors = [full_name(f"{worker.name}/cpu:0") for worker in self.workers]
        with self._limited():
            here = _round_trip([full_name("cpu:0")])
            round_trips = [
                _round_trip([one for one in processors if one != target] + [target])
                for target in processors
            ]
        for guard, round_trip in zip(self._guards, round_trips):
            pause = self.timeout / 10
            guard.link = Link(guard.worker, self.local.port, pause, round_trip, here)

    def _add_workers(self) -> None:
        tasks = {task_of(one.name): one.numeric for one in self.workers}
        until = time.monotonic() + self.timeout
        while True:
            try:
                return runtime.update(tasks)
            except tf.errors.UnavailableError:
                # TensorFlow delays new connections to workers that were restarted.
                if time.monotonic() > until or any(guard.lost for guard in self._guards):
                    raise
            runtime.update({})
            time.sleep(0.2)

    def _no_way_back(self) -> ClusterError:
        return ClusterError(
            self.local.name,
            "The workers answer, but within half of `timeout` one of them did not reach this "
            "process at this address, or another worker at the address given to `connect`.",
            "Give `local` an address and a port of this machine that are open to the workers, and "
            "let each worker reach the others at the addresses given to `connect`. If the network "
            "is slow, give a longer `timeout`.",
        )

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        """Scope that ends the connections to all workers if it takes too long."""

        def end() -> None:
            for worker in self.workers:
                end_connections(worker.ip, worker.port)

        timer = threading.Timer(0.5 * self.timeout, end)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _round_trip(devices: Sequence[str]) -> Callable[[], Any]:
    """Sends numbers from here and from devices to the last device, and from there back here.

    Returns a function that does it again.
    """

    @tf.function(autograph=False)
    def exchange(value: tf.Tensor) -> tf.Tensor:
        sent = [value]
        for device in devices[:-1]:
            with tf.device(device):
                sent.append(value + 1.0)
        with tf.device(devices[-1]):
            received = tf.add_n(sent) + 1.0
        with tf.device(full_name("cpu:0")):
            return received + 1.0

    zero = tf.constant(0.0)
    again = functools.partial(exchange.get_concrete_function(zero), zero)
    again()
    return again
