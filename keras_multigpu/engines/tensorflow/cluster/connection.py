"""Opens, tests, watches and closes one connection to workers."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.errors import ClusterError
from keras_multigpu.engines.remote import Address
from keras_multigpu.engines.tensorflow.cluster import runtime
from keras_multigpu.engines.tensorflow.cluster.health import Guard, Status, Watchdog
from keras_multigpu.engines.tensorflow.cluster.link import Link
from keras_multigpu.engines.tensorflow.cluster.sockets import end_connections, listen_only_at
from keras_multigpu.engines.tensorflow.names import REMOTE_JOB, full_name, short_name, task_of

_DEVICE = re.compile(rf"/job:{REMOTE_JOB}/replica:0/task:\d+/device:\w+:\d+")
_CURE = (
    "Start it again if it has ended. Then either call `connect` with the workers that are there, "
    "and make the model parallel again by `make_parallel(parallel.template, devices=...)`: its "
    "weights are those of the last step that was finished, except those that the lost worker alone "
    "held (in mode 'model' and of independent towers). Or start this process again, with "
    "`keras.callbacks.BackupAndRestore` in `fit` to go on from its last backup."
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
        self,
        workers: Sequence[Address],
        local: Address,
        statuses: Sequence[Status],
        timeout: float,
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
        self._guards = [
            Guard(
                worker,
                status,
                timeout,
                functools.partial(self._watchdog.hand_over, number, worker),
                Link(worker, local.port, self._compute_here),
            )
            for number, (worker, status) in enumerate(zip(workers, statuses))
        ]
        for guard in self._guards:
            guard.others = [one for one in self._guards if one is not guard]
        try:
            self._open()
            for guard, round_trip in zip(self._guards, self._round_trips):
                guard.link.start(round_trip, timeout / 10)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Disconnects the workers, answering or not; later computations don't wait for them."""
        for guard in self._guards:
            guard.link.stop(0.1 * self.timeout)
        if runtime.has_started():
            runtime.update({})
        for guard in self._guards:
            guard.stop()
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
        tasks = {task_of(one.name): one.numeric for one in self.workers}
        try:
            if runtime.has_started():
                runtime.update(tasks)
            else:
                runtime.start(tasks, self.local)
                _close_to_others(self.local)
            for guard in self._guards:
                guard.hand_over()
            with self._limited():
                _try_links([full_name(name) for name in self.devices])
            with self._limited():
                self._prepare_round_trips()
        except tf.errors.OpError as error:
            raise (self._lost() or self._no_way_back()) from error

    def _prepare_round_trips(self) -> None:
        """Makes the functions that `Link` calls, and calls each once.

        TensorFlow sends every new function to all workers, so none is made later.
        """
        processors = [full_name(f"{worker.name}/cpu:0") for worker in self.workers]
        zero = tf.constant(0.0)
        self._round_trips = []
        for target in processors:
            others = [device for device in processors if device != target]
            made = _round_trip(target, others).get_concrete_function(zero)
            self._round_trips.append(functools.partial(made, zero))
        self._here = functools.partial(
            _round_trip(full_name("cpu:0"), []).get_concrete_function(zero), zero
        )
        for call in (*self._round_trips, self._here):
            call()

    def _compute_here(self) -> None:
        self._here()

    def _no_way_back(self) -> ClusterError:
        return ClusterError(
            self.local.name,
            "The workers answer, but within half of `timeout` one of them does not reach this "
            "process at this address, or does not reach another worker at the one given here.",
            "Give `local` an address and a port of this machine that are open to the workers, "
            "and have each worker reach the others by the addresses given here. If the network is "
            "slow, give a longer `timeout`.",
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


def _try_links(devices: Sequence[str]) -> None:
    """Sends a tensor from this process to every device, and between all pairs of devices."""

    @tf.function(autograph=False)
    def exchange(value: tf.Tensor) -> tf.Tensor:
        sent, received = [], []
        for device in devices:
            with tf.device(device):
                sent.append(value + 1.0)
        for device in devices:
            with tf.device(device):
                received.append(tf.add_n(sent))
        with tf.device(full_name("cpu:0")):
            return tf.add_n(received)

    value = tf.constant(0.0)
    # A concrete function, because TensorFlow warns about functions that are traced repeatedly.
    exchange.get_concrete_function(value)(value)


def _round_trip(target: str, others: Sequence[str]) -> Any:
    """A function that sends numbers from here and other workers to `target`, and back here."""

    @tf.function(autograph=False)
    def exchange(value: tf.Tensor) -> tf.Tensor:
        sent = [value]
        for device in others:
            with tf.device(device):
                sent.append(value + 1.0)
        with tf.device(target):
            received = tf.add_n(sent) + 1.0
        with tf.device(full_name("cpu:0")):
            return received + 1.0

    return exchange


def _close_to_others(local: Address) -> None:
    """Closes the port at which workers reach this process, except at the address `local`."""
    try:
        listen_only_at(local.ip, local.port)
    except OSError as error:
        warnings.warn(
            f"TensorFlow listens on the port {local.port} of all addresses of this machine, and "
            f"this system can't close it to others ({error}): whoever reaches the port can "
            "run computations in this process. Have a firewall close it to all but the workers.",
            stacklevel=6,
        )
