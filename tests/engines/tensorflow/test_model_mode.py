"""Model mode on TensorFlow: the layers of one model on different devices."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from support.cases import CASES, build_equal, compile_case
from support.parity import difference, take, variables
from support.versions import needs_loose_inputs

from keras_multigpu import make_parallel, reports
from keras_multigpu.graphs.graph import is_graph, read_graph

pytestmark = pytest.mark.thin(12)


def _device(variable):
    return int(variable.value.device[-1])


def _alternating(template, count):
    """The worst placement: each layer on another device than the one before."""
    paths = dict.fromkeys("/".join(call.path) for call in read_graph(template).calls)
    return {path: number % count for number, path in enumerate(paths)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_trains_like_one_device(case, rng, tmp_path):
    x, y = case.data(rng, 70)
    plain, template = build_equal(case)
    if not is_graph(template):
        with pytest.raises(ValueError, match="places the layers of a graph"):
            make_parallel(template, 2, mode="model", placement={"any": 1})
        return
    placement = _alternating(template, 3) if template.built else None
    parallel = make_parallel(template, 3, mode="model", placement=placement)
    histories = []
    for model in (plain, parallel):
        compile_case(case, model)
        keras.utils.set_random_seed(3)
        histories.append(model.fit(x, y, 32, 2, shuffle=False, verbose=0).history)
    assert difference(*histories) < case.tolerance
    assert difference(variables(plain), variables(parallel)) < case.tolerance
    outputs = [model.predict(take(x, 5), verbose=0) for model in (plain, parallel, template)]
    assert difference(*outputs[:2]) < case.tolerance
    assert difference(*outputs[1:]) < case.tolerance
    assert len(set(parallel.placement.values())) == min(3, len(parallel.placement))
    parallel.save_weights(tmp_path / "model.weights.h5")
    plain.load_weights(tmp_path / "model.weights.h5")
    assert difference(plain.get_weights(), parallel.get_weights()) == 0


def _branches(length=80, words=100):
    """Two reviews and how they match: the shape of DeepCoNN (Zheng, Noroozi and Yu, 2017)."""

    def branch(name):
        x = inputs = keras.Input((length,), dtype="int32", name=name)
        x = layers.Embedding(words, 50, name=f"{name}_embedding")(x)
        x = layers.Conv1D(10, 3, activation="tanh", name=f"{name}_conv")(x)
        x = layers.GlobalMaxPooling1D(name=f"{name}_max")(x)
        return inputs, layers.Dense(64, name=f"{name}_dense")(x)

    (user, left), (item, right) = branch("user"), branch("item")
    return keras.Model([user, item], layers.Dot(1, name="match")([left, right]))


def _branch_data(rng, rows=32, length=80, words=100):
    x = [rng.integers(0, words, (rows, length)) for _ in range(2)]
    return x, rng.normal(size=(rows, 1)).astype("float32")


def test_branches_go_to_different_devices():
    parallel = make_parallel(_branches(), 2, mode="model")
    homes = {
        name: {number for path, number in parallel.placement.items() if path.startswith(name)}
        for name in ("user", "item")
    }
    assert sorted(map(list, homes.values())) == [[0], [1]]
    assert parallel.placement["match"] == 0  # where the loss is computed
    for variable in parallel.variables:
        name = variable.path.partition("_")[0]
        assert {_device(variable)} == homes[name]


def test_weights_and_slots_are_with_their_layers(rng):
    parallel = make_parallel(_branches(), 2, mode="model")
    parallel.compile("adam", "mse")
    parallel.fit(*_branch_data(rng), verbose=0)
    slots = [slot for slot in parallel.optimizer.variables if len(slot.shape)]
    assert len(slots) == 2 * len(parallel.trainable_variables)
    for slot in slots:
        owner = next(v for v in parallel.variables if v.path.replace("/", "_") in slot.path)
        assert _device(slot) == _device(owner)


def test_a_chain_is_cut_into_stages():
    sizes = [64, 64, 64, 64, 64, 64, 64, 64]
    model = keras.Sequential([keras.Input((64,)), *[layers.Dense(size) for size in sizes]])
    parallel = make_parallel(model, 4, mode="model")
    assert list(parallel.placement.values()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_chain_is_cut_where_little_crosses():
    narrow = [256, 4, 256]  # about as much work on either side of the bottleneck
    model = keras.Sequential([keras.Input((256,)), *[layers.Dense(size) for size in narrow]])
    parallel = make_parallel(model, 2, mode="model")
    assert list(parallel.placement.values()) == [0, 0, 1] or parallel.placement["dense"] == 0


def test_a_shared_layer_is_on_one_device():
    left, right = keras.Input((8,)), keras.Input((8,))
    shared = layers.Dense(32, name="shared")
    ends = [layers.Dense(32)(shared(x)) for x in (left, right)]
    model = keras.Model([left, right], layers.Add()(ends))
    parallel = make_parallel(model, 2, mode="model")
    calls = parallel.stages.graph.calls
    numbers = [n for call, n in zip(calls, parallel.stages.numbers) if call.layer is shared]
    assert len(numbers) == 2
    assert len(set(numbers)) == 1


def test_layers_of_models_within_the_model_are_placed():
    backbone = keras.Sequential(
        [keras.Input((16,)), layers.Dense(64, name="a"), layers.Dense(16, name="b")], name="body"
    )
    inputs = keras.Input((16,))
    model = keras.Model(inputs, layers.Dense(2, name="head")(backbone(inputs)))
    parallel = make_parallel(model, 2, mode="model", placement={"body/a": 1, "head": 1})
    assert parallel.placement == {"body/a": 1, "body/b": 0, "head": 1}
    whole = make_parallel(model, 2, mode="model", placement={"body": 1})
    assert whole.placement == {"body/a": 1, "body/b": 1, "head": 0}
    assert [_device(layer.kernel) for layer in backbone.layers] == [1, 1]


def test_random_layers_draw_what_one_device_would(rng):
    x, y = rng.normal(size=(32, 6)).astype("float32"), rng.normal(size=(32, 1))
    results = []
    for mode in (None, "model"):
        keras.utils.set_random_seed(5)
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(32), layers.Dropout(0.5), layers.Dense(1)]
        )
        if mode:
            model = make_parallel(model, 2, mode, placement={"dropout.*": 1})
        model.compile("sgd", "mse")
        model.fit(x, y, verbose=0)
        results.append(model.get_weights())
    assert difference(*results) < 1e-6


def test_one_device_and_compiled_templates(rng):
    x, y = _branch_data(rng)
    template = _branches()
    template.compile("adam", "mse")
    template.fit(x, y, verbose=0)
    plain = keras.models.clone_model(template)
    plain.compile("adam", "mse")
    plain.build_from_config(template.get_build_config())
    plain.optimizer.build(plain.trainable_variables)
    plain.set_weights(template.get_weights())
    for mine, other in zip(plain.optimizer.variables, template.optimizer.variables):
        mine.assign(other)
    parallel = make_parallel(template, 2, mode="model")  # compiled, with the slots as they are
    for model in (plain, parallel):
        model.fit(x, y, verbose=0)
    assert difference(plain.get_weights(), parallel.get_weights()) < 1e-6
    # The template goes on by itself, with the weights where they are now ...
    for model in (plain, template):
        model.fit(x, y, verbose=0)
    assert np.isfinite(template.evaluate(x, y, verbose=0))
    # ... and is brought back to one device.
    alone = make_parallel(template, 1, mode="model")
    assert {_device(variable) for variable in template.variables} == {0}
    assert set(alone.placement.values()) == {0}
    assert difference(alone.predict(x, verbose=0), template.predict(x, verbose=0)) < 1e-6


def test_models_traced_before_use_the_weights_that_moved(rng):
    x, y = _branch_data(rng)
    template = _branches()
    data = make_parallel(template, 2)
    data.compile("sgd", "mse")
    data.fit(x, y, verbose=0)
    placed = make_parallel(template, 2, mode="model")
    placed.compile(keras.optimizers.SGD(0.5), "mse")
    placed.fit(x, y, verbose=0)
    before = template.get_weights()
    assert difference(data.predict(x, verbose=0), placed.predict(x, verbose=0)) < 1e-5
    data.fit(x, y, verbose=0)
    assert difference(before, placed.get_weights()) > 0


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_stages_and_mixed_precision(compiled, rng):
    x, y = rng.normal(size=(24, 8)).astype("float32"), rng.normal(size=(24, 2))
    keras.config.set_dtype_policy("mixed_bfloat16")
    results = []
    for mode in (None, "model"):
        keras.utils.set_random_seed(5)
        model = keras.Sequential(
            [keras.Input((8,)), layers.Dense(32, "tanh"), layers.Dense(2, dtype="float32")]
        )
        model = make_parallel(model, 2, mode) if mode else model
        model.compile("sgd", "mse", jit_compile=compiled)
        model.fit(x, y, epochs=2, verbose=0)
        results.append(model.get_weights())
    assert difference(*results) < 2e-2


@pytest.mark.parametrize("is_scaled", [False, True])
def test_compiled_updates_that_are_not_made_in_each_step(is_scaled, rng):
    """Branches, also within branches, that assign weights of both devices."""
    x, y = rng.normal(size=(16, 4)), rng.normal(size=(16, 2))
    keras.utils.set_random_seed(1)
    template = _mlp()
    models = keras.models.clone_model(template), make_parallel(template, 2, "model")
    models[0].set_weights(template.get_weights())
    for model in models:
        optimizer = keras.optimizers.Adam(gradient_accumulation_steps=2)
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer) if is_scaled else optimizer
        model.compile(optimizer, "mse", jit_compile=True)
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert len({*models[1].placement.values()}) == 2
    assert difference(*map(variables, models)) < 1e-6


@pytest.mark.filterwarnings("ignore:The step calls .* itself")
@pytest.mark.parametrize("is_called", [False, True], ids=["template", "parallel"])
def test_random_numbers_of_a_step_that_xla_compiles(is_called):
    """Those of layers and those of the step itself: XLA draws others than TensorFlow."""
    drops = layers.Dropout(0.5, seed=1)
    hidden = [layers.Dense(8, "tanh"), drops, layers.Dense(8)]
    model = keras.Sequential([keras.Input((6,)), *hidden])
    seeds = keras.random.SeedGenerator(4)
    states = [seeds.state, drops.seed_generator.state]
    begin = [one.numpy() for one in states]

    def step():
        return called(keras.random.normal((5, 6), seed=seeds), training=True)

    called = model
    expected = tf.function(step, jit_compile=True)()
    parallel = make_parallel(model, 2, "model")
    called = parallel if is_called else model
    for one, value in zip(states, begin):
        one.assign(value)
    assert difference([expected], [parallel.function(step, jit_compile=True)()]) < 1e-5


def test_losses_and_state_of_layers(rng):
    class Penalized(layers.Layer):
        def call(self, inputs):
            self.add_loss(0.1 * ops.mean(ops.square(inputs)))
            return inputs

    x, y = rng.normal(size=(24, 8)).astype("float32"), rng.normal(size=(24, 2))
    results = []
    for mode in (None, "model"):
        keras.utils.set_random_seed(5)
        inputs = keras.Input((8,))
        hidden = layers.BatchNormalization()(layers.Dense(16, activity_regularizer="l2")(inputs))
        model = keras.Model(inputs, layers.Dense(2)(Penalized()(hidden)))
        options = {"placement": {"batch_normalization.*": 1, "penalized.*": 1}}
        model = make_parallel(model, 2, mode, **options) if mode else model
        model.compile("sgd", "mse")
        history = model.fit(x, y, epochs=2, batch_size=8, shuffle=False, verbose=0).history
        results.append((history["loss"], model.get_weights()))
    assert difference(*results) < 1e-5


def test_callbacks_and_files(rng, tmp_path):
    x, y = _branch_data(rng)
    parallel = make_parallel(_branches(), 2, mode="model")
    parallel.compile("adam", "mse")
    best = keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", monitor="loss")
    parallel.fit(x, y, epochs=2, verbose=0, callbacks=[best])
    again = keras.saving.load_model(tmp_path / "best.keras")
    assert again.mode == "model"
    assert again.placement == parallel.placement
    assert [_device(v) for v in again.variables] == [_device(v) for v in parallel.variables]
    assert difference(variables(parallel), variables(again)) == 0
    for model in (parallel, again):
        model.fit(x, y, verbose=0, shuffle=False)
    assert difference(variables(parallel), variables(again)) < 1e-6


def test_on_fewer_devices(rng, tmp_path, monkeypatch):
    x, _ = _branch_data(rng)
    placement = {"user.*": 3, "item.*": 1}
    parallel = make_parallel(_branches(), 4, mode="model", placement=placement)
    parallel.save(tmp_path / "model.keras")
    fewer = ("cpu:0", "cpu:1")
    monkeypatch.setattr("keras_multigpu.modes.saving.choose_again", lambda *_: fewer)
    with pytest.warns(UserWarning, match="saved on 4 devices, and 2 are here"):
        again = keras.saving.load_model(tmp_path / "model.keras")
    halves = {name: number // 2 for name, number in parallel.placement.items()}
    assert again.placement == halves
    assert set(halves.values()) == {0, 1}
    assert difference(parallel.predict(x, verbose=0), again.predict(x, verbose=0)) < 1e-6


def test_on_fewer_devices_each_in_use_has_a_device(tmp_path, monkeypatch):
    parallel = make_parallel(_mlp(), 4, mode="model", placement={"one": 2, "two": 3})
    parallel.save(tmp_path / "model.keras")
    there = ("cpu:0", "cpu:1")
    monkeypatch.setattr("keras_multigpu.modes.saving.choose_again", lambda *_: there)
    with pytest.warns(UserWarning, match="saved on 4 devices, and 2 are here"):
        again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.placement == {"one": 0, "two": 1}


def _mlp():
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(3, name="one"), layers.Dense(2, name="two")]
    )


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"three": 0}, r"must match a layer. Received: 'three', .* The layers are: one, two"),
        ({"one": 2}, r"device numbers from 0 to 1. Received: 'one': 2, with 2 devices"),
        (["one"], r"Received: placement=\['one'\]\. Write `placement=\{'dense': 1\}`"),
        ({"one": -1}, "Received: 'one': -1"),
        ({"one": True}, "Received: 'one': True"),
        ({"one": "cpu:1"}, "Received: 'one': 'cpu:1'"),
        ({"one": 0, "o.*": 1}, "layer 'one', which 'one' and 'o.\\*' match"),
        ({}, "Received: placement={}"),
        ({"one[": 0}, r"'one\[', which is no regular expression: unterminated"),
    ],
)
def test_a_placement_that_does_not_fit_is_refused(placement, message):
    model = _mlp()
    homes = [_device(variable) for variable in model.variables]
    with pytest.raises(ValueError, match=message):
        make_parallel(model, 2, mode="model", placement=placement)
    assert [_device(variable) for variable in model.variables] == homes


def test_layers_are_not_added_afterwards():
    parallel = make_parallel(_mlp(), 2, mode="model")
    with pytest.raises(ValueError, match="placed once.*a call of `add`"):
        parallel.add(layers.Dense(1))


@pytest.mark.parametrize(
    "change", [lambda model: model.add(layers.Dense(1)), lambda one: one.pop()]
)
def test_changes_of_the_template_are_noticed(change, rng):
    model = _mlp()
    parallel = make_parallel(model, 2, mode="model")
    x = rng.normal(size=(6, *model.input_shape[1:]))
    change(model)
    with pytest.raises(ValueError, match="placed once.*whose layers were changed since"):
        parallel.predict(x, verbose=0)
    again = make_parallel(model, 2, mode="model")
    assert again.predict(x, verbose=0).shape == model.predict(x, verbose=0).shape


def test_a_model_that_has_the_modes_names_is_refused():
    model = _mlp()
    model.placement = 1
    with pytest.raises(ValueError, match="attributes of the same names: placement"):
        make_parallel(model, 2, mode="model")


def test_only_the_ends_of_branches_cross(rng):
    rows, length, words = 16, 800, 200
    x, y = _branch_data(rng, rows, length, words)
    parallel = make_parallel(_branches(length, words), 2, mode="model")
    parallel.compile("adam", "mse")
    report = reports.transfers(parallel, (x, y))
    end = rows * 64 * 4
    assert report.least == 2 * end
    assert report.bytes("training", "cpu:1", "cpu:0") == {"activations": end}
    back = report.bytes("training", "cpu:0", "cpu:1")
    assert back.pop("gradients") == end
    assert back.pop("inputs") == rows * length * 4
    # Adam's learning rate and powers of its moments, numbers one by one.
    assert back.pop("other") <= 8 * 5 * len(parallel.trainable_variables)
    assert not back
    assert report.bytes("prediction", "cpu:1", "cpu:0") == {"activations": end}
    assert "times as much" not in str(report)


def test_weight_decay_and_averages_are_with_their_layers():
    def sent(optimizer):
        model = keras.Sequential([keras.Input((40,)), *[layers.Dense(40) for _ in range(4)]])
        parallel = make_parallel(model, 2, mode="model")
        parallel.compile(optimizer, "mse")
        x = np.ones((8, 40), "float32")
        table = reports.transfers(parallel, (x, x)).to_dataframe()
        return table["bytes"].sum()

    found = sent(keras.optimizers.AdamW(use_ema=True, weight_decay=0.1))
    assert found < 1.1 * sent("sgd")


def test_a_bad_placement_is_told(rng):
    x, y = _branch_data(rng)
    template = _branches()
    parallel = make_parallel(template, 2, mode="model", placement=_alternating(template, 2))
    parallel.compile("sgd", "mse")
    report = reports.transfers(parallel, (x, y))
    sent = report.bytes("training")
    embedded = 32 * 80 * 50 * 4
    assert sent["activations"] > 2 * embedded
    assert sent["gradients"] > 2 * embedded
    factor = (sent["activations"] + sent["gradients"]) / report.least
    assert f"That is {factor:.1f} times as much as the placement chosen by default" in str(report)


def test_plot_of_a_placement(tmp_path):
    parallel = make_parallel(_branches(), 2, mode="model")
    (axes,) = reports.plot_placement(parallel, rows=10).axes
    texts = [text.get_text() for text in axes.texts]
    assert {"user_embedding", "item_dense", "match"} <= set(texts)
    assert texts.count("sends 5.12 kB") == 1  # 10 rows of 64 numbers, there and back
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["cpu:0", "cpu:1", "bytes that cross in a step of 10 rows"]
    with pytest.raises(ValueError, match="in mode 'model' on TensorFlow.* Received: parallel="):
        reports.plot_placement(make_parallel(_mlp(), 2))
    with pytest.raises(ValueError, match="`rows` must be a positive integer. Received: rows=0"):
        reports.plot_placement(parallel, rows=0)


def test_advice_on_placements():
    """One device, a branch on each of two, and devices alternating from layer to layer."""
    model, found = _branches(800, 500), []
    settings = {"link": "pcie3", "step_seconds": 0.02, "modes": ("model",)}
    for placement in (None, {".*_embedding": 1, ".*_max": 1}):
        one, two = reports.advise(
            model, 100, (1, 2), processors=1, placement=placement, **settings
        ).predictions
        assert one.step_s == pytest.approx(0.02)
        found.append(two)
    branches, alternating = found
    assert branches.load.traffic.sent == 100 * 64 * 4
    assert alternating.load.traffic.sent > 2 * 100 * 800 * 50 * 4
    assert 0.02 < branches.step_s < alternating.step_s
    (alone,) = reports.advise(model, 100, (2,), **settings).predictions
    assert 0.5 <= alone.compute_s / 0.02 < 0.6  # two processors, which work at once


def _functional(name, inputs, outputs):
    return keras.Model(inputs, outputs, name=name)


def _nested_on_a_layer():
    x = keras.Input((6,))
    body = _functional("body", x, layers.Dense(6, name="dense")(x))
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(2)(body(layers.Rescaling(0.5)(inputs))))


def _nested_in_a_sequence():
    x = keras.Input((6,))
    body = _functional("body", x, layers.Dense(6, name="dense")(x))
    return keras.Sequential([keras.Input((6,)), layers.Rescaling(0.5), body, layers.Dense(2)])


def _nested_twice():
    x, y, inputs = (keras.Input((6,)) for _ in range(3))
    inner = _functional("inner", x, layers.Dense(6, "tanh")(x))
    outer = _functional("outer", y, inner(inner(y * 2)))
    return keras.Model(inputs, layers.Dense(2)(outer(outer(inputs) + inputs)))


def _inputs_by_name():
    """A list of inputs, which the call gives by their names, in another order."""
    a, b, inputs = keras.Input((6,), name="a"), keras.Input((6,), name="b"), keras.Input((6,))
    body = _functional("body", [b, a], layers.Dense(3)(a - 2 * b))
    return keras.Model(inputs, layers.Dense(2)(body({"a": inputs, "b": inputs * 3})))


def _input_passed_on():
    a, b, inputs = (keras.Input((6,)) for _ in range(3))
    body = _functional("body", [a, b], [layers.Dense(6)(a), b])
    first, second = body([inputs * 2, inputs])
    return keras.Model(inputs, layers.Dense(2)(first + second))


NESTED = [_nested_on_a_layer, _nested_in_a_sequence, _nested_twice, _inputs_by_name]


@pytest.mark.parametrize("build", [*NESTED, _input_passed_on])
def test_models_within_models(build, rng):
    x, y = rng.normal(size=(20, 6)).astype("float32"), rng.normal(size=(20, 2))
    keras.utils.set_random_seed(1)
    plain = build()
    keras.utils.set_random_seed(1)
    parallel = make_parallel(build(), 2, mode="model")
    for model in (plain, parallel):
        model.compile("sgd", "mse")
        model.fit(x, y, 8, shuffle=False, verbose=0)
    assert set(parallel.placement.values()) == {0, 1}
    assert difference(plain.get_weights(), parallel.get_weights()) < 1e-6


@needs_loose_inputs
def test_a_model_without_layers(rng):
    inputs = keras.Input((3,))
    parallel = make_parallel(keras.Model(inputs, inputs), 2, mode="model")
    x = rng.normal(size=(5, 3)).astype("float32")
    assert difference(parallel.predict(x, verbose=0), x) == 0


@needs_loose_inputs
def test_optional_inputs_are_refused():
    left, right = keras.Input((3,), name="left"), keras.Input((3,), name="right", optional=True)
    model = keras.Model([left, right], layers.Dense(2)(left))
    with pytest.raises(ValueError, match="Received: .* input 'right', which has optional=True"):
        make_parallel(model, 2, mode="model")


def test_weights_go_where_they_were_last_asked_for(rng):
    x, y = rng.normal(size=(16, 4)).astype("float32"), rng.normal(size=(16, 2))
    template = _mlp()
    first = make_parallel(template, 2, mode="model", placement={"one": 1})
    first.compile("adam", "mse")
    first.optimizer.build(first.trainable_variables)
    second = make_parallel(template, 3, mode="model", placement={"two": 2})
    second.compile("sgd", "mse")
    for model, homes in ((first, [1, 1, 0, 0]), (second, [0, 0, 2, 2]), (first, [1, 1, 0, 0])):
        model.fit(x, y, verbose=0)
        assert [_device(variable) for variable in template.variables] == homes


def test_scaling_of_model_mode(rng, monkeypatch):
    x, y = rng.normal(size=(16, 4)).astype("float32"), rng.normal(size=(16, 2))
    model = _mlp()
    model.compile("adam", "mse")
    model.fit(x, y, verbose=0)
    seen = []

    class Homes(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            seen.append({_device(variable) for variable in model.variables})

    fit = keras.Model.fit

    def fit_and_look(self, *args, callbacks, **kwargs):
        return fit(self, *args, callbacks=[*callbacks, Homes()], **kwargs)

    monkeypatch.setattr(keras.Model, "fit", fit_and_look)
    report = reports.scaling(model, (x, y), (1, 2), "model", repeats=1, verbose=0)
    monkeypatch.undo()
    # Each run follows an untimed step, in which the weights move to their devices.
    assert seen == [{0}, {0}, {0, 1}, {0, 1}] * 2
    assert [run.devices for run in report.runs] == [1, 2]
    assert {_device(variable) for variable in model.variables} == {0}
    model.fit(x, y, verbose=0)


def test_the_step_that_is_counted_is_the_models_own(rng):
    x, y = rng.normal(size=(8, 4)).astype("float32"), rng.normal(size=(8, 2))
    small = make_parallel(_mlp(), 2)
    many = [keras.Input((4,)), *[layers.Dense(4) for _ in range(10)], layers.Dense(2)]
    big = make_parallel(keras.Sequential(many), 2)
    first = reports.transfers(small, x).prediction
    big.compile("adam", "mse")
    big.fit(x, y, verbose=0)
    assert reports.transfers(small, x).prediction == first


def test_the_names_of_later_models_are_as_they_would_be():
    """Keras numbers names by what was made without one: nothing here takes a number."""
    names = []
    for mode in (None, "model"):
        keras.utils.clear_session()
        model = _nested_twice()
        if mode:
            make_parallel(model, 2, mode=mode)
        made = (keras.Model(model.input, model.output), layers.Identity(), layers.Dense(1))
        names.append([one.name for one in made])
    assert names[0] == names[1]


def test_texts_that_cross_are_counted():
    words = keras.Input((), dtype="string", name="words")
    vocabulary = layers.StringLookup(vocabulary=["a", "b"], name="lookup")
    outputs = layers.Dense(2)(layers.Embedding(3, 4)(vocabulary(words)))
    placement = {"lookup": 1, "embedding.*": 1}
    parallel = make_parallel(keras.Model(words, outputs), 2, mode="model", placement=placement)
    x = np.array(["a", "b", "c", "a"])
    report = reports.transfers(parallel, tf.constant(x))
    assert report.bytes("prediction").get("weights", 0) == 0
    reports.plot_placement(parallel)


def test_a_mask_goes_with_its_tensor(rng):
    """Of a Sequential too, whose layers are given their masks by Keras unasked."""
    model = keras.Sequential(
        [
            keras.Input((9,), dtype="int32"),
            keras.layers.Embedding(50, 8, mask_zero=True),
            keras.layers.LSTM(5),
            keras.layers.Dense(1),
        ]
    )
    x = rng.integers(3, size=(6, 9))
    expected = model.predict(x, verbose=0)
    placement = {"embedding.*": 0, "lstm.*": 1, "dense.*": 0}
    placed = make_parallel(model, 2, mode="model", placement=placement)
    assert difference(placed.predict(x, verbose=0), expected) < 1e-6


def _train_one_layer_apart(optimizer_of, wrap):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, name="one"), layers.Dense(2, name="two")]
    )
    optimizer = optimizer_of(model)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse")
    parallel = wrap(model)
    x, y = np.ones((4, 4)), np.ones((4, 2))
    parallel.fit(x, y, epochs=2, verbose=0)
    weights = model.get_weights()
    model.fit(x, y, verbose=0)  # by the template's own optimizer
    return weights


def _excluding(model):
    optimizer = keras.optimizers.SGD(0.01, weight_decay=1.0)
    optimizer.exclude_from_weight_decay(var_list=[model.layers[1].kernel])
    return optimizer


def _of_several(model):
    by_name = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
    by_name["one/.*"] = keras.optimizers.Adam(0.1)
    return keras.optimizers.MultiOptimizer(by_name)


@pytest.mark.parametrize("optimizer_of", [_excluding, _of_several])
def test_what_an_optimizer_knows_by_variable_survives_a_move(optimizer_of):
    plain = _train_one_layer_apart(optimizer_of, lambda model: model)
    placement = {"one": 0, "two": 1}
    moved = _train_one_layer_apart(
        optimizer_of, lambda model: make_parallel(model, 2, mode="model", placement=placement)
    )
    assert difference(plain, moved) < 1e-5
