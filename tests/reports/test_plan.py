"""Ways to train a model on devices of limited memory."""

import dataclasses
import json
import logging
import re

import keras
import numpy as np
import pytest
from keras import layers

from keras_multigpu import engines, make_parallel, reports
from keras_multigpu.engines import Holding
from keras_multigpu.layers import MultiHotDense
from keras_multigpu.reports import Cut, Link, subject
from keras_multigpu.reports.forms import read_bytes
from keras_multigpu.reports.loads import find_load
from keras_multigpu.reports.models import traced_anew
from keras_multigpu.reports.plan_report import Choice, PlanReport
from keras_multigpu.reports.planning import SHARDS, _find_shards
from keras_multigpu.reports.prediction import Load, Traffic, predict
from keras_multigpu.reports.subject import Subject
from keras_multigpu.reports.timing import renew_optimizer
from keras_multigpu.reports.workload import Shard, Sizes, StepTime, Workload

ON_JAX = keras.backend.backend() == "jax"
LINK = Link("link", 1e9, 0.0)
STEP = {256: 0.1, 128: 0.06}


def _model():
    hidden = [layers.Dense(128, activation="gelu") for _ in range(3)]
    model = keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(8)])
    model.compile("adam", "mse")
    return model


def _plan(model, memory):
    given = {"link": LINK, "step_seconds": STEP, "verbose": 0}
    return reports.plan(model, 256, 2, memory=memory, **given)


@pytest.fixture(scope="module")
def model():
    return _model()


@pytest.fixture(scope="module")
def roomy(model):
    """The plan for devices with more memory than needed."""
    return _plan(model, "1 GB")


def test_what_fits_is_the_fastest(model, roomy):
    assert roomy.best == {"n_gpus": 2, "mode": "data"}
    assert any(one.startswith("Recomputing") and "is not tried" in one for one in roomy.notes)
    first = roomy.choices[0]
    assert first.fits
    assert first.parts == 1
    assert first.rows == 256
    times = [float(f"{one.update_s:.2g}") for one in roomy.choices if one.fits]
    assert times == sorted(times)
    step = 0.02 + 128 * 0.08 / 256  # the line through the given times
    assert first.update_s == pytest.approx(step + 0.25 * 0.02 + first.prediction.transfer_s)
    parallel = make_parallel(model, **roomy.best)
    x, y = np.ones((256, 64), "float32"), np.ones((256, 8), "float32")
    parallel.compile("adam", "mse")
    counted = reports.memory(parallel, (x, y)).peak
    assert first.is_counted
    assert first.memory == pytest.approx(counted, rel=1e-3 if ON_JAX else 0.01)


def test_tensorflow_does_not_warn_of_steps_that_are_traced_anew(model, caplog):
    """Each size of a batch has a function; nothing is wrong with that."""
    logger = logging.getLogger("tensorflow")
    before, text = list(logger.filters), "5 out of the last 5 calls triggered tf.function retracing"
    with traced_anew():
        logger.warning(text)
        logger.warning("another")
    logger.warning(text)
    reports.plan(model, 8, 2, memory="1 GB", link=LINK, steps=1)
    assert [record.getMessage() for record in caplog.records] == ["another", text]
    assert logger.filters == before


def test_less_memory_asks_for_another_way(model, roomy):
    ways = (one for one in roomy.choices if one.devices == 2)
    plain = next(one for one in ways if one.mode == "data" and one.shard is None)
    found = _plan(model, 0.97 * plain.memory)
    first = found.choices[0]
    assert (first.mode, first.shard, first.parts, first.remat) != ("data", None, 1, False)
    assert first.fits
    assert first.memory <= 0.97 * plain.memory
    assert make_parallel(model, **found.best).mode == found.best["mode"]


def test_only_options_that_the_backend_takes(model, roomy):
    for shard in SHARDS:
        make_parallel(model, 2, shard=shard)
    found = {one.shard for one in roomy.choices}
    # On TensorFlow both are the same.
    assert found == {None, *SHARDS} if ON_JAX else {None, "weights"}


@pytest.mark.parametrize(
    ("width", "count", "why"),
    [
        (512, 3, r"`shard` spreads .* devices, 3, divides\. .*/kernel \(512, 512\)\. Choose"),
        (16, 4, r"No weight is large enough to be cut\."),
    ],
)
def test_why_nothing_is_cut(width, count, why):
    """In the words of `make_parallel`."""
    model = keras.Sequential([keras.Input((width,)), layers.Dense(width)])
    shards, notes = _find_shards(model, count)
    if width == 512 and not ON_JAX:  # TensorFlow cuts it
        assert len(shards) > 1
        return
    assert shards == [None]
    (note,) = notes  # both have one reason
    assert re.match(rf"shard='weights' and shard='optimizer' are left out: {why}", note), notes


def test_estimates_of_weights_in_parts_are_near_the_counts():
    even = keras.Sequential([keras.Input((64,)), *(layers.Dense(512) for _ in range(4))])
    even.compile("adam", "mse")
    asked = {"memory": "1 GB", "link": LINK, "step_seconds": 0.01, "steps": 1}
    found = {one.shard: one for one in reports.plan(even, 64, 4, **asked).choices}
    batch = (np.ones((64, 64), "float32"), np.ones((64, 512), "float32"))
    assert {None, "weights"} <= {*found}
    for shard in {*found} - {None}:
        assert not found[shard].is_counted
        parallel = make_parallel(even, 4, shard=shard)
        parallel.compile("adam", "mse")
        counted = reports.memory(parallel, batch).peak
        assert 0.9 * counted < found[shard].memory < 1.35 * counted


@pytest.mark.skipif(ON_JAX, reason="XLA fuses what a loop sums")
def test_estimates_of_recurrent_layers_in_parts_are_near_the_counts():
    """A loop gives all gradients of its weights at once, when it ends."""
    model = keras.Sequential([keras.Input((4, 64)), layers.GRU(128)])
    model.compile("adam", "mse")
    asked = {"memory": "1 GB", "link": LINK, "step_seconds": 0.01}
    found = {one.shard: one for one in reports.plan(model, 16, 4, **asked).choices}
    assert not found["weights"].is_counted
    parallel = make_parallel(model, 4, shard="weights")
    batch = (np.ones((16, 4, 64), "float32"), np.ones((16, 128), "float32"))
    counted = reports.memory(parallel, batch).peak
    assert 0.85 * counted < found["weights"].memory < 1.2 * counted


def test_what_the_fullest_device_keeps():
    runner = engines.current().data_runner
    odd = keras.Sequential([keras.Input((1023,)), layers.Dense(1025), layers.Dense(1)])
    # JAX has no uneven shards, and 4 divides neither axis.
    _, share, _ = runner.fullest(odd, 4, "weights")
    assert share > 0.99 if ON_JAX else share == pytest.approx(0.25, rel=0.05)
    even = keras.Sequential([keras.Input((512,)), *(layers.Dense(512) for _ in range(4))])
    for count in (2, 4):
        weights, slots, _ = runner.fullest(even, count, "weights")
        assert weights == slots == pytest.approx(1 / count, rel=0.02)
    found = runner.fullest(even, 4, "optimizer")
    assert found[:2] == (1.0 if ON_JAX else slots, slots)


def test_tables_stay_where_they_are():
    """Of a wide model, only the rows' indices and sums cross, and no device has the table."""
    indices = keras.Input((8,), dtype="int32")
    wide = keras.Model(indices, layers.Dense(4)(MultiHotDense(4, 2**17)(indices)))
    wide.compile("adam", "mse")
    given = {"memory": "1 GB", "link": LINK, "step_seconds": 0.01, "steps": 1}
    rows = np.random.default_rng(7).integers(0, 2**17, (256, 8), "int32")
    found = reports.plan(wide, 256, 2, inputs=rows, **given)
    chosen = next(one for one in found.choices if (one.shard, one.parts) == ("weights", 1))
    parallel = make_parallel(wide, 2, shard="weights")
    parallel.compile("adam", "mse")
    batch = (rows, np.ones((256, 4), "float32"))
    table, memory = 4 * 4 * 2**17, reports.memory(parallel, batch).peak
    # The update is counted in full, a copy of the table is not.
    assert memory <= chosen.memory < memory + 1.8 * table
    crossing = sum(reports.transfers(parallel, batch).bytes("training").values())
    assert 0.5 * crossing < 2 * chosen.prediction.load.traffic.sent < 2 * crossing < 0.1 * table


def test_a_cut_for_another_number_of_devices_changes_nothing():
    """For these devices it would be for the whole batch."""
    small = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.Dense(4)])
    small.compile("sgd", "mse")
    asked = {"memory": "10 B", "link": LINK, "step_seconds": 0.01}
    plain, other = (
        reports.plan(small, 8, 2, cuts=cuts, **asked) for cuts in (None, {4: Cut(64, 1)})
    )
    assert str(other) == str(plain)
    parts = [one.parts for one in plain.choices if one.mode == "model"]
    if not ON_JAX:  # by XLA's count a part needs as much as the batch
        assert set(parts) == {4}
    given = reports.plan(small, 8, 2, cuts={2: Cut(64, 1)}, **asked)
    assert {one.parts for one in given.choices if one.mode == "model"} == {1}


@pytest.mark.skipif(not ON_JAX, reason="XLA divides the layers")
def test_a_model_that_fits_only_with_large_layers_in_parts():
    wide = keras.Sequential([keras.Input((64,)), layers.Dense(1024), layers.Dense(512)])
    wide.compile("adam", "mse")
    batch = (np.ones((64, 64), "float32"), np.ones((64, 512), "float32"))
    parallel = make_parallel(wide, 4, mode="model")
    parallel.compile("adam", "mse")
    needed, sent = reports.memory(parallel, batch).peak, reports.transfers(parallel, batch)
    given = {"link": LINK, "step_seconds": {64: 0.01, 32: 0.006}}
    found = reports.plan(wide, 64, 4, memory=1.05 * needed, **given)
    assert found.best == {"n_gpus": 4, "mode": "model"}
    first, second, *_ = found.choices
    assert (first.memory, first.is_counted, second.fits) == (needed, True, False)
    moved = [one.bytes for one in sent.training if one.source == parallel.devices[0]]
    assert first.prediction.load.traffic.sent == sum(moved)
    assert first.prediction.load.rows_s == pytest.approx(0.008 / 4)  # both layers are spread
    wide.optimizer.build(wide.trainable_variables)  # has whole slots
    assert str(reports.plan(wide, 64, 4, memory=1.05 * needed, **given)) == str(found)
    advice = reports.advise(wide, 64, (2, 4), modes=("data", "model"), **given)
    assert advice.predictions[3].load.traffic == first.prediction.load.traffic
    for count, why in [
        (8, r"have to be here.*Received: 8 devices.*virtual_devices\(8\)"),
        (3, "by 3"),
    ]:
        text = str(reports.plan(wide, 64, count, memory="1 GB", **given))
        assert re.search(rf"Mode 'model' is left out: .*{why}", text, re.DOTALL), text
    with pytest.raises(ValueError, match=r"virtual_devices\(8\)"):
        reports.advise(wide, 64, (8,), modes=("model",), **given)


class OfEight(layers.Layer):
    """Takes batches of eight rows."""

    def call(self, inputs):
        return keras.ops.reshape(inputs, (8, 64))


def test_a_model_that_takes_batches_of_one_size():
    model = keras.Sequential([keras.Input((64,), batch_size=8), OfEight(), layers.Dense(64)])
    model.compile("sgd", "mse")
    found = reports.plan(model, 8, 2, memory="1 kB", link=LINK, step_seconds=0.1)
    assert {one.devices for one in found.choices} == {1, 2}
    assert {one.parts for one in found.choices} == {1}
    assert any(note.startswith("The model takes batches of this size only") for note in found.notes)


@pytest.mark.filterwarnings("ignore:.*must match the names")
def test_what_keras_warns_of_leaves_no_mode_out():
    query = keras.Input((64,), name="query")
    named = keras.Model({"q": query}, layers.Dense(1024)(layers.Dense(1024)(query)))
    given = {"link": LINK, "step_seconds": 0.01}
    assert "model" in {
        one.mode for one in reports.plan(named, 8, 2, memory="1 GB", **given).choices
    }


def test_the_model_is_as_before(model):
    before = model.get_weights()
    function = model.train_function
    found = _plan(model, "1 kB")
    with pytest.raises(ValueError, match=r"Received: None of \d+ ways fits. The least is"):
        _ = found.best
    assert min(found.choices, key=lambda one: one.memory).is_counted
    assert all(map(np.array_equal, before, model.get_weights()))
    assert model.train_function is function


@pytest.mark.backend_free
def test_parts_of_the_state():
    sizes = Sizes(1000, 800, 10, outputs=4, inputs=3, slots=1600, activations=20, working=500)
    work = Workload(StepTime(0.0, 1.0), 64, sizes, by_compiler=True)
    shards = {"optimizer": Shard("optimizer", 1.0, 0.25), "weights": Shard("weights", 0.25, 0.25)}
    loads = {
        name: find_load("data", dataclasses.replace(work, shard=one), 4)
        for name, one in [(None, None), *shards.items()]
    }
    assert loads[None].memory == 1000 + 1600 + 2 * 800 + 16 * 3  # all gradients, and their sums
    assert loads["optimizer"].memory == 1000 + 400 + 1.25 * 800 + 16 * 3  # gradients, and parts
    assert loads["weights"].memory == 250 + 400 + 0.75 * 1000 + 500 + 16 * 20  # gathered
    looped = dataclasses.replace(sizes, working=1200, looped=300)
    hubs = dataclasses.replace(work, sizes=looped, by_compiler=False, shard=shards["weights"])
    beside = 2 * 300 + 0.25 * (1200 - 800)
    assert find_load("data", hubs, 4).memory == 250 + 400 + 0.75 * 1000 + 800 + beside + 16 * 20
    for load in loads.values():
        assert load.traffic.sent == load.traffic.received == 2 * 800 * 3 / 4
    alone = dataclasses.replace(work, shard=shards["weights"])
    assert find_load("data", alone, 1) == find_load("data", work, 1)
    hubs = Workload(StepTime(0.0, 1.0), 64, sizes)
    # At home are the sums of the gradients and the inputs of all rows.
    assert find_load("data", hubs, 4).memory == 1000 + 1600 + 500 + 16 * 20 + 800 + 48 * 3
    moved = find_load("data", dataclasses.replace(hubs, shard=shards["weights"]), 4).traffic
    assert moved.sent == 2 * 800 * 3 / 4


def _choice(memory, seconds, fits, devices=2, **given):
    load = Load(seconds, seconds, seconds, Traffic(), memory)
    values = {"shard": None, "parts": 1, "rows": 64, "remat": False, **given}
    return Choice(predict("data", devices, load, LINK), fits=fits, **values)


def test_what_is_counted_decides(model, roomy, monkeypatch):
    """The fastest way must fit as counted, whatever was estimated."""
    several = [one for one in roomy.choices if one.devices == 2]
    assert [one.is_counted for one in several if one.mode != "model"].count(True) == 1
    assert all(one.is_counted == ON_JAX for one in several if one.mode == "model")
    fastest = roomy.choices[0]
    count = Subject.count

    def counted_as(memory):
        """The memory of several devices; one device's is counted."""

        def several(subject, model, rows, devices=1, *rest, **options):
            if devices == 1:
                return count(subject, model, rows, devices, *rest, **options)
            return reports.MemoryReport([Holding("gpu:0", "activations", memory, True)])

        monkeypatch.setattr(Subject, "count", several)

    counted_as(10**10)
    first = _plan(model, "1 GB").choices[0]
    assert first.fits
    assert first.is_counted  # one device's memory was counted before, and a compiler's cut is
    assert first.devices == 1 or (ON_JAX and first.mode == "model")
    counted_as(fastest.memory)
    assert _plan(model, fastest.memory).best == roomy.best


def test_a_batch_that_is_too_large_to_be_tried(monkeypatch, capsys):
    """A step on a large batch would take all memory: it is estimated from smaller ones."""
    model, tried, count = _model(), [], Subject.count
    monkeypatch.setattr(
        Subject,
        "count",
        lambda self, *given, **more: tried.append(given[1]) or count(self, *given, **more),
    )
    monkeypatch.setattr(subject, "_MOST_BYTES", 1e7)
    found = reports.plan(model, 10**6, 2, memory="5 GB", link=LINK, step_seconds=1.0)
    assert "counted step" in capsys.readouterr().out
    assert 500 < max(tried) < 10**5
    assert {one.is_counted for one in found.choices} == {False}
    assert any("is the largest that a processor counts" in note for note in found.notes)
    alone = next(one for one in found.choices if one.devices == 1)
    x, y = np.ones((20_000, 64), "float32"), np.ones((20_000, 8), "float32")
    held = reports.memory(model, (x, y)).peak
    assert alone.memory == pytest.approx(held / 20_000 * alone.rows, rel=0.1)


@pytest.mark.parametrize("scaled", [False, True])
def test_parts_of_a_batch_are_counted(scaled):
    """Their gradients are accumulated, with loss scaling, too."""
    small = keras.Sequential([keras.Input((64,)), layers.Dense(64)])
    adam = keras.optimizers.Adam()
    small.compile(keras.optimizers.LossScaleOptimizer(adam) if scaled else adam, "mse")
    parallel = make_parallel(small, 2)
    whole = reports.memory(parallel, (np.ones((8, 64)), np.ones((8, 64)))).bytes(kind="slots")
    renew_optimizer(parallel, 4)
    parts = reports.memory(parallel, (np.ones((2, 64)), np.ones((2, 64)))).bytes(kind="slots")
    assert parts > 1.4 * whole


@pytest.mark.backend_free
def test_of_ways_that_are_as_fast_the_simplest():
    spread, plain = _choice(6e9, 0.03, True, shard="weights"), _choice(7e9, 0.0301, True)
    report = PlanReport([spread, plain], 2, limit=8 * 10**9)
    assert report.best == {"n_gpus": 2, "mode": "data"}
    assert "may be a fifth too low: `reports.memory` counts it, on 2" in report.notes[0]
    for limit in (None, 10**10):
        assert "a fifth" not in PlanReport([spread, plain], 2, limit=limit).notes[0]
    report = PlanReport([spread, _choice(7e9, 0.04, True)], 2)
    assert report.best == {"n_gpus": 2, "mode": "data", "shard": "weights"}


@pytest.mark.backend_free
def test_forms(tmp_path):
    choices = [
        _choice(9e9, 0.01, False),
        _choice(7e9, 0.03, True, parts=4, rows=16, remat=True),
        _choice(6e9, 0.04, True, shard="weights"),
    ]
    report = PlanReport(choices, 2, limit=8 * 10**9, settings={"model": "m"})
    assert [one.memory for one in report.choices] == [6e9, 7e9, 9e9]
    assert report.best == {"n_gpus": 2, "mode": "data", "shard": "weights"}
    text = str(report)
    assert "takes 40.0 ms: parallel = make_parallel(model, 2, mode='data', shard='weights')" in text
    call = report.choices[1].call
    assert "keras.RematScope" in call
    assert "gradient_accumulation_steps=4, and fit(..., batch_size=16)" in call
    assert report.choices[1].update_s == 4 * 0.03
    with pytest.warns(
        UserWarning, match="alone don't make this model fit. To fit: make the layers"
    ):
        assert PlanReport([choices[1]], 2).best == {"n_gpus": 2, "mode": "data"}
    assert [row["fits"] for row in json.loads(report.to_json())["rows"]] == ["yes", "yes", "no"]
    assert list(report.to_dataframe()["parts"]) == [1, 4, 1]
    assert "7.00 GB" in report.to_html()
    report.save(tmp_path / "plan.png")
    left, right = report.plot().axes
    assert [bar.get_width() for bar in left.patches] == [6000, 7000, 9000]
    assert [list(line.get_xdata()) for line in left.lines] == [[8000, 8000]]
    assert [bar.get_width() for bar in right.patches] == [40, 120, 10]


@pytest.mark.backend_free
def test_one_device_that_fits_and_wins():
    several = [_choice(6e9, 0.04, True, shard="weights"), _choice(5e9, 0.03, True)]
    alone = _choice(7e9, 0.02, True, devices=1)
    report = PlanReport([*several, alone], 2)
    assert report.notes[0] == (
        "Stay on one device: an update takes 20.0 ms there, and 30.0 ms on 2 in the fastest way "
        "that fits."
    )
    assert report.best == {"n_gpus": 1, "mode": "data"}
    assert [row[:2] for row in report.rows] == [(1, None), (2, "data"), (2, "data")]
    for fits, seconds in ((False, 0.02), (True, 0.05)):
        other = PlanReport([*several, _choice(7e9, seconds, fits, devices=1)], 2)
        assert other.notes[0].startswith("The fastest that fits takes 30.0 ms")
        assert ("one device 50.0 ms" in other.notes[0]) is fits
        assert "otherwise" not in other.notes[0]
    best = several[1]
    best = dataclasses.replace(best, prediction=dataclasses.replace(best.prediction, most_s=0.1))
    report = PlanReport([best, _choice(7e9, 0.05, True, devices=1)], 2)
    assert report.notes[0].startswith("Stay on one device: an update takes 50.0 ms there, and 30.0")
    assert "It may be otherwise: 2 devices are 0.50 to 1.67 times as fast" in report.notes[0]
    assert report.best == {"n_gpus": 1, "mode": "data"}  # as the first sentence says
    best = dataclasses.replace(best, prediction=dataclasses.replace(best.prediction, least_s=0.01))
    report = PlanReport([best, alone], 2)
    assert report.notes[0].startswith("Stay on one device")
    assert "It may be otherwise: 2 devices are 0.20 to 1.33 times as fast" in report.notes[0]
    undivided = PlanReport([_choice(5e9, 0.03, True, rows=63), alone], 2)
    told = (
        "In mode 'data' the 2 devices don't divide the 63 rows, so that each computes all of them"
    )
    assert told in undivided.notes[0]
    staged = _choice(5e9, 0.01, True, rows=63)
    step = dataclasses.replace(staged.prediction, mode="model")
    staged = dataclasses.replace(staged, prediction=step)
    undivided = PlanReport([_choice(5e9, 0.03, True, rows=63), staged, alone], 2)
    assert "mode='model')" in undivided.notes[0]
    assert told in undivided.notes[0]  # of the mode that is not the best, too
    none = PlanReport([_choice(5e9, 0.03, False, rows=63), _choice(7e9, 0.02, False, devices=1)], 2)
    assert none.notes[0].startswith("None of 2 ways fits.")
    only = PlanReport([_choice(7e9, 0.02, False, devices=1)], 1)
    assert only.notes[0].startswith("The only way does not fit.")
    assert told in none.notes[0]
    only = PlanReport([alone], 1)
    assert only.title == "Plan for 1 device"
    assert only.notes[0].startswith("The fastest that fits takes 20.0 ms: train the model as it is")


def test_ways_that_are_not_counted_are_named_if_nothing_fits(model, roomy):
    on_jax = keras.backend.backend() == "jax"  # mode "model" divides large layers there
    note = next((one for one in _plan(model, "1 kB").notes if one.startswith("Not counted")), "")
    assert ("placement='spread' and model_devices=2, which divide each" in note) is not on_jax
    assert not any(one.startswith("Not counted") for one in roomy.notes)


def test_a_way_without_layers_for_all_devices_is_left_out():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4), layers.Dense(2)])
    model.compile("adam", "mse")
    found = reports.plan(model, 64, 4, memory="1 GB", link=LINK, step_seconds=0.1)
    if keras.backend.backend() == "tensorflow":
        assert "model" not in {one.mode for one in found.choices}
        assert any("layers make 2 stages" in note for note in found.notes)


def test_a_batch_of_fewer_rows_than_devices(model):
    found = reports.plan(model, 1, 2, memory="1 GB", link=LINK, step_seconds=0.01, verbose=0)
    assert {(one.devices, one.mode) for one in found.choices} == {(1, "data"), (2, "model")}
    assert any(note.startswith("Mode 'data' is left out: ") for note in found.notes)


def test_one_device_needs_no_link(model):
    given = {"memory": "1 GB", "link": LINK, "step_seconds": 0.1}
    assert "link" not in reports.plan(model, 8, 1, **given).settings


def test_one_device_is_always_there(model, roomy):
    (alone,) = (one for one in roomy.choices if one.devices == 1 and not one.remat)
    assert alone.update_s == pytest.approx(0.1)
    counted = reports.memory(make_parallel(model, 1), (np.ones((256, 64)), np.ones((256, 8)))).peak
    assert alone.memory == pytest.approx(counted, rel=0.2)
    slow = Link("slow", 1e6, 1.0)
    found = reports.plan(model, 256, 2, memory="1 GB", link=slow, step_seconds=STEP)
    assert found.notes[0].startswith("Stay on one device: an update takes 100 ms there, and ")
    assert make_parallel(model, **found.best).devices == ("cpu:0",)
    single = reports.plan(model, 256, 1, memory="1 GB", step_seconds=STEP, link=LINK)
    assert {(one.devices, one.shard) for one in single.choices} == {(1, None)}
    assert not any("shard" in note for note in single.notes)


LAYERS = {
    "dropout": lambda: layers.Dropout(0.1),
    "batch_normalization": layers.BatchNormalization,
    "lstm": lambda: keras.Sequential([layers.Reshape((8, 8)), layers.LSTM(4, name="lstm")]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_keras_cannot_compute_again(name):
    """They are left out, and named."""
    inner = LAYERS[name]()
    model = keras.Sequential([keras.Input((64,)), layers.Dense(64), inner, layers.Dense(2)])
    model.compile("sgd", "mse")
    found = _plan(model, "1 kB")
    assert not any(one.remat for one in found.choices)
    (note,) = (one for one in found.notes if one.startswith("Recomputing activations"))
    told = f"on {engines.current().title} Keras can't do it for this model, which has layers with"
    assert told in note
    kind = name.title().replace("_", "").replace("Lstm", "LSTM")
    assert re.search(rf"argument `training` or `mask` \((\w+, )*{kind}(, \w+)*\)\.$", note)


class Stubborn(layers.Layer):
    """Can't be computed again, for another reason."""

    def call(self, inputs):
        if self._remat_mode is not None:
            raise NotImplementedError("not twice")
        return inputs


def test_another_reason_not_to_compute_again():
    convolution = layers.Conv1D(4, 1)
    model = keras.Sequential([keras.Input((64, 1)), convolution, Stubborn()])
    model.compile("sgd", "mse")
    (note,) = (one for one in _plan(model, "1 kB").notes if one.startswith("Recomputing"))
    assert "Keras can't do it for this model, which fails (" in note
    assert "not twice" in note
    assert "\n" not in note


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("size", "found"),
    [
        ("24 GB", 24 * 10**9),
        ("24gb", 24 * 10**9),
        ("1.5GiB", 1.5 * 2**30),
        ("80 kB", 80_000),
        (2e6, 2_000_000),
    ],
)
def test_sizes(size, found):
    assert read_bytes("memory", size) == found


@pytest.mark.backend_free
@pytest.mark.parametrize("size", ["24", "GB", "-1 GB", 0, True, None, float("inf")])
def test_wrong_sizes(size):
    with pytest.raises(ValueError, match="with a unit. Received: memory="):
        read_bytes("memory", size)


def test_wrong_arguments(model):
    with pytest.raises(ValueError, match="`batch_size` must be"):
        reports.plan(model, 0, 4, memory="1 GB")
    with pytest.raises(ValueError, match="Received: model="):
        reports.plan(keras.Sequential([layers.Dense(2)]), 4, 2, memory="1 GB")
