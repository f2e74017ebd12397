"""Attacks on processes that have joined each other, from outside."""

import collections
import contextlib
import pathlib
import re
import signal
import subprocess
import tempfile
import threading
import time

import h5py
from support.cluster_attacks.network import Proxy, send_garbage
from support.cluster_attacks.table import Clock, repeat
from support.worker_processes import Process, free_port


class Joined(Process):
    """A process that joins others and trains; it says what it comes to.

    Args:
        address: the coordinator's.
        number: its number, of 2.
        folder: for its files.
        *options: of `on_jax_process`.
    """

    def __init__(self, address, number, folder, *options):
        super().__init__(
            *("-m", "support.cluster_attacks.on_jax_process", address, str(number), folder),
            *options,
            KERAS_BACKEND="jax",
        )

    def outcome(self):
        """How the process has ended, in words."""
        code, text = self.wait()
        found = re.findall(r"(?:ends with|second fit:) .*$", text, re.MULTILINE)
        if code < 0:
            found.append(f"JAX ends it by {signal.Signals(-code).name}")
        return ", ".join(found) or f"exit status {code}: {text[-300:]}"


class Arena:
    """A port at which pairs of processes meet, one pair after the other, and their files."""

    def __init__(self, folder, gigabytes):
        self.folder, self.port, self.gigabytes = folder, free_port(), gigabytes
        self.address = f"127.0.0.1:{self.port}"
        self.pair = []

    @contextlib.contextmanager
    def running(self, *options, addresses=None, until="batch 9"):
        """A pair of processes in the midst of `fit`."""
        addresses = addresses or [self.address] * 2
        start = pathlib.Path(self.folder) / "start"
        options = (f"--wait-for={start}", *options)
        self.pair = [Joined(addresses[k], k, self.folder, *options) for k in (0, 1)]
        try:
            for process in self.pair:
                process.read_until("ready")  # both have imported what takes long
            start.touch()
            for process in self.pair:
                process.read_until(until)
            start.unlink()
            yield self.pair
        finally:
            for process in self.pair:
                process.end()

    def outcomes(self, clock, *numbers):
        """What processes have come to, and after how many seconds the last of them."""
        told = collections.OrderedDict((k, self.pair[k].outcome()) for k in numbers)
        return "; ".join(f"{k} {text}" for k, text in told.items()), clock()

    def check(self):
        """Looks at the files: the next pair shows that nothing else is left behind."""
        for path in pathlib.Path(self.folder).glob("*"):
            if ".part." in path.name:  # the process was killed while it wrote
                path.unlink()
            elif path.suffix != ".h5":
                return f"left behind: {path.name}"
            else:
                with h5py.File(path) as file:
                    if "layers" not in file:
                        return f"{path.name} is broken"
        return ""

    # Attacks.

    def killed(self, victim=1):
        with self.running():
            clock = Clock()
            self.pair[victim].send(signal.SIGKILL)
            return self.outcomes(clock, 1 - victim)

    def first_killed(self):
        return self.killed(0)

    def stopped(self):
        with self.running():
            clock = Clock()
            self.pair[1].send(signal.SIGSTOP)
            self.pair[0].read_until("ends with")
            first = clock()
            self.pair[1].send(signal.SIGCONT)
            return self.outcomes(clock, 0, 1)[0], first

    def stopped_for_a_second(self):
        with self.running("--seconds=5"):
            self.pair[1].send(signal.SIGSTOP)
            time.sleep(1)
            self.pair[1].send(signal.SIGCONT)
            return self.outcomes(lambda: 0.0, 0, 1)

    def garbage(self):
        with self.running("--seconds=5"):
            for port in _listening([process.process.pid for process in self.pair]):
                threading.Thread(target=send_garbage, args=(port, 2), daemon=True).start()
            return self.outcomes(lambda: 0.0, 0, 1)

    def two_clients(self):
        with self.running():
            clock = Clock()
            others = [Joined(self.address, k, self.folder) for k in (0, 1)]
            told = [other.outcome() for other in others]
            seconds = clock()
            time.sleep(3)
            goes_on = all(one.process.poll() is None for one in self.pair)
            return (
                f"the others: {told}; the first training {'goes on' if goes_on else 'ends'}",
                seconds,
            )

    def restarted(self):
        with self.running():
            go = pathlib.Path(self.folder) / "go"
            other = Joined(self.address, 1, self.folder, f"--wait-for={go}")
            other.read_until("ready")  # has imported all that takes long
            clock = Clock()
            self.pair[1].end()
            go.touch()
            result = self.outcomes(clock, 0)
            told = other.outcome()
            go.unlink()
            return f"{result[0]}; the new one {told}", result[1]

    def interrupted(self):
        with self.running("--again"):
            clock = Clock()
            self.pair[0].send(signal.SIGINT)
            return self.outcomes(clock, 0, 1)

    def both_interrupted(self):
        with self.running("--again"):
            clock = Clock()
            for process in self.pair:
                process.send(signal.SIGINT)
            return self.outcomes(clock, 0, 1)

    def slow_link(self):
        proxy = Proxy(self.port, delay=0.05, rate=1e6)
        try:
            with self.running("--seconds=5", addresses=[self.address, proxy.address]):
                return self.outcomes(lambda: 0.0, 0, 1)
        finally:
            proxy.close()

    def named(self):
        with self.running("--seconds=1", addresses=[f"localhost:{self.port}"] * 2):
            return self.outcomes(lambda: 0.0, 0, 1)

    def ipv6(self):
        with self.running("--seconds=1", addresses=[f"[::1]:{self.port}"] * 2):
            return self.outcomes(lambda: 0.0, 0, 1)

    def port_taken(self):
        with self.running("--seconds=40"):
            clock = Clock()
            return Joined(self.address, 0, self.folder).outcome(), clock()

    def large(self):
        clock = Clock()
        large = f"--gigabytes={self.gigabytes}"  # on each of four devices
        with self.running(large, until="batch 1"):
            return self.outcomes(clock, 0, 1)


def _listening(pids):
    """The ports on which processes listen."""
    text = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    lines = [line for line in text.splitlines() if any(f"pid={pid}," in line for pid in pids)]
    return sorted({int(line.split()[3].rpartition(":")[2]) for line in lines})


def attack_all(times, only=(), gigabytes=None):
    """Attacks in all ways, so many times; returns the rows of the table."""
    attacks = (
        "killed", "first_killed", "stopped", "stopped_for_a_second", "garbage", "restarted",
        "interrupted", "both_interrupted", "slow_link", "named", "ipv6", "port_taken",
        "two_clients", "large",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena(folder, gigabytes or 0.5)
        return [
            repeat(name, 1 if name == "large" else times, getattr(arena, name), arena.check)
            for name in attacks
            if not only or name in only
        ]
