"""Model mode on JAX: large layers spread over the devices."""

import keras
import numpy as np
import pytest
from keras import layers
from support.cases import CASES, build_equal, compile_case
from support.parity import difference, take, variables
from support.scripts import run_python

from keras_multigpu import list_devices, make_parallel, reports

pytestmark = pytest.mark.thin(5)


def _spec(variable):
    """The axes of a variable that are spread."""
    spec = getattr(variable.value.sharding, "spec", ())
    return [axis for axis, name in enumerate(spec) if name is not None]


def _part(variable):
    """The share of a variable that the first device holds."""
    return variable.value.addressable_shards[0].data.size / variable.value.size


NAMES = {
    *("mlp", "unbuilt_sequential", "attention", "embedding_lstm_masked", "subclassed_add_loss"),
    *("regularized", "dict_inputs_and_outputs", "clipped_accumulated_ema", "scipy_csr_input"),
    *("in_batch_contrastive", "nested_structures"),
}


@pytest.mark.thin(3)
@pytest.mark.parametrize("case", [c for c in CASES if c.name in NAMES], ids=str)
def test_trains_like_one_device(case, rng, tmp_path):
    x, y = case.data(rng, 70)
    plain, template = build_equal(case)
    parallel = make_parallel(template, 2, mode="model")
    histories = []
    for model in (plain, parallel):
        compile_case(case, model)
        histories.append(model.fit(x, y, 32, 2, shuffle=False, verbose=0).history)
    assert parallel.placement
    assert difference(*histories) < case.tolerance
    assert difference(variables(plain), variables(parallel)) < case.tolerance
    outputs = [model.predict(take(x, 5), verbose=0) for model in (plain, parallel, template)]
    assert difference(*outputs[:2]) < case.tolerance
    assert difference(*outputs[1:]) < case.tolerance
    parallel.save_weights(tmp_path / "model.weights.h5")
    plain.load_weights(tmp_path / "model.weights.h5")
    assert difference(plain.get_weights(), parallel.get_weights()) == 0


@pytest.mark.parametrize("options", [{"mode": "model"}, {"model_devices": 2}], ids=str)
@pytest.mark.parametrize("layer", ["Conv2D", "DepthwiseConv2D", "Conv2DTranspose"])
def test_a_convolution_of_noise_before_a_wide_layer(layer, options, rng):
    """XLA divides it as the layer's kernel is, and computes wrong gradients: plain JAX, too."""
    x, y = rng.normal(size=(16, 8, 8, 3)), rng.normal(size=(16, 3))
    found = []
    for count in (None, 4):
        keras.utils.set_random_seed(2)
        size = {} if layer == "DepthwiseConv2D" else {"filters": 4}
        model = keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                layers.GaussianNoise(0.1, seed=3),
                getattr(layers, layer)(kernel_size=3, **size),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(64, "relu"),
                layers.Dense(3),
            ]
        )
        model = make_parallel(model, count, **options) if count else model
        model.compile(keras.optimizers.SGD(0.01), "mse")
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        found.append(model.get_weights())
    assert difference(*found) < 1e-6


def _transformer():
    x = inputs = keras.Input((12,), dtype="int32")
    x = layers.Embedding(100, 32, name="words")(x)
    x = x + layers.MultiHeadAttention(4, 8, name="attention")(x, x)
    x = layers.Dense(128, "relu", name="wide")(layers.LayerNormalization()(x))
    x = layers.Dense(32, name="narrow")(x)
    return keras.Model(inputs, layers.Dense(3, name="head")(layers.GlobalAveragePooling1D()(x)))


def test_weights_and_slots_stay_spread(rng):
    x, y = rng.integers(0, 100, (32, 12)), rng.normal(size=(32, 3))
    parallel = make_parallel(_transformer(), 4, mode="model", placement="spread")
    axes = {path.partition("/")[0]: axis for path, axis in parallel.placement.items()}
    del axes["attention"]
    assert axes == {"words": 1, "wide": 1, "narrow": 0}
    heads = {path.split("/")[1]: axis for path, axis in parallel.placement.items() if "att" in path}
    assert heads == {"query": 1, "key": 1, "value": 1, "attention_output": 0}
    parallel.compile("adam", "mse")
    for step in (lambda: None, lambda: parallel.fit(x, y, verbose=0)):
        step()
        for variable in parallel.variables:
            if variable.path in parallel.placement:
                assert _spec(variable) == [parallel.placement[variable.path]]
                assert _part(variable) == 1 / 4
    spread = [path.replace("/", "_") for path in parallel.placement]
    slots = [s for s in parallel.optimizer.variables if any(path in s.path for path in spread)]
    assert len(slots) == 2 * len(spread)
    assert {_part(slot) for slot in slots} == {1 / 4}


def test_the_template_goes_on_by_itself(rng):
    x, y = rng.integers(0, 100, (32, 12)), rng.normal(size=(32, 3))
    template = _transformer()
    parallel = make_parallel(template, 4, mode="model")
    parallel.compile("sgd", "mse")
    parallel.fit(x, y, verbose=0)
    assert difference(parallel.predict(x, verbose=0), np.asarray(template(x))) < 1e-5
    data = make_parallel(template, 2)
    data.compile("sgd", "mse")
    data.fit(x, y, verbose=0)
    assert difference(parallel.predict(x, verbose=0), data.predict(x, verbose=0)) < 1e-5


def test_what_cannot_be_spread_is_refused():
    model = keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.Flatten()])
    with pytest.raises(ValueError, match="the weights of large .*(?s:.)*there is no such"):
        make_parallel(model, 2, mode="model")
    odd = keras.Sequential([keras.Input((5,)), layers.Dense(7, name="odd")])
    with pytest.raises(ValueError, match=r"divided by 4 \(odd/kernel \(5, 7\)\)|odd/kernel"):
        make_parallel(odd, 4, mode="model")


def test_a_placement_is_refused():
    with pytest.raises(ValueError, match="must be None .* one program .* Received: placement"):
        make_parallel(_transformer(), 2, mode="model", placement={"wide": 1})


@pytest.mark.slow
def test_weights_are_spread_again_when_they_come_from_elsewhere(rng, tmp_path):
    x, y = rng.integers(0, 100, (32, 12)), rng.normal(size=(32, 3))
    parallel = make_parallel(_transformer(), 2, mode="model")
    parallel.compile("adam", "mse")
    parallel.fit(x, y, verbose=0)
    parallel.save(tmp_path / "model.keras")
    parallel.save_weights(tmp_path / "model.weights.h5")

    def spread(model):
        return [path for path in model.placement if _part(_named(model, path)) == 1 / 2]

    for change in (
        lambda: parallel.set_weights(parallel.get_weights()),
        lambda: parallel.load_weights(tmp_path / "model.weights.h5"),
        lambda: reports.transfers(parallel, (x, y)),
    ):
        change()
        parallel.train_on_batch(x, y)
        assert spread(parallel) == list(parallel.placement)
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    loaded.fit(x, y, verbose=0)
    assert spread(loaded) == list(loaded.placement)
    slots = [slot for slot in loaded.optimizer.variables if _part(slot) == 1 / 2]
    assert len(slots) >= 2 * len(loaded.placement)


def _named(model, path):
    return next(variable for variable in model.variables if variable.path == path)


def test_what_is_sent_for_spread_weights_is_counted(rng):
    x, y = rng.integers(0, 100, (32, 12)), rng.normal(size=(32, 3))
    parallel = make_parallel(_transformer(), 2, mode="model")
    parallel.compile("adam", "mse")
    report = reports.transfers(parallel, (x, y))
    assert report.bytes("training", "cpu:0", "cpu:1").get("activations", 0) > 0
    assert report.bytes("prediction", "cpu:0", "cpu:1").get("activations", 0) > 0


@pytest.mark.skipif(not hasattr(keras.optimizers, "Muon"), reason="this version of Keras has none")
def test_a_model_that_was_compiled_and_not_trained_is_loaded(rng, tmp_path):
    parallel = make_parallel(_transformer(), 2, mode="model")
    parallel.compile(
        keras.optimizers.Muon(), "mse"
    )  # looks at whole weights, which are whole here: no warning
    parallel.save(tmp_path / "model.keras")
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert difference(parallel.get_weights(), loaded.get_weights()) == 0


class Block(layers.Layer):
    """A layer around one that was made elsewhere."""

    def __init__(self, dense, **kwargs):
        super().__init__(**kwargs)
        self.dense = dense

    def call(self, inputs):
        return self.dense(inputs)


def test_weights_of_equal_paths(rng):
    first, second = layers.Dense(16, name="same"), layers.Dense(6, name="same")
    first.build((None, 6))
    second.build((None, 16))
    inputs = keras.Input((6,))
    model = keras.Model(inputs, Block(second)(Block(first)(inputs)))
    x = rng.normal(size=(8, 6))
    before = model.predict(x, verbose=0)
    parallel = make_parallel(model, 4, mode="model")
    assert parallel.placement == {"same/kernel": 1, "same/kernel (2)": 0}
    assert [_spec(v) for v in (first.kernel, second.kernel)] == [[1], [0]]
    assert difference(before, parallel.predict(x, verbose=0)) < 1e-6


def test_a_file_is_loaded_where_fewer_devices_divide_the_weights(rng, tmp_path, monkeypatch):
    template = keras.Sequential([keras.Input((8,)), layers.Dense(16), layers.Dense(4)])
    parallel = make_parallel(template, 4, mode="model")
    x = rng.normal(size=(8, 8))
    before = parallel.predict(x, verbose=0)
    parallel.save(tmp_path / "model.keras")
    three = ("cpu:0", "cpu:1", "cpu:2")
    monkeypatch.setattr("keras_multigpu.modes.saving.choose_again", lambda *args: three)
    with pytest.warns(UserWarning, match=r"on 4 devices, and 3 are here: .*, of which 2 can be"):
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.devices == three[:2]
    assert difference(before, loaded.predict(x, verbose=0)) < 1e-6


_GROUPED = """
import keras
import numpy as np
from keras import layers

from keras_multigpu import make_parallel, use_virtual_devices

use_virtual_devices(8)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(8, 8, 8, 64)), rng.normal(size=(8, 2))
found = []
for is_parallel in (False, True):
    keras.utils.set_random_seed(1)
    inner = [layers.Dense(24), layers.Conv2D(32, 3, groups=4), layers.GlobalAveragePooling2D()]
    model = keras.Sequential([keras.Input((8, 8, 64)), *inner, layers.Dense(2)])
    model = make_parallel(model, 8, mode="model") if is_parallel else model
    model.compile("sgd", "mse")
    model.train_on_batch(x, y)
    found.append([*model.get_weights(), model.predict(x, verbose=0)])
print("apart by", max(float(abs(a - b).max()) for a, b in zip(*found)))
"""


def test_a_grouped_convolution_after_a_layer_that_eight_devices_spread(tmp_path):
    """XLA's compiler ends the process if it divides the channels as those of the layer."""
    path = tmp_path / "grouped.py"
    path.write_text(_GROUPED, encoding="utf-8")
    done = run_python(path)
    assert "apart by" in done.stdout, done.stderr
    assert float(done.stdout.split()[-1]) < 1e-5


@pytest.mark.filterwarnings("ignore:Large layers, which are spread")
@pytest.mark.parametrize("options", [{"model_devices": 2}, {"mode": "model"}], ids=str)
def test_what_models_on_other_devices_give_is_taken(options):
    def build():
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((8,)), layers.Dense(64, "relu"), layers.Dense(8)])

    names, x = list_devices(), np.ones((4, 8), "float32")
    models = [make_parallel(build(), devices=some, **options) for some in (names[:2], names[2:4])]
    plain = build()
    assert difference(np.asarray(plain(plain(x))), np.asarray(models[1](models[0](x)))) < 1e-5
