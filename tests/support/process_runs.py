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


def _environment():
    paths = [str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "KERAS_BACKEND": keras.backend.backend(),
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


class Run:
    """Processes of a scenario, each with its output: those of some `numbers`, of `count`."""

    def __init__(self, scenario, folder, numbers, address=None, count=2, path=SCRIPT):
        self.address = address or f"127.0.0.1:{free_port()}"
        self.processes = {
            number: subprocess.Popen(
                [sys.executable, path, scenario, folder, str(count), str(number), self.address],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=_environment(),
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


def run_to_end(path, folder, counts, *arguments):
    """Runs a script, as `path FOLDER COUNTS NUMBER ADDRESS ARGUMENT...`, once for each count."""
    address, numbers = f"127.0.0.1:{free_port()}", range(len(counts.split(",")))
    # In files: a process that waits for its output to be read would hold up the others.
    with contextlib.ExitStack() as files:
        outputs = [files.enter_context((folder / f"output{k}").open("w+")) for k in numbers]
        processes = [
            subprocess.Popen(
                [sys.executable, path, folder, counts, str(number), address, *arguments],
                stdout=outputs[number],
                stderr=subprocess.STDOUT,
                env=_environment(),
            )
            for number in numbers
        ]
        try:
            for process, output in zip(processes, outputs):
                status = process.wait(timeout=LIMIT)
                output.seek(0)
                assert status == 0, output.read()
        finally:
            for process in processes:
                process.kill()
