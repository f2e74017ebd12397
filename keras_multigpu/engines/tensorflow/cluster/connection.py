"""Opens, tests, watches and closes one connection to workers."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Sequence

import tensorflow as tf

from keras_multigpu.engines.cluster.errors import ClusterError
from keras_multigpu.engines.cluster.remote import Address
from keras_multigpu.engines.tensorflow.cluster import runtime, sockets
from keras_multigpu.engines.tensorflow.cluster.watchdog import Watchdog
from keras_multigpu.engines.tensorflow.cluster.workers import Status, ask, of_all
from keras_multigpu.engines.tensorflow.names import REMOTE_JOB, full_name, short_name, task_of

_DEVICE = re.compile(rf"/job:{REMOTE_JOB}/replica:0/task:\d+/device:\w+:\d+")
_CURE = (
    "Start it again if it has ended. Then call `connect` with the workers that are there, and "
    "`make_parallel(parallel.template, devices=...)`: the weights are those of the last finished "
    "step, except weights that only the lost worker stored (mode 'model', independent towers). Or "
    "restart this process, with `keras.callbacks.BackupAndRestore` in `fit` to continue from the "
    "last backup."
)
_PATIENCE = 0.7  # of the timeout; the rest is for raising the error


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
        pairs = list(zip(workers, statuses))
        self.devices = tuple(f"{one.name}/{name}" for one, its in pairs for name in its.devices)
        self.chosen = tuple(f"{one.name}/{name}" for one, its in pairs for name in its.chosen)
        self._identities = {one: its.identity for one, its in pairs}
        self._watchdog = Watchdog([one.numeric for one in workers], _PATIENCE * timeout)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()
        try:
            self._open()
        except tf.errors.OpError as error:
            fault = self._lost() or self._no_way_back()
            self.close()
            raise fault from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Disconnects the workers, answering or not; later computations don't wait for them."""
        if runtime.has_started():
            runtime.update({})
        self._stopped.set()
        self._thread.join()
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
        known = [self.workers[number] for number in self._watchdog.lost()]
        answers = of_all(
            self.workers, lambda one: None if one in known else ask(one, _PATIENCE * self.timeout)
        )
        for worker, answer in zip(self.workers, answers):
            if answer is None:
                problem = "The worker does not answer: it has ended, is frozen, or is cut off."
                return ClusterError(worker.name, problem, _CURE)
            if answer.identity != self._identities[worker]:
                return ClusterError(worker.name, "The worker was restarted after `connect`.", _CURE)
        return None

    def _keep(self) -> None:
        """Hands new connections to the watchdog, again and again: TensorFlow reconnects."""
        while not self._stopped.wait(self.timeout / 10):
            self._hand_over()

    def _hand_over(self) -> None:
        for number, worker in enumerate(self.workers):
            with sockets.connections(to=(worker.ip, worker.port)) as found:
                self._watchdog.hand_over(number, [one.fileno() for one in found])
                sockets.limit_silence(found, _PATIENCE * self.timeout)
        with sockets.connections(at=self.local.port) as found:
            sockets.limit_silence(found, _PATIENCE * self.timeout)

    def _open(self) -> None:
        if not runtime.has_started():
            # Without workers: TensorFlow holds Python's lock meanwhile, and one may freeze.
            runtime.start(self.local)
            sockets.close_to_others(self.local.ip, self.local.port, "workers", stacklevel=6)
        self._add_workers()
        self._hand_over()
        processors = [full_name(f"{worker.name}/cpu:0") for worker in self.workers]
        with self._limited():
            for target in processors:
                _round_trip([one for one in processors if one != target] + [target])

    def _add_workers(self) -> None:
        tasks = {task_of(one.name): one.numeric for one in self.workers}
        until = time.monotonic() + self.timeout
        while True:
            try:
                return runtime.update(tasks)
            except tf.errors.UnavailableError:
                # TensorFlow delays new connections to workers that were restarted.
                if time.monotonic() > until or self._watchdog.lost():
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
                with sockets.connections(to=(worker.ip, worker.port)) as found:
                    sockets.end(found)

        timer = threading.Timer(0.5 * self.timeout, end)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _round_trip(devices: Sequence[str]) -> None:
    """Sends numbers from here and from devices to the last device, and from there back here."""

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

    exchange(tf.constant(0.0))
