"""What goes wrong on other machines is told in time, and by name. Run by `test_cluster.py`."""

import ctypes
import http.server
import os
import pathlib
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
from support.cluster_attacks.network import Proxy
from support.parity import difference
from support.worker_processes import SECONDS, Process, Worker, free_port

from keras_multigpu import cluster, make_parallel
from keras_multigpu.engines.tensorflow.cluster import connection, remote, runtime, sockets, watchdog
from keras_multigpu.engines.tensorflow.cluster import workers as greeting

SILENCE = 3.0  # the shortest time that can be asked for
LAUNCHERS = pathlib.Path(__file__).parents[4] / "docs" / "launchers"


@pytest.fixture(scope="module", autouse=True)
def steady(workers):
    """A worker that nothing happens to."""
    return workers[2]


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


def test_a_worker_is_frozen(workers, data, tmp_path):
    """In mid-epoch. Everything says so; the process goes on by itself, and with both again."""
    frozen, steady = workers[1:]
    both = [steady.address, frozen.address]
    parallel = make_parallel(_model(), devices=cluster.connect(both, timeout=SILENCE))
    stages = make_parallel(_model(), devices=parallel.devices, mode="model")
    for model in (parallel, stages):
        model.compile("adam", "mse")
        model.train_on_batch(*data)
    begin = time.monotonic()
    try:
        error = _fit_until(parallel, data, frozen.freeze)
        assert time.monotonic() - begin < 10 * SILENCE  # far more than it takes: it ends
        assert error.host == frozen.address
        assert "The worker does not answer: it has ended, is frozen, or is cut off" in str(error)
        assert "Start it again" in error.cure
        assert "BackupAndRestore" in error.cure
        _model().predict(data[0], verbose=0)  # a new function: nobody waits for the lost one
        with pytest.raises(cluster.ClusterError, match="is not connected"):
            parallel.evaluate(*data, verbose=0)
        _check_what_has_weights_there(stages, tmp_path)
        parallel.save_weights(tmp_path / "trained.weights.h5")  # its weights are here
        with pytest.raises(cluster.ClusterError, match="or a worker that is frozen"):
            cluster.connect(both, timeout=SILENCE)
    finally:
        frozen.send(signal.SIGCONT)
    cluster.connect(both, timeout=SILENCE)
    before = parallel.get_weights()
    parallel.fit(*data, verbose=0)  # it goes on: all its devices are there
    assert difference(parallel.get_weights(), before) > 0


def _check_what_has_weights_there(stages, tmp_path):
    """All that reads or writes the weights on a lost worker names it, and breaks no file."""
    path = tmp_path / "lost.weights.h5"
    path.write_bytes(b"before")
    for call in (
        stages.get_weights,
        lambda: stages.save_weights(path),
        lambda: stages.save(tmp_path / "lost.keras"),
    ):
        with pytest.raises(
            cluster.ClusterError, match="The worker stored the weight '.*was disconnected"
        ):
            call()
    assert path.read_bytes() == b"before"
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


@pytest.mark.slow
def test_a_worker_is_killed(steady, data):
    """In mid-epoch. The process goes on with the worker that is left, and with both again."""
    worker = Worker()
    try:
        both = [steady.address, worker.ready().address]
        parallel = make_parallel(_model(), devices=cluster.connect(both, timeout=SILENCE))
        parallel.compile("adam", "mse")
        error = _fit_until(parallel, data, lambda: worker.send(signal.SIGKILL))
        assert error.host == worker.address
        remaining = cluster.connect(both[:1], timeout=SILENCE)
        again = make_parallel(parallel.template, devices=remaining)
        assert difference(again.get_weights(), parallel.get_weights()) == 0
        again.compile("adam", "mse")
        again.fit(*data, verbose=0)
        worker.end()
        worker = Worker(port=worker.port).ready()
        cluster.connect(both, timeout=SILENCE)
        before = parallel.get_weights()
        parallel.fit(*data, verbose=0)  # it goes on: all its devices are there
        assert difference(parallel.get_weights(), before) > 0
        predict = parallel.function(lambda x: parallel(x, training=False))
        assert predict(data[0]).shape[0] == len(data[0])
        worker.send(signal.SIGKILL)
        with pytest.raises(cluster.ClusterError, match="does not answer"):
            predict(data[0])  # outside of `fit`
    finally:
        worker.end()


def test_a_connection_goes_silent(steady, data):
    """A firewall drops the one that carries tensors; those of the health checks go on.

    The kernel notices that its packets are not acknowledged.
    """
    proxy = Proxy(steady.port)
    try:
        devices = cluster.connect([proxy.address], timeout=SILENCE)
        parallel = make_parallel(_model(), devices=devices)
        parallel.compile("sgd", "mse")
        error = _fit_until(parallel, data, proxy.silence)
        assert error.host == proxy.address
        assert error.problem == "The connection to the worker was interrupted."
    finally:
        cluster.disconnect()
        proxy.close()


@pytest.mark.slow
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
        worker.send(signal.SIGCONT)
        # Longer than it takes to start again.
        parallel = make_parallel(_model(), devices=cluster.connect(both, timeout=60))
        parallel.compile("sgd", "mse")
        worker.end()
        worker = Worker(port=worker.port).ready()
        with pytest.raises(cluster.ClusterError, match="was restarted after `connect`"):
            parallel.fit(*data, verbose=0)
    finally:
        worker.end()


def test_a_worker_that_freezes_while_python_waits():
    """TensorFlow tells it a new function, and holds Python's lock: no thread can run."""
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # takes connections, says nothing
        port = frozen.getsockname()[1]
        watching = watchdog.Watchdog([f"127.0.0.1:{port}"], SILENCE)
        try:
            with socket.create_connection(("127.0.0.1", port)) as one:
                watching.hand_over(0, [one.fileno()])
                waiting = ctypes.PyDLL(None).recv  # keeps the lock
                assert waiting(one.fileno(), ctypes.create_string_buffer(1), 1, 0) == 0
            assert watching.lost() == {0}
        finally:
            watching.stop()


def test_a_worker_that_freezes_when_it_has_answered(steady, monkeypatch):
    """Between the first contact and TensorFlow's connection."""
    worker = Worker().ready()
    cluster.disconnect()
    greet = remote.greet

    def greet_and_freeze(*arguments):
        statuses = greet(*arguments)
        worker.freeze()
        return statuses

    try:
        monkeypatch.setattr(remote, "greet", greet_and_freeze)
        begun = time.monotonic()
        with pytest.raises(cluster.ClusterError, match="does not answer") as caught:
            cluster.connect([steady.address, worker.address], timeout=SILENCE)
        assert caught.value.host == worker.address
        assert time.monotonic() - begun < 10 * SILENCE  # it takes 2: far more
        monkeypatch.undo()
        assert cluster.connect([steady.address], timeout=SILENCE) == (f"{steady.address}/cpu:0",)
    finally:
        worker.end()


@pytest.mark.slow
def test_a_worker_that_freezes_at_the_first_connection():
    """TensorFlow would hold Python's lock until it has connected."""
    code = """
import os, signal, sys
from keras_multigpu import cluster
from keras_multigpu.engines.tensorflow.cluster import remote

greet = remote.greet

def greet_and_freeze(*arguments):
    statuses = greet(*arguments)
    os.kill(int(sys.argv[2]), signal.SIGSTOP)
    print("frozen")
    return statuses

remote.greet = greet_and_freeze
cluster.connect([sys.argv[1]], timeout=3)
"""
    worker = Worker().ready()
    process = Process("-c", code, worker.address, str(worker.process.pid))
    try:
        process.read_until("frozen")
        begun = time.monotonic()
        code, text = process.wait()
        assert time.monotonic() - begun < 10 * SILENCE
        assert code == 1
        assert f"ClusterError: {worker.address}: The worker does not answer" in text
    finally:
        worker.end()
        process.end()


def test_workers_that_do_not_reach_this_process(steady, monkeypatch):
    """As behind a firewall: what is sent back to this process does not arrive."""
    cluster.disconnect()

    def fail(devices):
        assert len(devices) == 1
        raise tf.errors.UnavailableError(None, None, "no way")

    monkeypatch.setattr(connection, "_round_trip", fail)
    with pytest.raises(cluster.ClusterError, match="one of them did not reach this") as e:
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
        cluster.ClusterError, match="Nobody listens there.*Start the worker with"
    ) as e:
        cluster.connect([address], timeout=SILENCE)
    assert e.value.host == address
    assert time.monotonic() - begin < SECONDS
    with pytest.raises(cluster.ClusterError, match="knows no address of 'no.such.host'") as e:
        cluster.connect(["no.such.host:2222"])
    assert e.value.host == "no.such.host:2222"


def test_a_machine_that_is_off(monkeypatch):
    def fail(*arguments):
        raise TimeoutError("timed out")

    monkeypatch.setattr(greeting.socket, "create_connection", fail)
    worker = connection.Address("gpu7:2222", "10.0.0.7", 2222)
    problem, cure = greeting._why_silent(worker, 1.0)
    assert problem == "The machine can't be reached (10.0.0.7:2222: timed out)."
    assert "the firewalls on the way" in cure


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
        taken = connection.Address(address, "127.0.0.1", server.server_port)
        with pytest.raises(
            cluster.ClusterError, match="can't listen there .Address already in use"
        ):
            runtime.start_server(taken, 1)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(SECONDS)


def test_a_system_without_filters(monkeypatch):
    """Where a port can't be closed to others, nothing else is claimed."""
    monkeypatch.setattr(sockets.sys, "platform", "darwin")
    with pytest.warns(UserWarning, match="port 2220 of all .*darwin has .*but the workers"):
        sockets.close_to_others("127.0.0.1", 2220, "workers", stacklevel=1)


@pytest.mark.slow
def test_a_worker_on_a_system_without_filters():
    """It refuses to serve at one address only."""
    code = """
import sys
import threading
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
    there = connection.Address("192.0.2.77:2222", "192.0.2.77", 2222)
    with pytest.raises(cluster.ClusterError, match="can't listen there .Cannot assign") as error:
        runtime.start_server(there, 1)
    assert error.value.host == there.name


@pytest.mark.slow
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
        assert "Install the same version on all machines" in e.value.cure
    finally:
        worker.end()


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_port_of_a_worker_is_wrong():
    wrong = "`bind` must have the form 'HOST:PORT'"
    with pytest.raises(ValueError, match=wrong):
        cluster.serve("127.0.0.1:0")
    code, text = Process("-m", "keras_multigpu", "serve", "--bind=127.0.0.1:65536").wait()
    assert code == 1
    assert wrong in text
