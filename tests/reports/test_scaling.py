"""`reports.scaling`: the arithmetic on given figures, and trainings on virtual devices."""

import json
import random

import keras
import numpy as np
import pytest
from support.pictures import hidden_texts

from keras_multigpu import make_parallel, reports
from keras_multigpu.layers import GaussianMix, GaussianNLL
from keras_multigpu.reports import Run, ScalingReport
from keras_multigpu.reports.models import state_of
from keras_multigpu.reports.timing import Training
from keras_multigpu.sparse import HashedDataset, HashEncoder

ON_JAX = keras.backend.backend() == "jax"
PUBLISHED = ((1, 2, 3, 4), (857.7, 562.5, 384.4, 263.6), (0.0281, 0.0283, 0.0262, 0.0258))


def small(**arguments):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(2),
        ]
    )
    model.compile(**({"optimizer": "adam", "loss": "mse"} | arguments))
    return model


def values_of(model):
    return [np.array(keras.ops.convert_to_numpy(one)) for one in state_of(model)]


def same(before, after):
    return len(before) == len(after) and all(map(np.array_equal, before, after))


def random_states():
    return random.getstate(), np.random.get_state()[1].tolist()


@pytest.fixture
def data(rng):
    return rng.normal(size=(40, 6)).astype("float32"), rng.normal(size=(40, 2)).astype("float32")


def test_the_time_of_a_step_is_told_apart_from_that_of_an_epoch():
    one = Run(1, (3.0, 2.6), None, 32, 10, (0.2, 0.16), epochs=2)
    two = Run(2, (2.0, 2.0), None, 32, 10, (0.1, 0.1), epochs=2)
    assert (one.step_seconds, one.epoch_seconds) == (pytest.approx(0.18), pytest.approx(0.5))
    report = ScalingReport([one, two])
    assert report.speedups == [1, pytest.approx(1.8)]
    assert [round(row[6], 9) for row in report.rows] == [0.5, 0.5]
    assert "on 1 device, 36% of a run is overhead of epochs" in report.notes[1]


@pytest.mark.parametrize("options", [{"shard": "weights"}, {"shard": "optimizer"}], ids=str)
def test_moving_the_weights_and_tracing_again_is_not_timed(options, data, monkeypatch):
    """Models of other numbers of devices have moved them in between."""
    traced, fit = [], Training.fit

    def watched(training, **given):
        before = len(traced)
        found = fit(training, **given)
        if given["steps_per_epoch"] is None:
            timed.append(len(traced) - before)
        return found

    class Traced(keras.layers.Dense):
        def call(self, x, training=None):
            traced.append(training)
            return super().call(x)

    timed = []
    monkeypatch.setattr(Training, "fit", watched)
    model = keras.Sequential([keras.Input((6,)), Traced(16), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    reports.scaling(model, data, (1, 2), batch_size=8, repeats=2, verbose=0, **options)
    assert timed == [0] * 6


def test_runs_of_different_numbers_of_steps_compare_by_steps():
    """As in weak scaling through the same rows: with larger batches there are fewer."""
    one, two = Run(1, (4.0,), None, 8, 4), Run(2, (2.0,), None, 16, 2)
    assert ScalingReport([one, two], weak=True).speedups == [1, pytest.approx(2.0)]


def test_the_published_table():
    report = ScalingReport.from_figures(*PUBLISHED, title="Autoencoder")
    assert [round(one, 2) for one in report.speedups] == [1.0, 1.52, 2.23, 3.25]
    assert [round(one, 3) for one in report.efficiencies] == [1.0, 0.762, 0.744, 0.813]
    assert str(report).splitlines() == [
        "Autoencoder",
        "",
        "devices  time (s)    loss  speed-up  efficiency",
        "      1     857.7  0.0281      1.00        100%",
        "      2     562.5  0.0283      1.52         76%",
        "      3     384.4  0.0262      2.23         74%",
        "      4     263.6  0.0258      3.25         81%",
        "",
        "4 devices are 3.25 times as fast as 1, an efficiency of 81%.",
    ]
    rows = json.loads(report.to_json())["rows"]
    assert rows[1]["time"] == 562.5
    assert rows[1]["loss"] == 0.0283
    left, right = report.plot().axes
    assert right.lines[1].get_ydata().tolist() == report.speedups
    assert right.lines[0].get_ydata().tolist() == [1, 2, 3, 4]
    assert left.get_ylim()[0] == 0


@pytest.mark.parametrize(
    ("counts", "seconds", "weak", "speedup", "efficiency"),
    [
        ((1, 4), (8.0, 2.0), False, 4.0, 1.0),
        ((1, 4), (8.0, 16.0), False, 0.5, 0.125),
        ((2, 4), (8.0, 4.0), False, 2.0, 1.0),
        ((1, 4), (8.0, 10.0), True, 3.2, 0.8),
        ((2, 4), (8.0, 10.0), True, 1.6, 0.8),
    ],
)
def test_speedup_and_efficiency(counts, seconds, weak, speedup, efficiency):
    base, run = (Run(count, (second,)) for count, second in zip(counts, seconds))
    report = ScalingReport([base, run], weak=weak)
    assert report.speedups == [1, pytest.approx(speedup)]
    assert report.efficiencies == [1, pytest.approx(efficiency)]


def test_repeats_are_told_by_their_median_and_spread():
    report = ScalingReport([Run(2, (3.0, 1.0, 2.0), 0.5, 32, 4), Run(1, (4.0, 9.0, 5.0), 0.5, 32)])
    assert [column.name for column in report.columns][:6] == [
        "devices", "batch size", "time", "fastest", "slowest", "step",
    ]  # fmt: skip
    assert report.rows == [
        (1, 32, 5.0, 4.0, 9.0, None, 0.5, 1.0, 1.0),
        (2, 32, 2.0, 1.0, 3.0, 0.5, 0.5, 2.5, 1.25),
    ]


@pytest.mark.parametrize(
    ("seconds", "weak", "notes"),
    [
        (((4.0, 4.2), (2.0, 2.2)), False, ["2 devices are 1.95 times as fast as 1, an effici"]),
        (
            ((4.0, 4.2), (4.4, 4.6)),
            False,
            ["More devices are no faster than 1: 2 devices are 0.91"],
        ),
        (((4.0, 4.2), (4.1, 4.6)), False, ["More devices", "On 2 devices the repeats overlap"]),
        (((4.0, 4.0), (4.01, 4.01)), False, ["More devices are no faster than 1: 2 devices are 1"]),
        (((4.01, 4.01), (4.0, 4.0)), False, ["More devices are no faster than 1: 2 devices are 1"]),
        (((4.0, 4.2), (4.0, 4.2)), True, ["2 devices are 2.00 times as fast as 1, in rows per s"]),
        (((4.0, 4.0), (9.0, 9.0)), True, ["More devices are no faster than 1: 2 devices are 0.89"]),
    ],
)
def test_what_the_figures_say(seconds, weak, notes):
    runs = [Run(count, times) for count, times in zip((1, 2), seconds)]
    found = ScalingReport(runs, weak=weak).notes
    assert [one[: len(start)] for one, start in zip(found, notes)] == notes
    assert len(found) == len(notes)


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"mode": "tower"}, marks=pytest.mark.slow),
        {"mode": "tower", "replicas": "independent"},
    ],
)
def test_trainings_leave_the_model_as_it_was(data, numbers, capsys):
    """Random numbers, too: a committee's members draw their seeds from Python's."""
    model = small()
    model.fit(*data, epochs=1, verbose=0)
    before = values_of(model)
    optimizer, states = model.optimizer, random_states()
    report = reports.scaling(model, data, (1, 2), batch_size=10, repeats=2, steps=2, **numbers)
    assert same(before, values_of(model))
    assert random_states() == states
    assert model.optimizer is optimizer
    assert [(one.devices, len(one.seconds), one.steps) for one in report.runs] == [
        (1, 2, 2),
        (2, 2, 2),
    ]
    assert all(second > 0 for one in report.runs for second in one.seconds)
    assert "6/6" in capsys.readouterr().out
    model.fit(*data, epochs=1, verbose=0)
    assert not same(before, values_of(model))


def test_all_start_alike_and_train_alike(data):
    model = small(metrics=["mae"])
    dropout = next(one for one in model.layers if "dropout" in one.name)
    dropout.rate = 0.0
    model.fit(*data, epochs=1, verbose=0)
    start, before = model.get_weights(), values_of(model)
    report = reports.scaling(model, data, (1, 4), batch_size=8, epochs=2, repeats=1, verbose=0)
    assert same(before, values_of(model))
    alone = make_parallel(model, 1)
    wanted = alone.fit(*data, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"][-1]
    np.testing.assert_allclose([one.loss for one in report.runs], wanted, rtol=1e-5)
    model.set_weights(start)
    assert [one.batch_size for one in report.runs] == [8, 8]
    assert [one.steps for one in report.runs] == [10, 10]
    assert report.settings["mode"] == "data"
    assert report.settings["batch size"] == 8
    assert report.settings["devices"] == "4 x CPU"
    assert "Keras " + keras.__version__ in report.settings["versions"]
    assert "Virtual devices share one processor" in report.notes[-1]


@pytest.mark.parametrize("epochs", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_data_that_end_early(data, epochs):
    """The times are divided by the steps that were made."""
    with pytest.warns(UserWarning, match="ran out of data"):
        report = reports.scaling(
            small(), data, (1,), batch_size=10, steps=1000, epochs=epochs, repeats=1, verbose=0
        )
    made = 4 * epochs
    assert [one.steps for one in report.runs] == [made]
    assert all(1000 * one.step_seconds > one.seconds[0] for one in report.runs)
    found = [note for note in report.notes if note.startswith("The data ended early")]
    asked = "1 epoch" if epochs == 1 else f"{epochs} epochs"
    assert f"steps=1000 in each of {asked}, and the runs had {made} batches" in found[0]


def test_steps_do_not_change_the_size_of_a_batch(data):
    """Keras would divide the rows of arrays into so many steps."""
    sizes = []

    def loss(y_true, y_pred):
        sizes.append(len(y_pred))
        return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)

    def compile_with(parallel):
        parallel.compile("sgd", loss, run_eagerly=True)

    report = reports.scaling(
        small(), data, (1,), steps=1, warm_up=0, repeats=1, compile_with=compile_with, verbose=0
    )
    assert set(sizes) == {report.runs[0].batch_size} == {32}


def test_batches_that_a_compiler_does_not_divide(data):
    asked = {"batch_size": 10, "repeats": 1, "verbose": 0}
    told = "4 devices don't divide batches of 10 rows"
    assert (told in str(reports.scaling(small(), data, (2, 4), **asked))) == ON_JAX
    groups = reports.scaling(small(), data, (4,), model_devices=2, **asked)
    assert "don't divide" not in str(groups)


_OWN = {"mode": "model", "placement": "spread" if ON_JAX else {"dense.*": 1}}


@pytest.mark.parametrize("options", [{"model_devices": 2}, _OWN], ids=["groups", "placement"])
def test_one_device_has_no_options_that_divide_devices(options, data):
    model = small()
    report = reports.scaling(
        model, data, (1, 2), batch_size=16, repeats=1, warm_up=0, verbose=0, **options
    )
    assert [run.devices for run in report.runs] == [1, 2]


def test_one_row_for_each_device(data):
    few = tuple(one[:8] for one in data)
    report = str(reports.scaling(small(), few, (2,), batch_size=2, repeats=1, verbose=0))
    assert "don't divide" not in report
    told = (
        "each device of 2, with one row of 2, computes all of them. Give a multiple of 2 rows, two"
    )
    assert (told in report) == ON_JAX


def test_a_misspelt_argument(data):
    with pytest.raises(TypeError, match="no argument 'batch'. Received: batch=16. Did you mean `b"):
        reports.scaling(small(), data, batch=16)
    with pytest.raises(TypeError, match="mode='data' has the options wire_dtype.*shar='weights'"):
        reports.scaling(small(), data, shar="weights")


def test_one_run_has_nothing_to_compare_with():
    assert "no run to compare with: add 1 to" in str(ScalingReport.from_figures((4,), (1.0,)))
    assert not ScalingReport.from_figures((1,), (1.0,)).notes


@pytest.mark.parametrize("rows", [1, 10])
def test_batches_of_a_source_that_devices_do_not_share(data, rows):
    x, y = (one[:rows] for one in data)

    class Same(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return x, y

    report = str(reports.scaling(small(), Same(), (4,), repeats=1, verbose=0))
    assert (f"4 devices don't divide batches of {rows} row" in report) == ON_JAX
    said = "Batches of 1 row leave 3 of 4 devices without work." in report
    assert said == (rows == 1 and not ON_JAX)


def test_batches_longer_than_the_data(data):
    x, y = data
    asked = {"batch_size": 32, "weak": True, "repeats": 1, "verbose": 0}
    report = reports.scaling(small(), (x[:40], y[:40]), (1, 2), **asked)
    one, two = report.runs
    assert [one.batch_size, two.batch_size] == [32, 40]
    # The last has a single batch in an epoch, which has no time of a step: runs are compared.
    per_batch = one.median / one.steps, two.median / two.steps
    assert report.speedups[1] == pytest.approx(40 / 32 * per_batch[0] / per_batch[1])
    assert "The data have 40 rows, so that no batch has more. Asked for: 32, 64." in str(report)


def test_a_committee_is_judged_by_its_members(data):
    runs = [Run(1, (1.0,), step_times=(0.1,)), Run(2, (1.1,), step_times=(0.11,))]
    report = ScalingReport(runs, members=True)
    assert report.notes[0].startswith(
        "2 devices are 1.82 times as fast as 1, in members per second"
    )
    report = ScalingReport(runs, members=True, weak=True)
    assert "are 3.64 times as fast as 1, in rows x members per second" in report.notes[0]
    found = reports.scaling(small(), data, (1, 2), "tower", batch_size=8, repeats=1, verbose=0)
    assert "in members per second" in found.notes[0]
    found = reports.scaling(
        small(), data, (1, 2), "tower", num_replicas=2, batch_size=8, repeats=1, verbose=0
    )
    assert "members" not in found.notes[0]


def test_data_that_shuffle_themselves_begin_alike(tmp_path):
    encoder = HashEncoder({"a": 50})
    path = tmp_path / "rows.csv"
    path.write_text("a,y\n" + "".join(f"{number % 50},{number % 2}\n" for number in range(96)))
    data = HashedDataset(str(path), encoder, label="y", batch_size=16, verbose=0)
    model = keras.Sequential([keras.Input((encoder.ones,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    report = reports.scaling(model, data, (1, 2), repeats=2, verbose=0)
    losses = [run.loss for run in report.runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert data.epoch == 0  # as before


def test_random_numbers_go_on_as_before_after_an_error(data, monkeypatch):
    model = small()
    monkeypatch.setattr(Training, "fit", lambda *_, **__: 1 / 0)
    before = random_states()
    with pytest.raises(ZeroDivisionError):
        reports.scaling(model, data, (1, 2), "tower", replicas="independent", repeats=1, verbose=0)
    assert random_states() == before


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = slice(10 * index, 10 * index + 10)
        return self.x[rows], self.y[rows]


@pytest.mark.parametrize(
    ("source", "options", "found"),
    [
        (tuple, {"batch_size": 10, "steps": 2, "epochs": 2}, [(10, 4)]),
        (tuple, {"batch_size": 8, "weak": True, "n_gpus": (1, 2)}, [(8, 5), (16, 3)]),
        (tuple, {"batch_size": 40}, [(40, 1)]),
        (lambda data: Batches(*data), {"n_gpus": (2,)}, [(None, 4)]),
    ],
)
def test_the_batches_of_a_run(data, source, options, found):
    given = {"n_gpus": (1,), "repeats": 1, "verbose": 0} | options
    report = reports.scaling(small(), source(data), **given)
    assert [(one.batch_size, one.steps) for one in report.runs] == found
    assert report.settings["batch size"] == (found[0][0] or "the data's own")
    assert report.settings.get("scaling") == (
        "weak, the batch size is per device" if options.get("weak") else None
    )
    base, run = report.runs[0], report.runs[-1]
    speedup = (2 if options.get("weak") else 1) * base.step_seconds / run.step_seconds
    assert report.speedups[-1] == pytest.approx(speedup)
    is_single = found[0][1] == 1
    assert (base.step_times == ()) == is_single
    assert (base.step_seconds == base.seconds[0]) == is_single
    assert any("An epoch has a single batch" in note for note in report.notes) == is_single
    assert not any("ended early" in note for note in report.notes)


def test_steps_that_are_executed_together(data):
    model = small(steps_per_execution=2)
    report = reports.scaling(model, data, (1,), batch_size=8, repeats=1, verbose=0)
    assert report.runs[0].steps == 5
    assert 0 < report.runs[0].step_seconds < report.runs[0].seconds[0]


def test_sample_weights(data):
    weights = np.zeros(40)
    report = reports.scaling(
        small(), (*data, weights), (1,), repeats=1, warm_up=0, batch_size=20, verbose=0
    )
    assert report.runs[0].loss == 0
    assert report.settings["warm-up"] == "0 epochs"


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, pytest.param(RuntimeError, marks=pytest.mark.slow)]
)
def test_interrupted(data, error, monkeypatch):
    model = small()
    model.fit(*data, verbose=0)
    before, fits = values_of(model), []
    fit = Training.fit

    def interrupted(training, **given):
        result = fit(training, **given)
        fits.append(same(before, values_of(model)))
        if len(fits) == 3:
            raise error("stop")
        return result

    monkeypatch.setattr(Training, "fit", interrupted)
    with pytest.raises(error, match="stop"):
        reports.scaling(model, data, (1, 2), batch_size=20, verbose=0)
    assert fits == [False, False, False]  # the weights had been trained when it happened
    assert same(before, values_of(model))


class OwnCompile(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, inputs):
        return self.dense(inputs)

    def compile(self, rate):
        super().compile(keras.optimizers.SGD(rate), "mse")


def test_a_compile_of_its_own(data):
    model = OwnCompile()
    model(data[0])
    model.compile(rate=0.1)
    assert len(reports.scaling(model, data, (1,), repeats=1, verbose=0).runs) == 1


def test_outputs_that_the_mode_changes(data):
    model = keras.Sequential([keras.Input(data[0].shape[1:]), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    data = data[0], np.repeat(data[1][:, :1], 2, axis=1)
    mix = GaussianMix(own_variance=False)
    options = {"mode": "tower", "mix": mix, "repeats": 1, "verbose": 0}
    with pytest.raises(
        ValueError,
        match=r"could not be compiled like the model. Received: model='sequential.*', whose "
        r"outputs the mode changes.*Give `compile_with=",
    ):
        reports.scaling(model, data, (1,), **options)
    options["compile_with"] = lambda one: one.compile("sgd", GaussianNLL())
    assert len(reports.scaling(model, data, (1,), **options).runs) == 1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"n_gpus": np.ones((8, 1))}, r"an array of shape \(8, 1\).*\(model, \(x, y\)\)"),
        ({"n_gpus": ()}, r"`n_gpus` must be a sequence.*Received: n_gpus=\(\)"),
        ({"n_gpus": 4}, r"different positive integers.*Received: n_gpus=4. Give"),
        ({"n_gpus": (1, 1)}, r"Received: n_gpus=\(1, 1\). Give \(1, 2, 4\), for"),
        ({"n_gpus": (0, 1)}, r"Received: n_gpus=\(0, 1\)"),
        ({"n_gpus": (1, 99)}, r"must not exceed.*Received: n_gpus=99"),
        ({"mode": "fast"}, r"`mode` must be one of.*Received: mode='fast'"),
        ({"epochs": 0}, r"`epochs` must be a positive integer. Received: epochs=0"),
        ({"steps": 1.5}, r"`steps` must be a positive integer.*steps=1.5 \(of type float\)"),
        ({"warm_up": -1}, r"`warm_up` must be a positive integer or 0.*warm_up=-1"),
        ({"repeats": True}, r"`repeats` must be a positive integer.*Received: repeats=True"),
        ({"batch_size": 0}, r"`batch_size` must be a positive integer.*batch_size=0"),
        (
            {"data": Batches(None, None), "batch_size": 8},
            r"`batch_size` is for arrays. Received: batch_size=8, .*Batches. Leave",
        ),
        ({"weak": True}, r"`weak=True` needs the rows.*Received: batch_size=None"),
        ({"data": (1, 2, 3, 4)}, r"`data` must be a tuple.*Received: a tuple of 4"),
        (
            {"data": (np.ones((0, 6)), np.ones((0, 1)))},
            r"at least one. Received, as shapes: \[\(0, 6\), \(0, 1\)\]",
        ),
        ({"data": (np.ones((8, 6)),)}, r"a tuple of inputs only. Give `\(x, y\)`"),
        ({"data": [1, 2]}, r"Received: data of type list. Give `\(x, y\)`"),
        ({"data": np.ones((4, 6))}, r"Received: data of type ndarray"),
        ({"data": None}, r"Received: data of type NoneType"),
        ({"compile_with": 3}, r"`compile_with` must be a function.*compile_with=3"),
        ({"model": None}, r"`model` must be a Keras 3 model.*Received: model=None"),
    ],
)
def test_refused(data, changes, match):
    given = {"model": small(), "data": data, "n_gpus": (1, 2), "verbose": 0} | changes
    with pytest.raises(ValueError, match=match):
        reports.scaling(given.pop("model"), given.pop("data"), **given)


def test_data_that_can_be_read_only_once():
    with pytest.raises(TypeError, match="read from its start.*Received: data=<list_iterator"):
        reports.scaling(small(), iter([1]))


def test_a_model_that_is_not_ready(data):
    unbuilt = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(ValueError, match=r"`model` must be built.*Received: model='sequential"):
        reports.scaling(unbuilt, data)
    unbuilt.build((None, 6))
    with pytest.raises(ValueError, match=r"`model` must be compiled.*Received: model='sequential"):
        reports.scaling(unbuilt, data)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (((1, 2), (1.0,)), r"`seconds` must have a figure for each.*Received: seconds=\(1.0,\)"),
        (((1,), (1.0,), ()), r"`losses` must have a figure.*n_gpus=\(1,\). Received: losses=\(\)"),
        (((1,), (0.0,)), r"`seconds` must be a finite number, above 0. Received: seconds=0.0"),
        (((1,), (float("nan"),)), r"`seconds` must be a finite number.*Received: seconds=nan"),
        (((0,), (1.0,)), r"Received: n_gpus=\(0,\)"),
    ],
)
def test_figures_that_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        ScalingReport.from_figures(*arguments)


def test_endless_data_need_a_number_of_steps():
    tf = pytest.importorskip("tensorflow")
    data = tf.data.Dataset.from_tensor_slices((np.ones((8, 6)), np.ones((8, 2)))).batch(4).repeat()
    with pytest.raises(ValueError, match="`steps` must say .* data of type _RepeatDataset without"):
        reports.scaling(small(), data, (1, 2), verbose=0)

    class Endless(keras.utils.PyDataset):
        num_batches = None

    with pytest.raises(ValueError, match="`steps` must say .* data of type Endless without an end"):
        reports.scaling(small(), Endless(), (1, 2), verbose=0)


@pytest.mark.parametrize(
    ("counts", "speedups"),
    [
        ((1, 2, 3, 4), (1, 1.5, 2.2, 3.2)),
        ((1, 2, 4), (1, 0.24, 0.1)),
        ((1, 2, 3, 4, 8, 16, 32), (1, 1.5, 2.2, 3.2, 4.3, 5.7, 5.8)),
        ((1, 2, 4, 8, 16, 32, 64, 128), (1, 2, 3.8, 6.6, 10.7, 14, 15, 15)),
        ((1, 16), (1, 0.01)),
        ((1,), (1,)),
        ((1, 2, 16, 256, 512), (1, 2, 14.3, 200, 384.4)),
        (tuple(2**power for power in range(11)), tuple(1.8**power for power in range(11))),
    ],
)
def test_the_figures_in_the_plot_can_be_read(counts, speedups):
    report = ScalingReport.from_figures(counts, [100 / one for one in speedups])
    assert not hidden_texts(report.plot())
