"""The memory of a step, counted without running on GPUs."""

import io
import json
import re

import keras
import numpy as np
import pytest
from keras import layers
from support.parity import difference, variables

from keras_multigpu import make_parallel, reports
from keras_multigpu.engines import Holding
from keras_multigpu.reports import memory_report

ON_JAX = keras.backend.backend() == "jax"
ROWS = 64
_WEIGHTS = 4 * (16 * 256 + 256 + 256 * 8 + 8)
_BATCH = 4 * ROWS * (16 + 8)
_HIDDEN = 4 * ROWS * 256  # the hidden layer's outputs
_COUNTERS = 4 + 8  # the optimizer's step and its learning rate


def _model():
    model = keras.Sequential(
        [keras.Input((16,)), layers.Dense(256, activation="relu"), layers.Dense(8)]
    )
    model.compile("adam", "mse", metrics=["mae"])
    return model


def _batch(rng):
    x, y = rng.normal(size=(ROWS, 16)), rng.normal(size=(ROWS, 8))
    return x.astype("float32"), y.astype("float32")


@pytest.fixture(scope="module")
def alone():
    """The memory of a plain Keras model's step."""
    return reports.memory(_model(), _batch(np.random.default_rng(7)))


def test_a_plain_model(alone):
    assert alone.devices == ("cpu:0",)
    assert alone.bytes(kind="weights") == _WEIGHTS
    assert 2 * _WEIGHTS < alone.bytes(kind="slots") <= 2 * _WEIGHTS + _COUNTERS
    assert alone.bytes(kind="batch") == _BATCH
    step = alone.peak - 3 * _WEIGHTS - _BATCH
    # The step keeps the hidden outputs and makes each gradient, if not all at once.
    assert _HIDDEN <= step <= 3 * (_HIDDEN + _WEIGHTS)


def test_what_is_counted(alone):
    counted = {one.kind for one in alone.held if one.is_counted}
    assert {"weights", "slots", "other"} <= counted
    assert counted.isdisjoint({"gradients", "activations", "temporaries"})


@pytest.mark.slow
def test_activations_grow_with_the_rows(rng):
    """A deep model whose batch needs more memory than its weights."""
    model = keras.Sequential([keras.Input((32,)), *(layers.Dense(32, "tanh") for _ in range(8))])
    model.compile("sgd", "mse")
    found = {}
    for rows in (512, 1024):
        x = np.ones((rows, 32), "float32")
        found[rows] = reports.memory(model, (x, x)).bytes(kind="activations")
    outputs = 4 * 32 * 8 * 512
    assert 0.7 * outputs <= found[512] <= 1.3 * outputs
    assert found[1024] == pytest.approx(2 * found[512], rel=0.05)


@pytest.mark.parametrize("n", [2, 4])
def test_data_mode(n, rng, alone):
    report = reports.memory(make_parallel(_model(), n), _batch(rng))
    assert report.devices == tuple(f"cpu:{number}" for number in range(n))
    homes = report.devices if ON_JAX else report.devices[:1]
    for device in report.devices:
        is_home = device in homes
        assert report.bytes(device, "weights") == (_WEIGHTS if is_home else 0)
        assert (report.bytes(device, "slots") > 2 * _WEIGHTS) == is_home
        assert report.bytes(device, "activations") < alone.bytes(kind="activations") + _WEIGHTS
        if ON_JAX:
            assert report.bytes(device, "batch") == _BATCH // n
        else:
            assert report.bytes(device) > _HIDDEN / n
    assert ON_JAX or report.bytes("cpu:0", "batch") >= _BATCH


def test_weights_are_counted_where_they_are(rng):
    """Model mode spreads the weights and their slots."""
    report = reports.memory(make_parallel(_model(), 2, "model"), _batch(rng))
    weights = [report.bytes(device, "weights") for device in report.devices]
    slots = [report.bytes(device, "slots") for device in report.devices]
    if ON_JAX:
        kernels = 4 * (16 * 256 + 256 * 8)
        assert all(_WEIGHTS - kernels // 2 <= one < _WEIGHTS for one in weights)
    else:
        assert sum(weights) == _WEIGHTS
        assert min(weights) > 0
    assert all(0 <= two - 2 * one <= _COUNTERS for one, two in zip(weights, slots))


@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_state_that_is_spread(shard, rng):
    report = reports.memory(make_parallel(_model(), 2, shard=shard), _batch(rng))
    weights = [report.bytes(device, "weights") for device in report.devices]
    slots = [report.bytes(device, "slots") for device in report.devices]
    if not ON_JAX:  # each variable is on one device, with its slots
        assert sum(weights) == _WEIGHTS
        assert 0 <= sum(slots) - 2 * _WEIGHTS <= _COUNTERS
        assert max(weights) < _WEIGHTS
        return
    part = _WEIGHTS - 4 * (16 * 256 + 256 * 8) // 2  # of the kernels; the biases are too small
    assert weights == [part if shard == "weights" else _WEIGHTS] * 2
    assert all(0 < one - 2 * part <= _COUNTERS for one in slots)
    assert (report.bytes(kind="copies") > 0) == (shard == "weights")


def test_a_committee_has_members_on_each_device(rng):
    parallel = make_parallel(_model(), 2, "tower", replicas="independent")
    report = reports.memory(parallel, _batch(rng))
    for device in report.devices:
        assert 0 <= report.bytes(device, "weights") - _WEIGHTS < 100  # and seeds
        assert 0 <= report.bytes(device, "slots") - 2 * _WEIGHTS <= 4 * _COUNTERS


def test_a_prediction_has_no_slots(rng):
    x, _ = _batch(rng)
    report = reports.memory(_model(), x, training=False)
    assert report.bytes(kind="slots") == report.bytes(kind="gradients") == 0
    assert report.bytes(kind="weights") == _WEIGHTS
    assert _HIDDEN <= report.peak - _WEIGHTS <= 3 * _HIDDEN + _BATCH
    assert report.settings["step"] == "prediction"


def test_the_model_is_as_before(rng):
    model, batch = _model(), _batch(rng)
    model.fit(*batch, verbose=0)
    before = [np.array(value) for value in variables(model)]
    function = model.train_function
    reports.memory(model, batch)
    assert difference(before, variables(model)) == 0
    assert model.train_function is function


def test_a_model_that_is_not_built(rng):
    model = keras.Sequential([layers.Dense(256), layers.Dense(8)])
    model.compile("adam", "mse")
    assert reports.memory(model, _batch(rng)).bytes(kind="weights") == _WEIGHTS


@pytest.mark.skipif(ON_JAX, reason="XLA knows the sizes of all tensors")
def test_sizes_that_are_not_known():
    model = keras.Sequential([keras.Input((5, 4)), layers.LSTM(8)])
    model.compile("sgd", "mse", jit_compile=False)
    report = reports.memory(model, (np.ones((6, 5, 4), "float32"), np.ones((6, 8), "float32")))
    assert sum(one.unknown for one in report.held) > 0
    assert re.search(r"\d+ tensors is known only when the step runs", str(report))


def test_the_sizes_of_a_convolutional_model_are_known():
    """The indices of a max pooling too, which is one of oneDNN's operations on processors."""
    parts = [layers.Conv2D(4, 3), layers.MaxPooling2D(), layers.MaxPooling2D(3), layers.Flatten()]
    model = keras.Sequential([keras.Input((16, 16, 1)), *parts, layers.Dense(2)])
    model.compile("adam", "mse", jit_compile=False)
    report = reports.memory(model, (np.ones((8, 16, 16, 1), "float32"), np.ones((8, 2))))
    assert sum(one.unknown for one in report.held) == 0
    assert "tensors is known only" not in str(report)


@pytest.mark.skipif(ON_JAX, reason="XLA compiles every step there")
def test_xla_is_told(rng):
    model = _model()
    model.compile("adam", "mse", jit_compile=True)
    assert "compiled with XLA" in str(reports.memory(model, _batch(rng)))
    assert model.jit_compile


@pytest.mark.backend_free
def test_forms(tmp_path):
    held = [
        Holding("gpu:0", "weights", 400_000_000, True),
        Holding("gpu:0", "activations", 500_000_000, False),
        Holding("gpu:1", "activations", 700_000_000, False, unknown=3),
    ]
    report = reports.MemoryReport(held, settings={"model": "m"})
    assert report.peak == 900_000_000
    assert report.bytes("gpu:1") == report.bytes("gpu:1", "activations") == 700_000_000
    text = str(report)
    assert re.search(r"gpu:0 +400 MB +500 MB +900 MB", text)
    assert "gpu:0 holds most: 900 MB, of which 500 MB are activations." in text
    assert "size of 3 tensors" in text
    assert list(report.to_dataframe()["sum"]) == [900_000_000, 700_000_000]
    assert json.loads(report.to_json())["rows"][1]["weights"] == 0
    assert "900 MB" in report.to_html()
    report.save(tmp_path / "memory.png")
    (axes,) = report.plot().axes
    widths = [bar.get_width() for bars in axes.containers for bar in bars]
    assert widths == [400, 0, 500, 700]
    assert [text.get_text() for text in axes.texts] == ["900 MB", "700 MB"]


@pytest.mark.backend_free
def test_equal_devices_are_not_told_apart():
    held = [Holding(f"gpu:{index}", "weights", 4_000_000 + index, True) for index in range(2)]
    (note,) = reports.MemoryReport(held).notes
    assert note == "Each device holds 4.00 MB, of which 4.00 MB are weights."
    held[1] = Holding("gpu:1", "activations", 4_000_000, False)
    (note,) = reports.MemoryReport(held).notes
    assert note.startswith("gpu:0 holds most: 4.00 MB, of which")


@pytest.mark.backend_free
def test_the_picture_has_room_for_its_legend():
    held = [Holding("gpu:0", kind, 10**6, False) for kind in memory_report.KINDS]
    figure = reports.MemoryReport(held, settings={}).plot()
    figure.savefig(io.BytesIO(), format="png")  # lays it out
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 8
    extent = legend.get_window_extent()
    assert figure.bbox.x0 <= extent.x0 < extent.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= extent.y0 < extent.y1 <= figure.axes[0].get_window_extent().y0


def test_wrong_arguments(rng):
    x, y = _batch(rng)
    model = keras.Sequential([keras.Input((16,)), layers.Dense(8)])
    with pytest.raises(ValueError, match=r"must be compiled .* Received: model='sequential"):
        reports.memory(model, (x, y))
    with pytest.raises(ValueError, match=r"tuple of inputs, targets .* ndarray. Give"):
        reports.memory(_model(), x)
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="must not run eagerly.*Compile it with `run_eagerly=Fa"):
        reports.memory(model, (x, y))
    with pytest.raises(ValueError, match="`training` must be True or False. Received: training='"):
        reports.memory(_model(), (x, y), training="no")
    report = reports.memory(_model(), (x, y))
    with pytest.raises(ValueError, match="`kind` must be .*.slots.,.* Received: kind='slot'"):
        report.bytes(kind="slot")
    with pytest.raises(ValueError, match="`device` must be .* Received: device='gpu:7'"):
        report.bytes("gpu:7")
    with pytest.raises(ValueError, match=r"tuple of inputs, targets .* list of 2. Give"):
        reports.memory(_model(), [x, y])
    for batch in ((x[:0], y[:0]), (x, y[:3]), (x, 3.0)):
        with pytest.raises(ValueError, match=r"the same number of rows.*Received, as shapes: \["):
            reports.memory(_model(), batch)
