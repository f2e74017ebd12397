"""Workers for the tests of clusters: processes on this machine, which never outlive a test."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import time

TESTS = str(pathlib.Path(__file__).parents[1])
SECONDS = 120  # more than any of them should take: against hanging


# Below the ports that systems give to outgoing connections, which could take one before its test
# does; each of pytest's workers has a thousand of its own.
_PORTS = itertools.cycle(range(1_000))


def free_port():
    """A port of this machine that nobody uses."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw9")
    first = 10_000 + 1_000 * (int(worker.removeprefix("gw")) % 10)
    for number in itertools.islice(_PORTS, 1_000):
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", first + number))
            return first + number
    raise AssertionError("no port is free")


class Process:
    """A process, and what it starts; its output is read as it comes.

    Args:
        *arguments: those of the program.
        program: the program, Python unless told otherwise.
        **environment: variables of its environment.
    """

    def __init__(self, *arguments, program=sys.executable, **environment):
        settings = {
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        self.process = subprocess.Popen(
            [program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=TESTS,  # in the checkout it would not import the installed package
            env={**os.environ, **settings, **environment},
            start_new_session=True,
        )
        self.text = ""

    def read_until(self, words):
        """Reads what the process prints until it has printed some words."""
        end = time.monotonic() + SECONDS
        while words not in self.text:
            ready, _, _ = select.select([self.process.stdout], [], [], end - time.monotonic())
            assert ready, f"{words!r} did not come:\n{self.text}"
            more = os.read(self.process.stdout.fileno(), 65536).decode()
            assert more, f"ended before {words!r}:\n{self.text}"
            self.text += more
        return self.text

    def wait(self):
        """The exit status of the process, and all that it printed."""
        try:
            self.text += self.process.communicate(timeout=SECONDS)[0].decode()
        except subprocess.TimeoutExpired:
            self.end()
            raise
        return self.process.returncode, self.text

    def send(self, number):
        """Sends a signal to the process."""
        self.process.send_signal(number)

    def end(self):
        """Ends the process and what it has started, whatever state they are in."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(SECONDS)
        self.process.stdout.close()


class Worker(Process):
    """A process that serves its devices.

    Args:
        *options: those of `python -m keras_multigpu serve`.
        port: its port; `None` for a free one.
        host: the address to bind to.
    """

    def __init__(self, *options, port=None, host="127.0.0.1"):
        self.port = port or free_port()
        self.address = f"{'127.0.0.1' if host == '0.0.0.0' else host}:{self.port}"
        bind = f"--bind={host}:{self.port}"
        super().__init__("-m", "keras_multigpu", "serve", bind, *options)

    def ready(self):
        """Waits until it serves."""
        self.read_until("Ctrl-C ends it.")
        return self

    def freeze(self):
        """Stops it, as a machine that hangs."""
        self.send(signal.SIGSTOP)
