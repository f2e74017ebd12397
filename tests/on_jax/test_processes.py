"""Several processes that train one model together, and what one sees of another's fate."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import process_script as script
import pytest

from keras_multigpu import make_parallel
from keras_multigpu.cluster import ClusterError, join

SCRIPT = pathlib.Path(script.__file__)
LIMIT = 120  # far more than any of it takes: nothing hangs


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Run:
    """Processes of a scenario, each with its output."""

    def __init__(self, scenario, folder, numbers=(0, 1)):
        port, self.outputs = free_port(), {}
        environment = {**os.environ, "KERAS_BACKEND": "jax", "PYTHONUNBUFFERED": "1"}
        self.processes = {
            number: subprocess.Popen(
                [sys.executable, SCRIPT, scenario, folder, "2", str(number), str(port)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
            for number in numbers
        }
        self.address = f"127.0.0.1:{port}"

    def await_line(self, number, text):
        for line in self.processes[number].stdout:
            if line.startswith(text):
                return
        raise AssertionError(f"no line {text!r}")

    def end(self, *numbers):
        """The exit status and what was printed, by process, once they have ended."""
        found = {}
        for number in numbers or self.processes:
            output, _ = self.processes[number].communicate(timeout=LIMIT)
            found[number] = (self.processes[number].returncode, output)
        return found


@contextlib.contextmanager
def running(scenario, folder, numbers=(0, 1)):
    run = Run(scenario, folder, numbers)
    watch = threading.Timer(LIMIT, lambda: [p.kill() for p in run.processes.values()])
    watch.start()
    try:
        yield run
    finally:
        watch.cancel()
        for process in run.processes.values():
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """What two processes with two devices each found, and what they printed."""
    folder = tmp_path_factory.mktemp("together")
    with running("train_together", folder) as run:
        ended = run.end()
    for number in (0, 1):
        assert (folder / f"found{number}.npz").exists(), ended[number][1]
    return [dict(np.load(folder / f"found{number}.npz")) for number in (0, 1)], ended, folder


@pytest.fixture(scope="module")
def alone():
    """What one device finds."""
    script.keras.utils.set_random_seed(7)
    return script.train(script.build())


def test_two_processes_compute_what_one_device_does(together, alone):
    founds, _, _ = together
    for found in founds:
        assert {key for key in found if key in alone} == set(alone)
        for key, value in alone.items():
            np.testing.assert_allclose(found[key], value, rtol=2e-5, atol=2e-5, err_msg=key)
    for key in alone:
        np.testing.assert_array_equal(founds[0][key], founds[1][key], err_msg=key)


def test_devices_are_numbered_through_all_processes(together):
    for found in together[0]:
        assert list(found["devices"]) == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
        assert list(found["loaded devices"]) == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


def test_one_process_writes_files_that_all_read(together):
    founds, _, folder = together
    assert not list(folder.glob("*.tmp"))
    for found in founds:
        np.testing.assert_array_equal(found["loaded predicted"], founds[0]["loaded predicted"])
        np.testing.assert_allclose(
            found["template predicted"], found["loaded predicted"], rtol=1e-5, atol=1e-6
        )
    model = script.build()
    model.load_weights(folder / "saved.weights.h5")
    again = model.predict(script.data()[0][:37], batch_size=32, verbose=0)
    np.testing.assert_allclose(again, founds[0]["loaded predicted"], rtol=1e-5, atol=1e-6)
    assert (folder / "latest.weights.h5").stat().st_size > 0


def test_a_backup_is_restored_in_all_processes(together):
    founds, _, _ = together
    np.testing.assert_array_equal(founds[0]["weight backed up"], founds[1]["weight backed up"])


def test_what_does_not_go_over_processes_is_refused(together):
    for number, found in enumerate(together[0]):
        for mode in ("tower", "model"):
            text = str(found[f"refusal {mode} None"])
            assert "Of the modes only 'data' goes over several processes" in text
            assert f"Received: mode='{mode}'" in text
        if number:
            text = str(found["refusal data 2"])
            assert "one device at least of every process" in text
            assert "none of which is of process 1. This is process 1" in text


def test_other_data_are_noticed(together):
    for status, output in together[1].values():
        assert status == 3, output
        assert "(process 1, pid " in output
        assert "Its batch at step 1 differs from that of process 0. Give the same data" in output


@pytest.mark.parametrize(
    ("scenario", "problem"),
    [
        ("other_model", "Its model differs from that of process 0"),
        ("other_weights", "Its weights at step 0 differs from that of process 0. Build the model"),
        ("other_length", "It has ended a loop after 3 steps, and others after 2. Give the same"),
        ("other_version", "It has JAX 0.0.1, and process 0 on "),
        ("other_count", "It has num_processes 3, and process 0 on "),
    ],
)
def test_processes_that_do_something_else(scenario, problem, tmp_path):
    with running(scenario, tmp_path) as run:
        for number, (status, output) in run.end().items():
            assert status == 3, output
            if scenario != "other_length" or not number:
                assert problem in output
            assert "(process 1, pid " in output or scenario == "other_length"


def test_an_error_in_one_process_ends_the_others(tmp_path):
    with running("full_disk", tmp_path) as run:
        ended = run.end()
    assert "OSError: [Errno 28] No space left on device" in ended[0][1]
    status, output = ended[1]
    assert status == 3, output
    assert "(process 0, pid " in output
    assert "It has stopped with OSError: [Errno 28] No space left on device. Start" in output


@pytest.mark.parametrize(
    ("victim", "sent"), [(1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP)]
)
def test_a_lost_process_is_named(victim, sent, tmp_path):
    with running("train_long", tmp_path) as run:
        run.await_line(1 - victim, "batch")
        run.processes[victim].send_signal(sent)
        (ended,) = run.end(1 - victim).values()
    status, output = ended
    assert status == 3, output
    assert f"(process {victim}, pid {run.processes[victim].pid})" in output
    assert "It has given no sign of life for" in output
    assert "See to that host. Start the script again in all processes" in output


def test_without_the_first_process_jax_ends_the_others(tmp_path):
    with running("train_long", tmp_path) as run:
        run.await_line(1, "batch")
        run.processes[0].kill()
        begun = time.monotonic()
        status, output = run.end(1)[1]
    assert status in (3, -signal.SIGABRT), output
    assert "(process 0, pid" in output or "JAX distributed service" in output
    assert time.monotonic() - begun < script.TIMEOUT + 60


@pytest.mark.parametrize("number", [0, 1])
def test_absent_processes(number, tmp_path):
    with running("absent", tmp_path, [number]) as run:
        status, output = run.end()[number]
    assert status == 3, output
    assert f"{run.address}: The processes did not come together there in time" in output
    reason = "Connection refused" if number else "of 2 processes one or more are absent"
    assert reason in output
    assert "Start all processes with the same `coordinator`" in output


def test_a_port_of_something_else(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        from keras_multigpu.cluster.addresses import find_address
        from keras_multigpu.engines.jax import processes

        with pytest.raises(ClusterError, match="Process 0 can't listen there .Address already in"):
            processes._check_port(find_address("coordinator", address))


def test_joining_too_late():
    make_parallel(script.build()).predict(np.ones((1, 6)), verbose=0)
    with pytest.raises(RuntimeError, match="`join` must come once in a process, .* process_id=0"):
        join("127.0.0.1:2345", 1, 0)
