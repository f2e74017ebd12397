"""Training on devices of other processes, driven by this one. Run by `test_cluster.py`."""

import socket

import keras
import pytest
import tensorflow as tf
from keras import layers
from support.parity import difference, variables
from support.worker_processes import Process, Worker

from keras_multigpu import cluster, engines, list_devices, make_parallel, reports
from keras_multigpu.layers import MultiHotDense


@pytest.fixture(scope="module", autouse=True)
def _connected_before_tensorflow_starts(workers):
    """Even if the first test needs no worker."""


def _connect(workers, **options):
    return cluster.connect([worker.address for worker in workers], **options)


def _model(normalize=True):
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((6,))
    x = layers.Dense(16, activation="tanh", kernel_regularizer="l2")(x)
    # A bias has no gradient but rounding before it is normalized away, and Adam makes that large.
    x = layers.Dense(16, use_bias=not normalize)(x)
    x = layers.BatchNormalization()(x) if normalize else x
    return keras.Model(inputs, layers.Dense(2)(x))


def _rows(rng, rows=70):
    return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 2))


def _train(model, data, **options):
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"], **options)
    return model.fit(*data, batch_size=32, epochs=2, shuffle=False, verbose=0).history


@pytest.mark.parametrize(
    ("count", "normalize"),
    [
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.slow),
        (3, True),
    ],
)
def test_weights_of_one_device(workers, rng, count, normalize):
    """70 rows in batches of 32: the last batch has 6 rows."""
    devices = _connect(workers[3 - count :])
    data = _rows(rng)
    parallel = make_parallel(_model(normalize), devices=devices)
    alone = _model(normalize)
    assert difference(_train(parallel, data), _train(alone, data)) < 2e-5
    assert difference(variables(parallel), variables(alone)) < 2e-5


@pytest.mark.slow
def test_the_ways_of_a_model(workers, rng, tmp_path):
    """Several steps in one call, datasets, predictions, single batches, files."""
    devices = _connect(workers[:2])
    x, y = _rows(rng)
    parallel, alone = make_parallel(_model(), devices=devices), make_parallel(_model(), 3)
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(32).prefetch(1)
    for model in (parallel, alone):
        model.compile("adam", "mse", steps_per_execution=2)
        model.fit(rows, epochs=2, shuffle=False, verbose=0)
        model.train_on_batch(x[:5], y[:5])
    assert difference(variables(parallel), variables(alone)) < 2e-5
    assert difference(parallel.predict(x, verbose=0), alone.predict(x, verbose=0)) < 2e-5
    assert difference(parallel.predict_on_batch(x), alone.predict_on_batch(x)) < 2e-5
    assert difference(parallel.evaluate(x, y, verbose=0), alone.evaluate(x, y, verbose=0)) < 2e-5
    assert difference(parallel.test_on_batch(x, y), alone.test_on_batch(x, y)) < 2e-5
    parallel.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.devices == ("cpu:0", "cpu:1", "cpu:2")
    assert difference(variables(loaded), variables(parallel)) == 0
    parallel.save_weights(tmp_path / "model.weights.h5")
    alone.load_weights(tmp_path / "model.weights.h5")
    assert difference(variables(alone), variables(parallel)) == 0


@pytest.mark.slow
def test_towers(workers, rng):
    devices = _connect(workers[:2])
    data = _rows(rng)
    parallel = make_parallel(_model(), devices=devices, mode="tower", replicas="independent")
    alone = make_parallel(_model(), 3, mode="tower", replicas="independent")
    assert difference(_train(parallel, data), _train(alone, data)) < 2e-5
    assert difference(variables(parallel), variables(alone)) < 2e-5
    assert difference(parallel.disagreement(data[0]), alone.disagreement(data[0])) < 2e-5


@pytest.mark.parametrize("mode", ["data", pytest.param("tower", marks=pytest.mark.slow)])
def test_each_row_of_a_gradient_comes_once(workers, rng, mode):
    """Adam would take the squares of the parts that the machines send."""
    devices = _connect(workers[:2])
    x, y = rng.integers(20, size=(70, 4)), rng.normal(size=(70, 2))
    inputs = keras.Input((4,), dtype="int32")
    template = keras.Model(inputs, MultiHotDense(2, 20, sparse_gradient=True)(inputs))
    alone = keras.models.clone_model(template)
    alone.set_weights(template.get_weights())
    parallel = make_parallel(template, devices=devices, mode=mode)
    _train(parallel, (x, y))
    _train(alone, (x, y))
    assert difference(variables(parallel), variables(alone)) < 2e-5


def test_model_mode(workers, rng):
    devices = _connect(workers[:2])
    data = _rows(rng)
    parallel = make_parallel(_model(), devices=devices, mode="model")
    assert set(parallel.placement.values()) > {0}
    alone = _model()
    assert difference(_train(parallel, data), _train(alone, data)) < 2e-5
    assert difference(variables(parallel), variables(alone)) < 2e-5


def test_transfers(workers, rng):
    """Devices are told by their names: none is taken for another machine's."""
    devices = _connect(workers[:2])
    parallel = make_parallel(_model(), devices=devices)
    parallel.compile("sgd", "mse")
    report = reports.transfers(parallel, _rows(rng, 12))
    ends = {(one.source, one.target) for one in report.training if one.kind == "weights"}
    assert {target for _, target in ends} == set(devices)
    assert {source for source, _ in ends} <= {"cpu:0", *devices}


def test_a_weight_crosses_to_a_host_once(workers, rng):
    """The first worker has two devices; the sum of their gradients comes back."""
    devices = _connect(workers[:1])
    model = _model(normalize=False)
    parallel = make_parallel(model, devices=devices)
    parallel.compile("sgd", "mse")
    report = reports.transfers(parallel, _rows(rng, 12))
    size = 4 * model.count_params()
    assert report.bytes("training")["weights"] == 2 * size
    between = report.between_hosts("training")
    assert between["weights"] == size
    assert between["gradients"] == size
    assert report.between_hosts("prediction")["weights"] == size
    assert "of it cross between hosts, inputs among them." in str(report)


def test_names(workers):
    first, second, _ = workers
    devices = _connect(workers[:2])
    names = (f"{first.address}/cpu:0", f"{first.address}/cpu:1", f"{second.address}/cpu:0")
    assert devices == names
    assert list_devices() == ("cpu:0", "cpu:1", "cpu:2", "cpu:3", *names)
    parallel = make_parallel(_model(), devices=devices[1:])
    assert parallel.devices == names[1:]
    lines = []
    parallel.summary(print_fn=lambda line, **_: lines.append(line))
    assert f"'data' on {names[1]}, {names[2]}" in "".join(lines)
    # Without names, this process's own: the workers are asked for.
    assert make_parallel(_model()).devices == list_devices()[:4]
    assert engines.current().describe_device(names[0]) == "CPU"
    with pytest.raises(ValueError, match=r"or of machines that it is connected to: cpu:0.*:0"):
        make_parallel(_model(), devices=[f"{first.address}/gpu:0"])


@pytest.mark.slow
def test_connected_twice(workers, rng):
    data = _rows(rng, 12)
    devices = _connect(workers[:2])
    parallel = make_parallel(_model(), devices=devices)
    _train(parallel, data)
    assert _connect(workers[:2]) == devices
    parallel.fit(*data, verbose=0)  # traced before, and still there


def test_another_list(workers, rng):
    """What is on this machine goes on, and so do models on machines that are still there."""
    data = _rows(rng)
    alone, local = _model(), _model()
    for model in (alone, local):
        model.compile("adam", "mse")
    fit = {"batch_size": 32, "shuffle": False, "verbose": 0}
    alone.fit(*data, epochs=3, **fit)
    reference = _train(make_parallel(_model(), 2), data)
    devices = _connect(workers)
    for chosen in (workers[:2], workers[1:]):
        local.fit(*data, **fit)
        devices = _connect(chosen)
    local.fit(*data, **fit)
    assert difference(variables(local), variables(alone)) == 0
    parallel = make_parallel(_model(), devices=devices)
    assert difference(_train(parallel, data), reference) < 2e-5
    cluster.disconnect()
    assert list_devices() == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
    with pytest.raises(cluster.ClusterError, match="not connected. Call `connect`") as error:
        parallel.fit(*data, **fit)
    assert error.value.host == workers[1].address
    cluster.disconnect()  # once more: nothing to do
    local.fit(*data, **fit)


def test_a_port_of_ones_own(workers, local):
    """Where a tunnel ends: it stays, and is closed to others."""
    _connect(workers[:2], local=local)
    _connect(workers[1:], local=local)
    port = int(local.rpartition(":")[2])
    assert _reaches("127.0.0.1", port)
    assert not _reaches("127.0.0.2", port)
    with pytest.raises(ValueError, match=f"it is '{local}'. Received: local='127.0.0.1:1'"):
        _connect(workers[1:], local="127.0.0.1:1")


def _reaches(ip, port):
    try:
        socket.create_connection((ip, port), timeout=0.5).close()
    except OSError:
        return False
    return True


def test_who_reaches_a_worker(workers):
    """127.0.0.2 is another address of this machine."""
    closed, open_, _ = workers
    assert "Only processes of this machine reach it" in closed.text
    assert _reaches("127.0.0.1", closed.port)
    assert not _reaches("127.0.0.2", closed.port)
    assert "any address of this machine can use it. TensorFlow's server asks for no" in open_.text
    assert "use a private network, or a firewall" in open_.text
    assert _reaches("127.0.0.2", open_.port)


_TRAIN = """
import sys
import keras, numpy as np
from keras_multigpu import cluster, make_parallel
from keras_multigpu.engines.tensorflow.cluster.remote import REMOTE

devices = cluster.connect(sys.argv[1:])
parallel = make_parallel(keras.Sequential([keras.layers.Dense(1)]), devices=devices)
parallel.compile("sgd", "mse")
parallel.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
print("trained at", REMOTE._local.name)
"""


def test_ipv6(rng):
    """A worker at an IPv6 address, which nothing reaches at another one."""
    worker = Worker(host="[::1]").ready()
    process = Process("-c", _TRAIN, worker.address)
    try:
        code, text = process.wait()
        assert code == 0, text
        assert "trained at [::1]:" in text  # where the worker reaches that process
        devices = cluster.connect([f"[::1]:{worker.port}"])
        assert devices == (f"[::1]:{worker.port}/cpu:0",)
        assert _reaches("::1", worker.port)
        assert not _reaches("127.0.0.1", worker.port)
        data = _rows(rng)
        parallel, alone = make_parallel(_model(), devices=devices), _model()
        assert difference(_train(parallel, data), _train(alone, data)) < 2e-5
    finally:
        cluster.disconnect()
        process.end()
        worker.end()
