"""What crosses between devices, counted without running on GPUs."""

import itertools
import re

import keras
import numpy as np
import pytest
from keras import layers
from support.parity import difference, variables
from support.pictures import hidden_texts

from keras_multigpu import make_parallel, reports
from keras_multigpu.engines import Transfer
from keras_multigpu.layers import MultiHotDense

BACKEND = keras.backend.backend()
ROWS = 24


def _mlp():
    return keras.Sequential(
        [keras.Input((16,)), layers.Dense(64, "relu", use_bias=False), layers.Dense(8)]
    )


_WEIGHTS = 4 * (16 * 64 + 64 * 8 + 8)
_OUTPUTS = 4 * ROWS * 8
_INPUTS = 4 * ROWS * 16


def _batch(rng):
    return rng.normal(size=(ROWS, 16)).astype("float32"), rng.normal(size=(ROWS, 8))


def _compiled(n, mode="data", **options):
    parallel = make_parallel(_mlp(), n, mode, **options)
    parallel.compile("adam", "mse", metrics=["mae"])
    return parallel


@pytest.fixture(scope="module")
def on_two():
    """What crosses between two devices in data mode."""
    return reports.transfers(_compiled(2), _batch(np.random.default_rng(7)))


@pytest.mark.parametrize("n", [2, 4])
def test_gradients_cross_once_in_data_mode(n, rng, on_two):
    report = on_two if n == 2 else reports.transfers(_compiled(n), _batch(rng))
    assert report.least == 2 * _WEIGHTS * (n - 1)
    sent, predicted = report.bytes("training"), report.bytes("prediction")
    away = (n - 1) / n
    if BACKEND == "jax":
        # XLA sums the gradients in rings, and the loss; there is nothing else to be sent.
        assert "weights" not in sent
        assert 0 <= sent["gradients"] - 2 * _WEIGHTS * (n - 1) < 100 * n
        assert sum(sent.values()) - sent["inputs"] - sent["gradients"] < 100 * n
        assert sent["inputs"] == 4 * ROWS * (16 + 8)
        assert predicted == {"inputs": _INPUTS}
    else:
        # Of outputs nothing crosses but sums of losses and metrics.
        assert sent["weights"] == _WEIGHTS * (n - 1)
        # A sum that is formed on another device than its variable's has one way more.
        relayed = sent["gradients"] - _WEIGHTS * (n - 1)
        assert relayed == 0 if n == 2 else 0 <= relayed < _WEIGHTS / 2
        assert sent["activations"] < 100 * n
        assert sent["inputs"] == (_INPUTS + 2 * _OUTPUTS) * away  # targets are of 8 bytes
        assert predicted == {
            "weights": _WEIGHTS * (n - 1),
            "inputs": _INPUTS * away,
            "activations": _OUTPUTS * away,
        }


_UNEVEN = [(2, 1), (3, 2), (4, 10)]  # each count and each case: fewer rows, more, and a rest


@pytest.mark.parametrize(
    ("n", "rows"),
    _UNEVEN
    + [
        pytest.param(n, rows, marks=pytest.mark.slow)
        for n in (2, 3, 4)
        for rows in (1, 2, 10, 12)
        if (n, rows) not in _UNEVEN
    ],
)
def test_batches_that_the_devices_do_not_divide(n, rows, rng):
    """On JAX each device computes the whole batch then: nothing crosses, and nothing has to."""
    batch = rng.normal(size=(rows, 16)).astype("float32"), rng.normal(size=(rows, 8))
    report = reports.transfers(_compiled(n), batch)
    is_whole = BACKEND == "jax" and rows % n > 0
    assert report.least == (0 if is_whole else 2 * _WEIGHTS * (n - 1))
    kinds = ("weights", "gradients", "activations")
    sent = sum(report.bytes("training").get(kind, 0) for kind in kinds)
    # With fewer rows than devices some devices have nothing to do, and get nothing.
    assert sent >= report.least or rows < n
    said = f"{n} devices don't divide {rows} row{'s' * (rows > 1)}: each computes" in str(report)
    assert said == is_whole


def test_no_device_carries_much_more_than_the_others(rng):
    """One weight is nearly all there is: it is cut."""
    model = keras.Sequential([keras.Input((64,)), layers.Dense(1024), layers.Dense(4)])
    parallel = make_parallel(model, 4)
    parallel.compile("sgd", "mse")
    report = reports.transfers(parallel, (np.ones((4, 64)), np.ones((4, 4))))
    even = 2 * 4 * model.count_params() * 3 / 4
    for name in parallel.devices:
        for ends in ({"source": name}, {"target": name}):
            sent = report.bytes("training", **ends)
            assert 0.99 * even < sent.get("weights", 0) + sent["gradients"] < 1.15 * even
    # Parts of weights are weights; some versions of JAX sum the loss apart.
    assert report.bytes("training", "cpu:1", "cpu:2").get("activations", 0) <= 8


def test_independent_towers_send_no_weights(rng):
    parallel = _compiled(2, "tower", replicas="independent")
    report = reports.transfers(parallel, _batch(rng))
    sent = report.bytes("training")
    assert report.least == 2 * _OUTPUTS
    assert "weights" not in sent
    if BACKEND == "tensorflow":
        assert sent["activations"] == sent["gradients"] == _OUTPUTS
        assert sent["inputs"] == _INPUTS
    else:
        # XLA gathers the outputs on all devices, where the loss is computed; no weight crosses.
        assert sent["activations"] + sent.get("gradients", 0) <= 4 * report.least
        assert not any("16,64]" in one.tensor for one in report.training)


def test_a_frozen_layers_gradient_does_not_cross(rng):
    model = _mlp()
    model.layers[0].trainable = False
    parallel = make_parallel(model, 2)
    parallel.compile("sgd", "mse")
    sent = reports.transfers(parallel, _batch(rng)).bytes("training")
    trained = 4 * (64 * 8 + 8)
    if BACKEND == "jax":
        assert 0 <= sent["gradients"] - 2 * trained < 200
    else:
        assert sent["gradients"] == trained


def test_what_crosses_of_a_multi_hot_layers_gradient(rng):
    width, units, ones = 5000, 4, 6

    def sent(sparse_gradient, jit_compile):
        inputs = keras.Input((ones,), dtype="int32")
        layer = MultiHotDense(units, width, use_bias=False, sparse_gradient=sparse_gradient)
        parallel = make_parallel(keras.Model(inputs, layer(inputs)), 2)
        parallel.compile("adam", "mse", jit_compile=jit_compile)
        return reports.transfers(parallel, batch)

    batch = rng.integers(width, size=(ROWS, ones)), rng.normal(size=(ROWS, units))
    if BACKEND == "jax":
        # Once, though it is added up column by column.
        whole = sent(False, jit_compile=True).bytes("training")["gradients"]
        assert 0 <= whole - 2 * 4 * width * units < 200
        return
    for sparse_gradient, jit_compile in ((False, True), (False, False), (True, False)):
        report = sent(sparse_gradient, jit_compile)
        back = sum(report.bytes("training", target="cpu:0").values())
        assert back <= 4 * ROWS * ones * (units + 1) < 4 * width, "rows that the batch names"


def test_one_device_sends_nothing(rng):
    report = reports.transfers(_compiled(1), _batch(rng))
    between = [one for one in report.training if one.source != "host"]
    assert between == []


def test_the_model_is_as_before(rng):
    x, y = _batch(rng)
    parallel = _compiled(2)
    parallel.fit(x, y, verbose=0)
    before = [np.array(value) for value in variables(parallel)]
    reports.transfers(parallel, (x, y))
    assert difference(before, variables(parallel)) == 0
    alone = _mlp()
    alone.set_weights(parallel.get_weights())
    alone.compile("sgd", "mse")
    parallel.compile("sgd", "mse")
    for model in (alone, parallel):
        model.fit(x, y, verbose=0, shuffle=False)
    assert difference(alone.get_weights(), parallel.get_weights()) < 1e-6


def test_before_the_first_step_and_without_one(rng):
    x, y = _batch(rng)
    parallel = make_parallel(keras.Sequential([layers.Dense(64), layers.Dense(8)]), 2)
    report = reports.transfers(parallel, x)
    assert report.training == []
    assert report.prediction
    parallel.compile("adam", "mse", metrics=["mae"])
    weights = parallel.get_weights()
    report = reports.transfers(parallel, (x, y, np.ones(ROWS)))
    assert report.training
    assert difference(weights, parallel.get_weights()) == 0
    assert int(parallel.optimizer.iterations.numpy() if BACKEND != "jax" else 0) == 0


@pytest.mark.skipif(BACKEND == "jax", reason="XLA sums whole gradients of tables")
def test_rows_of_a_table_are_gradients_and_may_be_less_than_the_table():
    """Adam squares them before they are summed."""
    model = keras.Sequential(
        [keras.Input((5,), dtype="int32"), keras.layers.Embedding(900, 8), keras.layers.Flatten()]
    )
    parallel = make_parallel(model, n_gpus=2)
    parallel.compile("sgd", "mse")
    batch = (np.zeros((ROWS, 5), "int32"), np.ones((ROWS, 40)))
    report = reports.transfers(parallel, batch)
    rows = ROWS * 5 * 8 * 4
    assert report.bytes("training")["activations"] < rows + 100  # they, and the loss
    assert report.bytes("training")["gradients"] < 900 * 8 * 4 < report.least
    assert "in their own types, would take at least 57.6 kB" in report.notes[0]
    parallel.compile("adam", "mse")
    assert reports.transfers(parallel, batch).bytes("training")["activations"] < rows + 100


def test_forms(on_two, tmp_path):
    report = on_two
    names, sums = report.matrix("training")
    assert names[-2:] == ["cpu:0", "cpu:1"]
    assert sums.sum() == sum(report.bytes("training").values())
    text = str(report)
    assert re.search(r"training +cpu:0 +cpu:1 +\w+", text)
    assert re.search(r"A training step sends .* the least is 12.4 kB", text)
    assert set(report.to_dataframe()["step"]) == {"training", "prediction"}
    report.save(tmp_path / "map.png")
    labels = [text.get_text() for axes in report.plot().axes for text in axes.texts]
    assert any(label.endswith("kB") for label in labels)


def test_sizes_that_are_not_known():
    sent = [Transfer("cpu:0", "cpu:1", "activations", "loop", None)]
    report = reports.TransfersReport(sent, [], ("cpu:0", "cpu:1"))
    assert report.bytes("training") == {"activations": 0}
    assert "The size of 1 tensor is known only when the step runs" in str(report)


def test_a_batch_of_one_row(rng):
    report = reports.transfers(_compiled(2), tuple(one[:1] for one in _batch(rng)))
    text = "don't divide 1 row" if BACKEND == "jax" else "One device computes a batch of one row"
    assert text in str(report)


@pytest.mark.skipif(BACKEND == "jax", reason="there the devices must divide the rows")
def test_a_batch_of_one_row_with_weights_in_parts(rng):
    """All devices compute it: none has all weights."""
    parallel = make_parallel(_mlp(), 2, shard="weights")
    parallel.compile("adam", "mse")
    report = reports.transfers(parallel, tuple(one[:1] for one in _batch(rng)))
    assert report.training
    assert "One device computes" not in str(report)


def test_wrong_arguments(rng):
    with pytest.raises(
        ValueError, match="must be a model from `make_parallel`. Received: parallel="
    ):
        reports.transfers(_mlp(), _batch(rng))
    with pytest.raises(ValueError, match=r"tuple of inputs, targets .* ndarray. Give"):
        reports.transfers(_compiled(2), _batch(rng)[0])
    report = reports.TransfersReport([], [], ("cpu:0",))
    assert report.notes == ["Nothing crosses between devices."]
    with pytest.raises(ValueError, match='"training" or "prediction". Received: step='):
        report.bytes("step")


@pytest.mark.skipif(BACKEND != "jax", reason="TensorFlow's partitioner sends to a home")
def test_the_groups_of_a_mesh_send_apart(rng):
    """Outputs between the devices of a group, gradients between those with the same parts."""
    model = keras.Sequential([keras.Input((16,)), layers.Dense(64), layers.Dense(8)])
    parallel = make_parallel(model, 4, model_devices=2)
    parallel.compile("sgd", "mse")
    batch = rng.normal(size=(ROWS, 16)), rng.normal(size=(ROWS, 8))
    report = reports.transfers(parallel, batch)
    for kind, pairs in {"activations": [(0, 1), (2, 3)], "gradients": [(0, 2), (1, 3)]}.items():
        for one, other in itertools.product(range(4), repeat=2):
            ends = {"source": f"cpu:{one}", "target": f"cpu:{other}"}
            is_pair = (one, other) in pairs or (other, one) in pairs
            sent = report.bytes("training", **ends).get(kind, 0)
            assert (sent > 8) == is_pair, (kind, ends)  # some versions of JAX sum the loss apart


@pytest.mark.parametrize("other", [{"shard": "weights"}, {"model_devices": 2}])
@pytest.mark.parametrize("options", [{}, {"mode": "model"}, {"mode": "tower"}])
def test_weights_that_another_model_has_spread(options, other, rng):
    """Each model of a template has its own way to keep the weights, and takes it up again."""
    template, batch = _mlp(), _batch(rng)

    def text():
        return str(reports.transfers(parallel, batch)) + str(reports.memory(parallel, batch))

    parallel = make_parallel(template, 4, **options)
    parallel.compile("adam", "mse")
    before = text()
    spread = make_parallel(template, 4, **other)
    spread.compile("adam", "mse")
    assert text() == before
    spread.fit(*batch, verbose=0)
    assert text() == before


@pytest.mark.backend_free
def test_devices_are_ordered_by_their_numbers():
    names = [f"cpu:{number}" for number in range(12)]
    sent = [Transfer(one, "cpu:0", "gradients", "kernel", 1) for one in ("host", *names[:0:-1])]
    report = reports.TransfersReport(sent, sent[:1], names)
    starts = [row[1] for row in report.rows]
    assert starts == [*names[1:], "host", "host"]


@pytest.mark.backend_free
@pytest.mark.parametrize("n", [2, 8, 16])
def test_the_numbers_in_the_map_can_be_read(n):
    names = [f"cpu:{number}" for number in range(n)]
    pairs = itertools.permutations(["host", *names], 2)
    sent = [Transfer(*pair, "gradients", "kernel", 141_000_000) for pair in pairs]
    assert not hidden_texts(reports.TransfersReport(sent, sent, names).plot())


@pytest.mark.backend_free
def test_a_picture_of_nothing_says_so():
    figure = reports.TransfersReport([], [], ["cpu:0"], notes=["Not compiled."]).plot()
    (axes,) = figure.axes
    assert axes.get_title() == "Transfers between devices"
    assert axes.texts[0].get_text() == "Nothing crosses between devices.\nNot compiled."
