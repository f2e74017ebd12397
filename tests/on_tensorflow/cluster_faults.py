"""What goes wrong on other machines is told in time, and by name. Run by `test_cluster.py`."""

import ctypes
import http.server
import os
import pathlib
import pickle
import signal
import socket
import sys
import threading
import time

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import difference
from worker_processes import SECONDS, Process, Worker, free_port

from keras_multigpu import cluster, make_parallel
from keras_multigpu.engines.tensorflow.cluster import connection, greeting, health, sockets

SILENCE = 3.0  # the shortest time that can be asked for
LAUNCHERS = pathlib.Path(__file__).parents[2] / "docs" / "launchers"


@pytest.fixture(scope="module", autouse=True)
def steady():
    """A worker that nothing happens to."""
    worker = Worker()
    try:
        cluster.connect([worker.ready().address])  # before TensorFlow starts
        yield worker
    finally:
        cluster.disconnect()
        worker.end()


def _model():
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(2)])


@pytest.fixture
def data(rng):
    return rng.normal(size=(64, 6)).astype("float32"), rng.normal(size=(64, 2))


class _After(keras.callbacks.Callback):
    """Does something after some batches."""

    def __init__(self, batches, action):
        super().__init__()
        self.left = batches
        self.action = action

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            self.action()


def _fit_until(parallel, data, action):
    """Trains until something happens; gives the error."""
    fit = {"batch_size": 8, "epochs": 10**6, "shuffle": False, "verbose": 0}
    with pytest.raises(cluster.ClusterError) as caught:
        parallel.fit(*data, callbacks=[_After(10, action)], **fit)
    return caught.value


@pytest.mark.parametrize("end", ["killed", "frozen"])
def test_a_worker_is_lost(steady, data, end):
    """In mid-epoch. The process goes on: by itself, with the worker that is left, with both."""
    worker = Worker()
    try:
        both = [steady.address, worker.ready().address]
        parallel = make_parallel(_model(), devices=cluster.connect(both, timeout=SILENCE))
        parallel.compile("adam", "mse")
        happened = []

        def lose():
            happened.append(time.monotonic())
            worker.send(signal.SIGKILL if end == "killed" else signal.SIGSTOP)

        error = _fit_until(parallel, data, lose)
        assert error.host == worker.address
        assert "The worker does not answer: it has ended, is frozen, or is cut off" in str(error)
        assert "Start it again" in error.cure
        assert "BackupAndRestore" in error.cure
        _model().predict(data[0], verbose=0)  # a new function: nobody waits for the lost one
        with pytest.raises(cluster.ClusterError, match="is not connected"):
            parallel.evaluate(*data, verbose=0)
        remaining = cluster.connect(both[:1], timeout=SILENCE)
        again = make_parallel(parallel.template, devices=remaining)
        assert difference(again.get_weights(), parallel.get_weights()) == 0
        again.compile("adam", "mse")
        again.fit(*data, verbose=0)
        if end == "frozen":
            with pytest.raises(cluster.ClusterError, match="or a worker that is frozen"):
                cluster.connect(both, timeout=SILENCE)
            worker.send(signal.SIGCONT)
        else:
            worker.end()
            worker = Worker(port=worker.port).ready()
        cluster.connect(both, timeout=SILENCE)
        before = parallel.get_weights()
        parallel.fit(*data, verbose=0)  # it goes on: all its devices are there
        assert difference(parallel.get_weights(), before) > 0
    finally:
        worker.end()


def test_lost_between_two_calls(steady, data):
    """A worker that was frozen, and one that was started again, while nothing was computed."""
    worker = Worker().ready()
    both = [steady.address, worker.address]
    try:
        parallel = make_parallel(_model(), devices=cluster.connect(both, timeout=SILENCE))
        parallel.compile("sgd", "mse")
        parallel.fit(*data, verbose=0)
        worker.freeze()
        with pytest.raises(cluster.ClusterError, match="does not answer") as caught:
            parallel.fit(*data, verbose=0)
        assert caught.value.host == worker.address
        worker.end()
        worker = Worker(port=worker.port).ready()
        # Longer than it takes to start again.
        parallel = make_parallel(_model(), devices=cluster.connect(both, timeout=60))
        parallel.compile("sgd", "mse")
        worker.end()
        worker = Worker(port=worker.port).ready()
        with pytest.raises(cluster.ClusterError, match="was started again since `connect`"):
            parallel.fit(*data, verbose=0)
    finally:
        worker.end()


def test_a_worker_that_freezes_while_python_waits():
    """TensorFlow tells it a new function, and holds Python's lock: no thread can run."""
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # takes connections, says nothing
        port = frozen.getsockname()[1]
        worker = connection.Address(f"127.0.0.1:{port}", "127.0.0.1", port)
        watchdog = health.Watchdog([worker], SILENCE)
        try:
            with socket.create_connection(("127.0.0.1", port)) as one:
                watchdog.hand_over(0, worker)
                waiting = ctypes.PyDLL(None).recv  # keeps the lock
                assert waiting(one.fileno(), ctypes.create_string_buffer(1), 1, 0) == 0
        finally:
            watchdog.stop()


def test_workers_that_do_not_reach_this_process(steady, monkeypatch):
    """As behind a firewall: what is sent back to this process does not arrive."""
    cluster.disconnect()

    def fail(devices):
        assert len(devices) == 1
        raise tf.errors.UnavailableError(None, None, "no way")

    monkeypatch.setattr(connection, "_try_links", fail)
    with pytest.raises(cluster.ClusterError, match="one of them does not reach this process") as e:
        cluster.connect([steady.address], timeout=SILENCE)
    assert "Give `local` an address and a port of this machine" in e.value.cure
    monkeypatch.undo()
    assert cluster.connect([steady.address], timeout=SILENCE) == (f"{steady.address}/cpu:0",)


def test_errors_of_ones_own(steady, data):
    """An error that has nothing to do with the workers stays what it is."""
    devices = cluster.connect([steady.address], timeout=SILENCE)
    inputs = keras.Input((1,), dtype="int32")
    outputs = keras.layers.Dense(2)(keras.layers.Embedding(4, 3)(inputs))
    parallel = make_parallel(keras.Model(inputs, outputs), devices=devices)
    with pytest.raises(Exception, match="indices") as caught:
        parallel.predict(np.full((3, 1), 9), verbose=0)
    assert not isinstance(caught.value, cluster.ClusterError)
    parallel.predict(np.full((3, 1), 1), verbose=0)  # and the connection is there


def test_nobody_answers():
    address = f"127.0.0.1:{free_port()}"
    begin = time.monotonic()
    with pytest.raises(
        cluster.ClusterError, match="Nobody listens there.*Start the worker by"
    ) as e:
        cluster.connect([address], timeout=SILENCE)
    assert e.value.host == address
    assert time.monotonic() - begin < SECONDS
    with pytest.raises(cluster.ClusterError, match="'no.such.host' is not known here") as e:
        cluster.connect(["no.such.host:2222"])
    assert e.value.host == "no.such.host:2222"


def test_a_machine_that_is_off(monkeypatch):
    def fail(*arguments):
        raise TimeoutError("timed out")

    monkeypatch.setattr(greeting.socket, "create_connection", fail)
    worker = connection.Address("gpu7:2222", "10.0.0.7", 2222)
    problem, cure = greeting._why_silent(worker, 1.0)
    assert problem == "The machine can't be reached (10.0.0.7:2222: timed out)."
    assert "no firewall is between" in cure


def test_something_else_answers(steady):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        address = f"127.0.0.1:{server.server_port}"
        with pytest.raises(cluster.ClusterError, match="Something listens there, but does") as e:
            cluster.connect([steady.address, address], timeout=SILENCE)
        assert e.value.host == address
        # And it has a port that a worker wants.
        code, text = Worker(port=server.server_port).wait()
        assert code == 1
        assert f"127.0.0.1:{server.server_port}: Another process of this machine has" in text
    finally:
        server.shutdown()
        server.server_close()
        thread.join(SECONDS)


def test_a_system_without_filters(monkeypatch):
    """Where a port can't be closed to others, nothing else is claimed."""
    monkeypatch.setattr(sockets.sys, "platform", "darwin")
    address = connection.Address("127.0.0.1:2220", "127.0.0.1", 2220)
    with pytest.warns(UserWarning, match="2220 of all addresses of this machine, and .*darwin has"):
        connection._close_to_others(address)
    code = """
import sys
from keras_multigpu import cluster
sys.platform = "darwin"
cluster.serve(sys.argv[1])
"""
    process = Process("-c", code, f"127.0.0.1:{free_port()}")
    try:
        assert process.wait()[0] == 1
        assert "TensorFlow's server listens on all addresses of a machine, and" in process.text
        assert "darwin has no filters for sockets that listen" in process.text
        assert "bind to '0.0.0.0:" in process.text
    finally:
        process.end()


def test_an_address_of_another_machine():
    code, text = Worker(host="192.0.2.77").wait()
    assert code == 1
    assert "192.0.2.77:" in text
    assert "It is no address of this machine" in text


def test_another_version(steady):
    """A worker that tells another version than it has."""
    port = free_port()
    code = f"""
import tensorflow as tf
tf.__version__ = "2.99.1"
from keras_multigpu import cluster
cluster.serve("127.0.0.1:{port}")
"""
    worker = Process("-c", code)
    try:
        worker.read_until("Ctrl-C ends it.")
        with pytest.raises(cluster.ClusterError, match="has TensorFlow 2.99.1, and this") as e:
            cluster.connect([steady.address, f"127.0.0.1:{port}"], timeout=SILENCE)
        assert e.value.host == f"127.0.0.1:{port}"
        assert "Install one version on all machines" in e.value.cure
    finally:
        worker.end()


@pytest.mark.parametrize("workers", [[], "127.0.0.1:2222", None, {"127.0.0.1:2222"}])
def test_no_list(workers):
    with pytest.raises(ValueError, match="must be a list of addresses.*Received: workers="):
        cluster.connect(workers)


@pytest.mark.parametrize("worker", ["gpu7", "gpu7:0", "gpu7:70000", ":2222", "[::1]:2222", 2222])
def test_no_address(worker):
    with pytest.raises(ValueError, match="`workers` must have the form 'HOST:PORT'") as error:
        cluster.connect([worker])
    assert f"Received: {worker!r}" in str(error.value)


def test_wrong_arguments():
    for timeout in (0, 2.9, "30", True, None):
        with pytest.raises(ValueError, match="`timeout` must be a number of seconds, 3 or more"):
            cluster.connect(["127.0.0.1:2222"], timeout=timeout)
    with pytest.raises(ValueError, match="each address once.*'localhost:2222' and '127.0.0.1:22"):
        cluster.connect(["localhost:2222", "127.0.0.1:2222"])
    with pytest.raises(ValueError, match="`local` must have the form"):
        cluster.connect(["127.0.0.1:2222"], local="2222")
    for count in (0, 1.5, True):
        with pytest.raises(ValueError, match="`virtual_devices` must be a positive integer"):
            cluster.serve(virtual_devices=count)
    with pytest.raises(ValueError, match="`bind` must have the form 'HOST:PORT'"):
        cluster.serve("2222")


def test_the_error_is_pickled():
    error = pickle.loads(pickle.dumps(cluster.ClusterError("a:1", "It is lost.", "Find it.")))
    assert (str(error), error.host) == ("a:1: It is lost. Find it.", "a:1")


def _programs(folder):
    """Stands for SSH and Slurm: what they would run on other machines runs here."""
    texts = {
        "ssh": 'while [[ $1 != 127.0.0.1 ]]; do shift; done; shift; exec "$@" 2>/dev/null',
        "scontrol": '[[ "$*" == "show hostnames nodes" ]] && echo 127.0.0.1',
        "srun": 'while [[ $1 == -* ]]; do shift; done; SLURMD_NODENAME=127.0.0.1 exec "$@"',
    }
    for name, text in texts.items():
        path = folder / name
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": sys.executable}


def test_training_goes_on_in_a_new_process(steady, tmp_path):
    """The launchers, undisturbed, interrupted by the end of a worker, and by their own."""
    (tmp_path / "programs").mkdir()
    programs = _programs(tmp_path / "programs")
    trained = tmp_path / "trained.weights.h5"
    common = [f"--weights={trained}", "--epochs=8", "--timeout=3"]
    backup = [f"--backup={tmp_path / 'disturbed'}", *common]
    slurm = {"SLURM_JOB_NODELIST": "nodes", "SLURM_SUBMIT_DIR": str(LAUNCHERS)}
    train = (str(LAUNCHERS / "tensorflow_train.py"), "--workers", steady.address)

    worker = Worker().ready()
    process = Process(
        str(LAUNCHERS / "tensorflow_ssh.sh"),
        *("127.0.0.1", "--", f"--backup={tmp_path / 'undisturbed'}", *common, "--timeout=60"),
        program="bash",
        PORT=str(free_port()),
        **programs,
    )
    try:
        assert process.wait()[0] == 0, process.text
        undisturbed = _arrays(trained)
        trained.unlink()
        process = Process(*train, worker.address, *backup)
        process.read_until("Epoch 3/8")
        worker.send(signal.SIGKILL)
        code, text = process.wait()
        assert code == 1
        assert f"ClusterError: {worker.address}: The worker does not answer" in text
        process = Process(*train, *backup)
        process.read_until("Epoch 5/8")
        assert "Epoch 1/8" not in process.text
        process.end()
        assert not trained.exists()
        # The worker of a driver that was killed serves the next one.
        parallel = make_parallel(_model(), devices=cluster.connect([steady.address]))
        parallel.predict(np.ones((3, 6)), verbose=0)
        process = Process(
            str(LAUNCHERS / "tensorflow_slurm.sh"),
            *(*backup, "--timeout=60"),
            program="bash",
            SLURM_JOB_ID=str(free_port() % 10_000),
            **slurm,
            **programs,
        )
        assert process.wait()[0] == 0, process.text
        assert "Epoch 3/8" not in process.text
    finally:
        worker.end()
        process.end()
    assert difference(_arrays(trained), undisturbed) < 2e-5


def _arrays(path):
    """All that is in a file of weights: they, and the optimizer's state."""
    found = {}
    with h5py.File(path) as file:
        file.visititems(
            lambda name, one: found.update({name: one[()]}) if hasattr(one, "dtype") else None
        )
    assert len(found) > 10
    return found
