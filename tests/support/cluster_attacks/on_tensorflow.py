"""Attacks on workers and on the process that drives them, which is this one."""

import os
import pathlib
import signal
import sys
import tempfile
import threading
import time

import h5py
import keras
import numpy as np
from support.cluster_attacks.network import Proxy, send_garbage
from support.cluster_attacks.table import Clock, repeat
from support.worker_processes import Process, Worker, free_port

from keras_multigpu import cluster, list_devices, make_parallel
from keras_multigpu.engines.tensorflow.cluster import remote

TIMEOUT = 3.0
ROWS = np.random.default_rng(7).normal(size=(64, 6)).astype("float32")
TARGETS = ROWS[:, :2] * 2


def build(units=8):
    """A small model with the same weights each time."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units), keras.layers.Dense(2)])
    model.compile("sgd", "mse")  # its only state are the weights
    return model


def train(model, epochs=2, **options):
    """Trains, always in the same way."""
    settings = {"batch_size": 8, "shuffle": False, "verbose": 0, **options}
    return model.fit(ROWS, TARGETS, epochs=epochs, **settings)


class Act(keras.callbacks.Callback):
    """Does something after ten batches, and ends the training some seconds later."""

    def __init__(self, action, seconds):
        super().__init__()
        self.batches, self.action, self.seconds, self.clock = 0, action, seconds, None

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches == 10:
            self.clock = Clock()
            self.action()
        if self.clock is not None and self.clock() > self.seconds:
            self.model.stop_training = True


class Arena:
    """Two workers, and a model on both whose weights each epoch writes to a file."""

    def __init__(self, folder, gigabytes):
        self.gigabytes = gigabytes
        self.local = f"127.0.0.1:{free_port()}"
        self.workers = [Worker(), Worker()]
        self.file = pathlib.Path(folder) / "each.weights.h5"
        for worker in self.workers:
            worker.ready()
        self.connect()
        self.start = self.model.get_weights()
        alone = build()
        train(alone)
        self.expected = alone.get_weights()

    def connect(self, addresses=None, timeout=TIMEOUT):
        """Connects to workers, and makes the model on them."""
        addresses = addresses or [worker.address for worker in self.workers]
        devices = cluster.connect(addresses, timeout=timeout, local=self.local)
        self.model = make_parallel(build(), devices=devices)
        self.model.compile("sgd", "mse")

    def restart(self):
        """Kills the second worker, and starts it again at the same port."""
        self.workers[1].end()
        self.workers[1] = Worker(port=self.workers[1].port).ready()

    def attack(self, action, seconds=2.0):
        """Attacks during `fit`; the outcome, and the seconds until `fit` was over."""
        act = Act(action, seconds)
        writer = keras.callbacks.ModelCheckpoint(self.file, save_weights_only=True)
        try:
            train(self.model, 10**6, callbacks=[act, writer])
            return "training went on", 0.0
        except (cluster.ClusterError, KeyboardInterrupt) as error:
            named = getattr(error, "problem", "")
            return f"{type(error).__name__} {named}".strip(), act.clock()

    def check(self):
        """Tries the workers and the file: what is wrong, or nothing."""
        cluster.connect([worker.address for worker in self.workers], timeout=TIMEOUT)
        if any(name not in list_devices() for name in self.model.devices):
            self.connect()
        self.model.set_weights(self.start)
        train(self.model)
        for found, expected in zip(self.model.get_weights(), self.expected):
            if not np.allclose(found, expected, atol=2e-5):
                return "other weights"
        if self.file.exists():
            with h5py.File(self.file) as file:
                if "layers" not in file:
                    return "the file is broken"
            build().load_weights(self.file)
        left = [path.name for path in self.file.parent.iterdir() if path != self.file]
        return f"left behind: {left}" if left else ""

    # Attacks.

    def killed(self):
        result = self.attack(lambda: self.workers[1].send(signal.SIGKILL), 60)
        self.restart()
        return result

    def stopped(self):
        result = self.attack(lambda: self.workers[1].send(signal.SIGSTOP), 60)
        self.workers[1].send(signal.SIGCONT)
        return result

    def stopped_at_connect(self):
        greet, clock = remote.greet, Clock()

        def greet_and_stop(*arguments):
            statuses = greet(*arguments)
            self.workers[1].send(signal.SIGSTOP)
            clock.begun = time.monotonic()
            return statuses

        cluster.disconnect()
        remote.greet = greet_and_stop
        try:
            self.connect()
            return "connected", clock()
        except cluster.ClusterError as error:
            return f"ClusterError {error.problem}", clock()
        finally:
            remote.greet = greet
            self.workers[1].send(signal.SIGCONT)

    def stopped_for_a_second(self):
        def stop():
            self.workers[1].send(signal.SIGSTOP)
            threading.Timer(1.0, lambda: self.workers[1].send(signal.SIGCONT)).start()

        return self.attack(stop, 3)

    def garbage(self):
        ports = [self.workers[0].port, int(self.local.rpartition(":")[2])]
        threads = [threading.Thread(target=send_garbage, args=(port, 2)) for port in ports]
        return self.attack(lambda: [thread.start() for thread in threads], 3)

    def restarted(self):
        train(self.model)
        self.restart()
        clock = Clock()
        try:
            train(self.model)
        except cluster.ClusterError as error:
            return f"ClusterError {error.problem}", clock()
        return "training went on", clock()

    def interrupted(self):
        result = self.attack(lambda: os.kill(os.getpid(), signal.SIGINT), 60)
        train(self.model)  # the same model goes on
        return result

    def slow_link(self):
        proxy = Proxy(self.workers[0].port, delay=0.05, rate=1e6)
        try:
            self.connect([proxy.address, self.workers[1].address], timeout=3 * TIMEOUT)
            result = self.attack(lambda: None, 3)
            cluster.disconnect()
        finally:
            proxy.close()
        return result

    def silent_link(self):
        proxy = Proxy(self.workers[0].port)
        try:
            self.connect([proxy.address, self.workers[1].address], timeout=3 * TIMEOUT)
            return self.attack(proxy.silence, 60)
        finally:
            proxy.close()

    def named(self):
        clock = Clock()
        try:
            cluster.connect(["no-such-host.invalid:2222"])
        except cluster.ClusterError as error:
            told = error.problem.partition("(")[0].strip()
        seconds = clock()
        self.connect([f"localhost:{worker.port}" for worker in self.workers])
        train(self.model)
        return f"trains; ClusterError {told}", seconds

    def ipv6(self):
        worker = Worker(host="[::1]").ready()
        clock = Clock()
        try:
            self.connect([worker.address])
            train(self.model)
        finally:
            cluster.disconnect()
            worker.end()
        return "trains", clock()

    def port_taken(self):
        clock = Clock()
        code, text = Worker(port=self.workers[0].port).wait()
        told = "can't listen there (Address already in use)" in text
        return f"exit status {code}, {'says that it is taken' if told else text[-300:]}", clock()

    def two_clients(self):
        addresses = [worker.address for worker in self.workers]
        other = Process("-m", __spec__.name, *addresses)
        other.read_until("connected")
        for _ in range(10):
            train(self.model, 5)
        code, _ = other.wait()
        return f"both trained ten times, exit status {code}", 0.0

    def large(self):
        units = int((self.gigabytes * 2**28) ** 0.5)
        keras.utils.set_random_seed(3)
        kernel = keras.layers.Dense(units, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((units,)), kernel])
        parallel = make_parallel(model, devices=self.model.devices[:1])
        parallel.compile(keras.optimizers.SGD(0.5), "mse")
        clock, x = Clock(), np.ones((2, units), "float32")
        for _ in range(2):
            loss = parallel.train_on_batch(x, x)
        return f"trains {self.gigabytes:g} GB, loss falls: {loss < 1}", clock()


def attack_all(times, only=(), gigabytes=None):
    """Attacks in all ways, so many times; returns the rows of the table."""
    attacks = (
        "interrupted", "stopped", "stopped_at_connect", "stopped_for_a_second", "garbage", "named",
        "ipv6", "slow_link", "silent_link", "killed", "restarted", "port_taken", "two_clients",
        "large",
    )  # fmt: skip
    once = ("two_clients", "large")  # `two_clients` trains ten times
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena(folder, gigabytes or 1.0)
        try:
            return [
                repeat(name, 1 if name in once else times, getattr(arena, name), arena.check)
                for name in attacks
                if not only or name in only
            ]
        finally:
            cluster.disconnect()
            for worker in arena.workers:
                worker.end()


def second_client(addresses):
    """Trains ten times on workers that another process uses."""
    devices = cluster.connect(addresses, timeout=60)  # before TensorFlow starts
    parallel = make_parallel(build(), devices=devices)
    parallel.compile("sgd", "mse")
    print("connected", flush=True)
    for _ in range(10):
        train(parallel, 5)


if __name__ == "__main__":
    second_client(sys.argv[1:])
