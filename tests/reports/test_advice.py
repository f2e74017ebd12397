"""`reports.advise`: what it measures, what it finds out of a model, and what it refuses."""

import random

import keras
import numpy as np
import pytest
from support.pictures import hidden_texts

from keras_multigpu import make_parallel, reports
from keras_multigpu.layers import MultiHotDense
from keras_multigpu.reports import Cut, Link
from keras_multigpu.reports.inputs import make_inputs, take_rows
from keras_multigpu.reports.models import state_of
from keras_multigpu.reports.workload import Sizes, find_sizes

ON_JAX = keras.backend.backend() == "jax"
LINK = Link("link", 1e6, 1e-3)


def dense(**arguments):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(2)])
    if arguments:
        model.compile(**arguments)
    return model


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch):
    """The times don't matter here."""
    monkeypatch.setattr("keras_multigpu.reports.timing._LONG_ENOUGH_S", 0.0)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, inputs):
        return {"a": self.dense(inputs["x"])}


def test_sizes():
    model = dense(optimizer="adam", loss="mse")
    count = 6 * 8 + 8 + 8 * 2 + 2
    assert find_sizes(model, model.outputs) == Sizes(
        weights=4 * count, gradients=4 * count, tensors=4, outputs=8
    )


def test_tables_that_stay():
    words = keras.Input((3,), dtype="int32")
    large, small = keras.layers.Embedding(7000, 4), keras.layers.Embedding(6000, 2)
    known = [large(words), small(words), large(words[:, :1])]  # 4 rows of `large` for an example
    sizes = find_sizes(keras.Model(words, known), known)
    assert (sizes.tables, sizes.looked_up) == (0, 0)
    large = keras.layers.Embedding(9000, 4)
    sizes = find_sizes(keras.Model(words, [large(words), large(words[:, :1])]), known)
    assert (sizes.tables, sizes.looked_up) == (4 * 9000 * 4, 4 * 4 * 4)


def test_sizes_of_half_precision_frozen_and_nested():
    inner = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, dtype="float16")])
    inner.layers[0].trainable = False
    inputs = keras.Input((6,))
    outputs = keras.layers.Dense(1)(keras.ops.tanh(inner(inputs)))
    sizes = find_sizes(keras.Model(inputs, outputs), [outputs])
    assert sizes.weights == 2 * 56 + 4 * 9
    assert sizes.gradients == 4 * 9
    assert sizes.outputs == 4


def test_sizes_of_a_subclassed_model():
    model = Subclassed()
    outputs = model({"x": np.ones((1, 3), "float32")})
    assert find_sizes(model, outputs).working is None
    assert find_sizes(model, outputs).outputs == 8


def test_measured():
    model = dense(optimizer="adam", loss="mse")
    model.fit(np.ones((8, 6)), np.ones((8, 2)), verbose=0)
    before = [np.array(keras.ops.convert_to_numpy(one)) for one in state_of(model)]
    advice = reports.advise(model, 16, (1, 2), link=LINK, steps=2)
    after = [keras.ops.convert_to_numpy(one) for one in state_of(model)]
    assert all(map(np.array_equal, before, after))
    one, two = advice.predictions
    assert one.compute_s > 0
    assert one.step_s == one.alone_s
    assert one.speedup == 1
    assert one.is_measured
    assert not two.is_measured
    assert two.least_s <= two.step_s <= two.most_s
    assert two.load.traffic.duplex == ON_JAX
    assert two.transfer_s == pytest.approx(two.load.traffic.seconds(LINK))
    assert "step on one device, measured here" in advice.settings
    assert advice.settings["link"] == str(LINK)


def test_measured_again_after_an_error(monkeypatch):
    model = dense(optimizer="adam", loss="mse")
    before = model.get_weights()
    seen = []

    def fail(self, batch, logs=None):
        seen.append(batch)
        raise KeyboardInterrupt

    monkeypatch.setattr("keras_multigpu.reports.timing.Stopwatch.on_train_batch_end", fail)
    with pytest.raises(KeyboardInterrupt):
        reports.advise(model, 16, link=LINK)
    assert seen == [0]
    assert all(map(np.array_equal, before, model.get_weights()))


@pytest.mark.parametrize(("batch_size", "counts"), [(1, (1,)), (5, (1, 2))])
def test_structures_that_are_given(batch_size, counts):
    """With `speed` it is a question about other devices: none is timed."""
    model = Subclassed()
    inputs = {"x": np.ones((batch_size, 3), "float32")}
    model(inputs)
    advice = reports.advise(model, batch_size, counts, speed=2, inputs=inputs, steps=1)
    assert [one.is_measured for one in advice.predictions] == [False] * len(counts)
    assert advice.predictions[0].load.memory is None


def test_inputs_that_are_made():
    inputs = {
        "words": keras.Input((5,), dtype="int32", name="words"),
        "image": keras.Input((4, 4, 3), dtype="float16", name="image"),
    }
    word = keras.layers.Embedding(7, 2)(inputs["words"])
    both = [keras.layers.Flatten()(word), keras.layers.Flatten()(inputs["image"])]
    outputs = {"out": keras.layers.Dense(1)(keras.layers.Concatenate()(both))}
    model = keras.Model(inputs, outputs)
    made = make_inputs(model, 3)
    assert made["words"].dtype == "int32"
    assert 0 <= made["words"].min() < made["words"].max() < 7
    assert made["image"].shape == (3, 4, 4, 3)
    advice = reports.advise(model, 4, (2,), link="pcie3", step_seconds=0.1)  # runs the model once
    assert advice.predictions[0].step_s > 0


def _bag(x):
    return keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(x))


class Inside(keras.layers.Layer):
    def __init__(self, *known):
        super().__init__()
        self.parts = [keras.layers.Embedding(one, 2) for one in known]

    def call(self, x):
        return sum(part(x) for part in self.parts)


TAKERS = {
    "embedding": lambda x: _bag(keras.layers.Embedding(50, 4)(x)),
    "after operations": lambda x: _bag(
        keras.layers.Embedding(50, 4)(keras.ops.reshape(x[:, ::-1], (-1, 8)))
    ),
    "nested": lambda x: keras.Sequential(
        [keras.Input((8,), dtype=x.dtype), keras.layers.Embedding(50, 4), keras.layers.Flatten()]
    )(x),
    "several": lambda x: keras.layers.Concatenate()(
        [keras.layers.Flatten()(keras.layers.Embedding(top, 2)(x)) for top in (90, 50)]
    ),
    "one-hot": lambda x: keras.layers.Flatten()(keras.ops.one_hot(x, 50)),
    "categories": lambda x: keras.layers.CategoryEncoding(50)(x),
    "multi-hot": lambda x: MultiHotDense(2, 50)(x),
    "own layer": lambda x: _bag(Inside(50)(x)),
}


@pytest.mark.parametrize(
    ("taker", "dtype"),
    [
        (taker, dtype)
        for taker in TAKERS
        for dtype in ("int32", "uint8", "int64", "float32")
        if not (taker in ("categories", "multi-hot") and dtype == "float32")  # integers only
    ],
)
def test_integers_are_drawn_from_all_that_a_layer_knows(taker, dtype):
    inputs = keras.Input((8,), dtype=dtype)
    made = make_inputs(keras.Model(inputs, TAKERS[taker](inputs)), 200)
    assert made.dtype == dtype
    assert set(np.unique(made)) == set(range(50))


def test_other_integers_are_no_zeros():
    inputs = keras.Input((4, 4, 3), dtype="uint8")
    scaled = keras.layers.Rescaling(1 / 255)(inputs)
    made = make_inputs(keras.Model(inputs, keras.layers.Flatten()(scaled)), 100)
    assert (made.min(), made.max()) == (0, 255)
    flags = keras.Input((8,), dtype="bool")
    made = make_inputs(keras.Model(flags, keras.ops.cast(flags, "float32")), 100)
    assert set(np.unique(made)) == {False, True}


def test_integers_are_valid_for_every_layer():
    words, scores = keras.Input((8,), dtype="int32"), keras.Input((8,))
    model = keras.Model(
        [words, scores],
        [_bag(Inside(50, 90)(words)), _bag(Inside(3)(words)), keras.ops.abs(scores)],
    )
    made = make_inputs(model, 100)
    assert set(np.unique(made[0])) == {0, 1, 2}
    assert made[1].min() < 0  # no indices


def test_integers_whose_range_no_layer_tells():
    inputs = keras.Input((8,), dtype="int32", name="words")
    model = keras.Model(inputs, keras.ops.take(np.ones((7, 2), "float32"), inputs, axis=0))
    match = r"`inputs` must be given if the valid integers.*input 'words' of int32. Give `inp"
    with pytest.raises(ValueError, match=match):
        make_inputs(model, 4)


@pytest.mark.parametrize("name", ["inputs", "targets"])
def test_fewer_rows_than_a_batch(name):
    given = {"inputs": np.ones((16, 6)), "targets": np.ones((16, 2))}
    given[name] = given[name][:5]
    match = rf"`{name}` must have at least batch_size=16 rows.*shapes \[\(5, .\)\]. Give 16 rows or"
    with pytest.raises(ValueError, match=match):
        reports.advise(dense(), 16, (1, 2), link=LINK, **given)


def test_more_devices_than_rows():
    match = r"must not exceed the batch_size=4 rows.*Received: 64 devices. Give fewer"
    with pytest.raises(ValueError, match=match):
        reports.advise(dense(), 4, (1, 64), link=LINK, step_seconds={4: 0.4, 1: 0.1})
    given = {"link": LINK, "step_seconds": 0.1}
    found = reports.advise(dense(), 4, **given)  # on 1, 2, 4 and 8
    assert {one.devices for one in found.predictions} == {1, 2, 4}
    assert any(note.startswith("Mode 'data' on 8 devices is left out: ") for note in found.notes)
    given |= {"modes": ("tower",)}
    assert reports.advise(dense(), 4, (64,), **given).predictions  # each takes the whole batch


def test_rows_are_repeated_if_there_are_fewer():
    found = take_rows({"a": np.arange(3), "b": None}, 5)
    assert found["a"].tolist() == [0, 1, 2, 0, 1]
    assert found["b"] is None
    assert take_rows(np.ones((3, 2)), 2).shape == (2, 2)


@pytest.mark.skipif(ON_JAX, reason="TensorFlow's own tensors")
def test_rows_of_ragged_tensors():
    ragged = pytest.importorskip("tensorflow").ragged.constant([[1], [2, 3], [4]])
    assert take_rows(ragged, 2).to_list() == [[1], [2, 3]]
    assert take_rows(ragged, 5).to_list() == ragged.to_list()


MODES = ("data", "committee") if ON_JAX else ("data", "committee", "model")


@pytest.mark.slow
@pytest.mark.parametrize("modes", [MODES, ("tower",)])
def test_what_is_here_is_timed(modes):
    inputs = keras.Input((6,))
    ends = [keras.layers.Dense(8, name=name)(inputs) for name in "abcdefgh"]
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Add()(ends)))
    model.compile("adam", "mse")
    model.fit(np.ones((8, 6)), np.ones((8, 2)), verbose=0)
    before = [np.array(keras.ops.convert_to_numpy(one)) for one in state_of(model)]
    places = [getattr(one.value, "device", None) for one in model.variables]
    numbers = random.getstate()
    advice = reports.advise(model, 16, (1, 2, 8), modes=modes, steps=1)
    for place, mode in enumerate(modes):
        one, two, eight = advice.predictions[3 * place : 3 * place + 3]
        assert {one.mode, two.mode, eight.mode} == {mode}
        assert [one.is_measured, two.is_measured, eight.is_measured] == [True, True, False]
        assert two.least_s <= two.step_s <= two.most_s
        assert two.alone_s == one.step_s * (2 if mode in ("tower", "committee") else 1)
        assert eight.most_s > eight.least_s > 0
        words = [note for note in advice.notes if f"2 devices in mode {mode!r}" in note]
        assert len(words) == 1  # each is told once, by the verdict or below
        assert " took " in words[0]
    assert "processors" in advice.settings  # which virtual devices share
    assert "Virtual devices share one processor" in advice.notes[-1]
    after = [keras.ops.convert_to_numpy(one) for one in state_of(model)]
    assert all(map(np.array_equal, before, after))
    assert places == [getattr(one.value, "device", None) for one in model.variables]
    assert numbers == random.getstate()


def test_a_step_time_that_is_given_is_about_other_devices():
    told = "The devices here are virtual: they share one processor"
    advice = reports.advise(dense(), 16, (2,), step_seconds=0.1)
    assert not advice.predictions[0].is_measured
    assert any(note.startswith(told) for note in advice.notes)
    for known in ({"processors": 1}, {"link": LINK}):
        assert told not in str(reports.advise(dense(), 16, (2,), step_seconds=0.1, **known))


def test_the_models_own_loss():
    seen = []

    def loss(y_true, y_pred):
        seen.append(tuple(y_true.shape))
        return keras.ops.mean(y_pred, axis=-1)

    model = dense(optimizer="sgd", loss=loss)
    given = {"inputs": np.ones((16, 6)), "targets": np.ones((16, 1))}
    reports.advise(model, 16, (1,), link=LINK, steps=1, **given)
    assert (16, 1) in [(shape[0] or 16, *shape[1:]) for shape in seen]


def test_several_steps_in_an_execution():
    """The first execution of an epoch is not timed, however many steps it has."""
    model = dense(optimizer="sgd", loss="mse", steps_per_execution=4)
    given = {"inputs": np.ones((16, 6)), "targets": np.ones((16, 2))}
    (found,) = reports.advise(model, 16, (1,), link=LINK, steps=2, **given).predictions
    assert found.is_measured
    assert 0 < found.step_s < 1


def test_a_model_that_takes_batches_of_one_size():
    cells = keras.layers.SimpleRNN(3, stateful=True)
    model = keras.Sequential([keras.Input((2, 4), batch_size=8), cells])
    model.compile("sgd", "mse")
    advice = reports.advise(model, 8, (1, 2), link=LINK, steps=1)
    assert advice.notes[-2].startswith("The model takes batches of this size only")
    one, two = (prediction.load.rows_s for prediction in advice.predictions)
    assert two == pytest.approx(one / 2)
    assert not np.any(cells.states[0])
    with pytest.raises(ValueError, match="Received batch size: 16"):
        reports.advise(model, 16, (1, 2), link=LINK, step_seconds=0.1)


@pytest.mark.parametrize(
    ("given", "fixed_s", "row_s"), [(0.016, 0.0, 0.001), ({16: 0.016, 8: 0.012}, 0.008, 0.0005)]
)
def test_step_times_that_are_given(given, fixed_s, row_s, monkeypatch):
    monkeypatch.setattr("keras_multigpu.reports.timing.measure_steps", None)
    advice = reports.advise(dense(), 16, (1, 2, 16), link=LINK, step_seconds=given)
    rows = [rows * row_s for rows in (16, 8, 1)]
    for found, counts in (
        ([one.least_s - one.transfer_s for one in advice.predictions], (1, 1, 1)),
        ([one.compute_s for one in advice.predictions], (1, 1.25, 4.75)),
        ([one.most_s - one.transfer_s for one in advice.predictions], (1, 2, 16)),
    ):
        assert found == pytest.approx([n * fixed_s + one for n, one in zip(counts, rows)])
    assert "step on one device, given" in advice.settings
    assert not any(one.is_measured for one in advice.predictions)
    said = any("the step time of one batch size" in note for note in advice.notes)
    assert said == (given == 0.016)


def test_speed_processors_and_overlap():
    advice = reports.advise(
        dense(), 16, (2,), link=LINK, step_seconds=0.016, speed=4, processors=1, overlap=1
    )
    found = advice.predictions[0]
    assert found.alone_s == pytest.approx(0.004)
    assert found.compute_s == pytest.approx(0.004)
    assert found.transfer_s == 0
    assert advice.settings["speed"] == "4 times that of the device here"
    assert advice.settings["processors"] == "they keep 1 device busy"
    assert advice.settings["overlap"] == "100% of the copies hidden"


def test_modes():
    advice = reports.advise(
        dense(), 16, (2,), modes=("data", "tower", "committee", "model"), link=LINK,
        step_seconds=0.016, cuts={2: Cut(64, 1, 0.5)},
    )  # fmt: skip
    assert list(advice.verdicts) == ["data", "tower", "committee", "model"]
    assert advice.predictions[3].load.traffic.sent == 64
    facts = {mode: "as one with 2 replicas" in text for mode, text in advice.verdicts.items()}
    assert facts == {"data": False, "tower": True, "committee": True, "model": False}


@pytest.mark.slow
def test_transfers_that_were_counted():
    model, link = dense(), Link("slow", 1e6)
    parallel = make_parallel(model, 2)
    parallel.compile("adam", "mse")
    report = reports.transfers(parallel, (np.ones((16, 6)), np.ones((16, 2))))
    settings = {"link": link, "step_seconds": 0.016}
    guessed, counted = (
        reports.advise(model, 16, (2, 4), counted=given, **settings).predictions
        for given in ((), report)
    )
    kinds = ("weights", "gradients", "activations", "other")
    sent = {
        one.source: sum(
            other.bytes
            for other in report.training
            if other.source == one.source and other.kind in kinds
        )
        for one in report.training
        if one.source != "host"
    }
    assert counted[0].load.traffic.sent in sent.values()
    assert counted[0].load.traffic.sent == pytest.approx(guessed[0].load.traffic.sent, rel=0.2)
    assert counted[1] == guessed[1]


def test_counts_that_do_not_fit():
    model = dense()
    report = reports.TransfersReport([], [], ("cpu:0", "cpu:1"), mode="data", batch_size=8)
    foreign = reports.TransfersReport([], [], ("cpu:0",), batch_size=16, settings={"model": "m"})
    parallel = make_parallel(model, 2)
    untrained = reports.transfers(parallel, np.ones((16, 6)))
    cases = {
        "one of batches of 8 rows": report,
        "one of batches of 8 rows, a int": [report, 1],
        "one of the model 'm'": [foreign],
        "one of predictions only": untrained,
    }
    for given, counted in cases.items():
        match = f"of 'sequential.*' on batches of batch_size=16. Received: {given}. Give"
        with pytest.raises(ValueError, match=match):
            reports.advise(model, 16, (2,), link=LINK, step_seconds=0.016, counted=counted)


def test_counts_of_what_is_not_asked():
    report = reports.TransfersReport([], [], ("cpu:0", "cpu:1"), mode="data", batch_size=16)
    for asked in ({"n_gpus": (4,)}, {"n_gpus": (2,), "modes": ("tower",)}):
        with pytest.raises(ValueError, match="Received: mode 'data' on 2 devices. Add these to"):
            reports.advise(dense(), 16, link=LINK, step_seconds=0.016, counted=report, **asked)


def test_texts_are_to_be_given():
    inputs = keras.Input((1,), dtype="string")
    model = keras.Model(inputs, keras.layers.Identity()(inputs))
    with pytest.raises(ValueError, match=r"or if it takes texts. Received: .*'string'"):
        make_inputs(model, 4)


@pytest.mark.skipif(ON_JAX, reason="XLA divides any model")
def test_models_that_cannot_be_divided():
    model, inputs = Subclassed(), {"x": np.ones((16, 3), "float32")}
    model(inputs)
    with pytest.raises(ValueError, match="do without mode 'model'"):
        reports.advise(model, 16, (2,), modes=("model",), step_seconds=0.016, inputs=inputs)


def test_each_sentence_is_said_once():
    """The reason to measure is the same one for several modes."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
    times = {16: 0.02, 8: 0.0199}
    modes = ("tower", "committee")
    advice = reports.advise(model, 16, (2,), modes=modes, link="nvlink4", step_seconds=times)
    why = "one device doesn't show whether several pay this once or each."
    assert [why in text for text in advice.verdicts.values()] == [True, True]
    assert sum(why in note for note in advice.notes) == 1
    assert len(set(advice.notes)) == len(advice.notes)


def test_devices_that_cannot_divide_a_model_are_left_out():
    model, inputs = Subclassed(), {"x": np.ones((16, 3), "float32")}
    model(inputs)
    given = {"step_seconds": 0.016, "inputs": inputs, "link": LINK}
    advice = reports.advise(model, 16, (1, 2, 4), modes=("data", "model"), **given)
    here = [1, 2] if ON_JAX else [1]
    assert [one.devices for one in advice.predictions] == [1, 2, 4, *here]
    counts = "4 devices is" if ON_JAX else "2 and 4 devices is"
    told = [note.partition(" left out: ")[0] for note in advice.notes if " left out: " in note]
    assert told == [f"Mode 'model' on {counts}"]
    with pytest.raises(ValueError, match="Choose another number|do without mode 'model'"):
        reports.advise(model, 16, (4,), modes=("model",), **given)


def test_the_link_of_this_machine(monkeypatch):
    advice = reports.advise(dense(), 16, (2,), step_seconds=0.016)
    assert advice.settings["link"].startswith("cpu:0 to cpu:1: ")
    monkeypatch.setattr(
        "keras_multigpu.reports.interconnect.choose_devices", lambda n, names: ("cpu:0",)
    )
    advice = reports.advise(dense(), 16, (2,), step_seconds=0.016)
    assert advice.settings["link"].startswith("PCIe 4.0 x16: 31.51 GB/s")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": 3}, r"`model` must be a Keras 3 model.*model=3 \(of type builtins.int\)"),
        ({"model": keras.Sequential([keras.layers.Dense(1)])}, r"`model` must be built"),
        ({"batch_size": 0}, r"`batch_size` must be a positive integer. Received: batch_size=0"),
        ({"n_gpus": (2, 2)}, r"`n_gpus` must be a sequence.*Received: n_gpus=\(2, 2\)"),
        ({"modes": ()}, r"sequence of one mode or more. Received: modes=\(\). Give `modes=\('data"),
        (
            {"modes": "model"},
            r"one mode or more. Received: modes='model'. Give `modes=\('model',\)`",
        ),
        ({"placement": "spread"}, r"`placement` must be a dict from .*placement='spread'. For oth"),
        ({"cuts": {2: 3}}, r"`cuts` must be a dict from .*Received: cuts=\{2: 3\}. Give"),
        ({"batch_size": np.ones((8, 3))}, r"Received: batch_size=an array of shape \(8, 3\)"),
        ({"cuts": reports.Cut(1, 1)}, r"`cuts` must be a dict from .*Received: cuts=Cut\("),
        ({"cuts": {2: reports.Cut(1, 1)}}, r"`cuts` are for mode 'model'.*modes=\('data',\)"),
        ({"model": dense(optimizer="sgd", run_eagerly=True)}, "`model` must not run eagerly"),
        ({"placement": {"dense": 0}}, r"`placement` is for mode 'model'.*modes=\('data',\)"),
        (
            {"modes": ("fast",)},
            r"`modes` must be of 'data', .*Received: mode='fast'. A 'committee' is",
        ),
        ({"link": "isdn"}, r"`link` must be one of.*Received: link='isdn'"),
        ({"step_seconds": 0}, r"`step_seconds` must be a finite number, above 0.*step_seconds=0"),
        ({"step_seconds": {8: 1}}, r"on batch_size=16 rows.*Received: step_seconds={8: 1}. Give {"),
        ({"step_seconds": {16: 1}}, r"one smaller batch. Received: step_seconds={16: 1}"),
        ({"step_seconds": {16: 1, 32: 2}}, r"Received: step_seconds={16: 1, 32: 2}"),
        ({"step_seconds": {16: 1, 8: 2}}, r"longer for fewer rows. Received: .*={16: 1, 8: 2}"),
        ({"step_seconds": {16: 1, 8: -2}}, r"`step_seconds` must be.*Received: step_seconds=-2"),
        ({"speed": 0}, r"`speed` must be a finite number, above 0. Received: speed=0"),
        ({"processors": -1}, r"`processors` must be a finite number.*Received: processors=-1"),
        ({"overlap": -0.1}, r"`overlap` must be a share, from 0 to 1. Received: overlap=-0.1"),
        ({"overlap": 1.1}, r"`overlap` must be a share, from 0 to 1. Received: overlap=1.1. Give"),
        ({"steps": 0}, r"`steps` must be a positive integer. Received: steps=0"),
    ],
)
def test_refused(changes, match):
    given = {"model": dense(), "batch_size": 16, "n_gpus": (1, 2), "link": LINK} | changes
    with pytest.raises(ValueError, match=match):
        reports.advise(given.pop("model"), given.pop("batch_size"), **given)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_parallel_model_is_refused(is_compiled):
    parallel = make_parallel(dense(), 2)
    if is_compiled:
        parallel.compile("sgd", "mse")
    told = "`model` is a parallel model already, on 2 devices. .* Pass its template, `model.templ"
    with pytest.raises(ValueError, match=told):
        reports.advise(parallel, 16, (1, 2), link=LINK)
    with pytest.raises(ValueError, match=told):
        reports.plan(parallel, 16, 2, memory="1 GB", link=LINK)


@pytest.mark.parametrize("shape", [None, (None, 3)])
def test_a_model_that_does_not_tell_its_shapes(shape):
    if shape is None:
        model = Subclassed()
        model({"x": np.ones((1, 3), "float32")})
    else:
        model = keras.Sequential([keras.Input(shape), keras.layers.Dense(1)])
    with pytest.raises(
        ValueError, match=r"`inputs` must be given.*with the input shapes .*Give `inputs=x\[:16\]`"
    ):
        reports.advise(model, 16, link=LINK)


@pytest.mark.skipif(ON_JAX, reason="on JAX a layer can't be on one device")
def test_a_placement_is_for_more_devices_than_one():
    model = dense(optimizer="sgd", loss="mse")
    placement = {layer.name: number for number, layer in enumerate(model.layers)}
    for link in (LINK, None):  # with a link the devices here are not timed
        given = {"placement": placement, "link": link, "steps": 1}
        advice = reports.advise(model, 8, n_gpus=(1, 2), modes=("data", "model"), **given)
        timed = {(one.mode, one.devices): one.is_measured for one in advice.predictions}
        assert timed["model", 2] is (link is None)


@pytest.mark.parametrize(
    ("cut", "told"),
    [
        (("a", 1), "`size` must be a positive integer, or 0. Received: size='a'"),
        ((8, -1), "`copies` must be a positive integer, or 0. Received: copies=-1"),
        ((8, 1, 0.0), "`share` must be a share above 0, up to 1. Received: share=0.0"),
        ((8, 1, 1.0, 2.5), "`memory` must be a positive integer, or 0. Received: memory=2.5"),
    ],
)
def test_a_cut_of_something_else_is_refused(cut, told):
    with pytest.raises(ValueError, match=told):
        Cut(*cut)


def test_a_step_that_is_timed_on_a_cpu_says_little_of_other_devices():
    model = dense(optimizer="adam", loss="mse")
    asked = {"n_gpus": (2,), "link": "nvlink4", "steps": 1}
    told = "The step was timed on 'cpu:0', and the link is one of other devices"
    assert told in "".join(reports.advise(model, 16, **asked).notes)
    assert told in "".join(reports.plan(model, 16, 2, memory="1 GB", link="nvlink4", steps=1).notes)
    faster = reports.advise(model, 16, **asked, speed=50)
    assert told not in "".join(faster.notes)
    assert "step on one device, measured here (with the speed 50)" in faster.settings
    assert told not in "".join(reports.advise(model, 16, **asked, step_seconds=0.1).notes)


def test_targets_need_a_compiled_model():
    given = {"inputs": np.ones((16, 6)), "targets": np.ones((16, 2)), "link": LINK}
    told = "`targets` are compared by the loss .* which is not compiled. Compile it, or leave"
    with pytest.raises(ValueError, match=told):
        reports.advise(dense(), 16, (2,), **given)
    with pytest.raises(ValueError, match=told):
        reports.plan(dense(), 16, 2, memory="1 GB", step_seconds=0.1, **given)


def test_a_plot_of_many_rows_can_be_read():
    counts, modes = (1, 2, 4, 8, 16, 32, 64, 128, 256), ("data", "tower", "committee")
    arguments = {"n_gpus": counts, "modes": modes, "link": LINK, "step_seconds": 0.1}
    assert not hidden_texts(reports.advise(dense(), 256, **arguments).plot())
