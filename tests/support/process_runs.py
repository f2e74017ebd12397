"""Runs scenarios of `process_script.py`, or of another script, in several processes."""

import contextlib
import os
import pathlib
import subprocess
import sys
import threading
from concurrent import futures

import keras
from support import process_script as script
from support.worker_processes import free_port

SCRIPT = pathlib.Path(script.__file__)
LIMIT = 900  # far more than any of it takes: nothing hangs


class Run:
    """Processes of a scenario, each with its output: those of some `numbers`, of `count`."""

    def __init__(self, scenario, folder, numbers, address=None, count=2, path=SCRIPT):
        self.address = address or f"127.0.0.1:{free_port()}"
        environment = {
            **os.environ,
            "KERAS_BACKEND": keras.backend.backend(),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(
                [str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")]
            ),
        }
        self.processes = {
            number: subprocess.Popen(
                [sys.executable, path, scenario, folder, str(count), str(number), self.address],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
            for number in numbers
        }

    def await_line(self, number, text):
        for line in self.processes[number].stdout:
            if line.startswith(text):
                return
        raise AssertionError(f"no line {text!r}")

    def end(self, *numbers):
        """The exit status and what was printed, by process, once they have ended."""

        def end(number):
            output, _ = self.processes[number].communicate(timeout=LIMIT)
            return number, (self.processes[number].returncode, output)

        # At the same time: one that waits for its output to be read would hold up the others.
        with futures.ThreadPoolExecutor() as threads:
            return dict(threads.map(end, numbers or self.processes))


@contextlib.contextmanager
def running(scenario, folder, numbers=(0, 1), address=None, count=2, path=SCRIPT):
    run = Run(scenario, folder, numbers, address, count, path)
    watch = threading.Timer(LIMIT, lambda: [p.kill() for p in run.processes.values()])
    watch.start()
    try:
        yield run
    finally:
        watch.cancel()
        for process in run.processes.values():
            process.kill()
            process.communicate()
