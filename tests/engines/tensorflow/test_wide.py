"""Model mode with large layers that are spread over all devices."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from support.models import recurrent_beside_wide, wide_perceptron, wide_transformer
from support.parity import difference, variables

from keras_multigpu import make_parallel, reports

pytestmark = pytest.mark.usefixtures("in_float64")


@keras.saving.register_keras_serializable(package="test_wide")
class Subclassed(keras.Model):
    """No graph: it can't be cut into stages."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden, self.out = layers.Dense(64, "relu"), layers.Dense(3)

    def call(self, inputs):
        return self.out(self.hidden(inputs))


MODELS = {
    "perceptron": (wide_perceptron, lambda rng: rng.normal(size=(23, 20))),
    "subclassed": (Subclassed, lambda rng: rng.normal(size=(23, 20))),
    "transformer": (wide_transformer, lambda rng: rng.integers(0, 200, (23, 9))),
    "recurrent": (recurrent_beside_wide, lambda rng: rng.normal(size=(23, 5, 4))),
}
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(global_clipnorm=0.1, use_ema=True),
    "accumulated": lambda: keras.optimizers.AdamW(gradient_accumulation_steps=2),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "lamb": lambda: keras.optimizers.Lamb(),
}
CASES = [
    (model, optimizer, (number + place) % 4 == 0)
    for number, model in enumerate(MODELS)
    for place, optimizer in enumerate(OPTIMIZERS)
]


def _spread(template, count=4):
    return make_parallel(template, count, mode="model", placement="spread")


@pytest.mark.thin(5)
@pytest.mark.parametrize(("name", "optimizer", "jit_compile"), CASES)
def test_trains_like_one_device(name, optimizer, jit_compile, rng):
    build, data = MODELS[name]
    x, y = data(rng), rng.normal(size=(23, 3))
    found = []
    for is_parallel in (False, True):
        keras.utils.set_random_seed(2)
        model = _spread(build()) if is_parallel else build()
        model.compile(OPTIMIZERS[optimizer](), "mse", jit_compile=jit_compile)
        model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
        logs = model.evaluate(x, y, batch_size=7, verbose=0)
        found.append((variables(model), model.predict(x, batch_size=11, verbose=0), logs))
    # Muon makes all singular values of a gradient alike, the smallest too: on one device, the rows
    # of a batch in another order change this transformer's weights by 1.1e-10.
    assert difference(*found) < (1e-9 if optimizer == "muon" else 1e-10)
    assert model.placement


def test_attention_is_spread_by_heads_and_a_narrowing_layer_by_inputs(rng):
    parallel = _spread(wide_transformer())
    axes = {name.rpartition("/")[0].rpartition("/")[2]: axis for name, axis in _axes(parallel)}
    assert {axes[name] for name in ("query", "key", "value")} == {1}
    assert axes["attention_output"] == 0
    parallel.compile("adam", "mse")
    x, y = MODELS["transformer"][1](rng), rng.normal(size=(23, 3))
    parallel.fit(x, y, batch_size=23, verbose=0)
    share = (
        parallel._parallel_runner.partition.notices.explain().partition("%")[0].rpartition(" ")[2]
    )
    assert float(share) > 95
    for one in (*parallel.template.weights, *parallel.optimizer.variables):
        parts = getattr(one.value, "parts", None)
        if np.prod(one.shape) >= 1024:  # slots, too
            assert [np.prod(part.shape) for part in parts] == [np.prod(one.shape) / 4] * 4


@pytest.mark.parametrize("activation", [None, "relu"])
def test_no_weight_and_no_gradient_of_one_crosses(activation, rng):
    """Square kernels too, whose inputs and outputs are both spread."""
    keras.utils.set_random_seed(2)
    wide = [layers.Dense(128, activation) for _ in range(3)]
    parallel = _spread(keras.Sequential([keras.Input((64,)), *wide, layers.Dense(2)]), 2)
    parallel.compile("adam", "mse")
    batch = rng.normal(size=(8, 64)), rng.normal(size=(8, 2))
    report, activation_bytes = reports.transfers(parallel, batch), 8 * 128 * 8
    assert report.bytes("training").get("weights", 0) == 0
    assert max(one.bytes for one in report.training) <= activation_bytes


def test_gradients_of_heads_stay_where_their_kernels_are(rng):
    parallel = _spread(wide_transformer(), 2)
    parallel.compile("adam", "mse")
    batch = MODELS["transformer"][1](rng)[:4], rng.normal(size=(4, 3))
    sent = reports.transfers(parallel, batch).bytes("training")
    assert sent.get("weights", 0) < 1000  # small ones only


def test_a_residual_stream_is_gathered_once(rng):
    """Not split again at each sum and normalization of what small layers gave."""
    tokens = keras.Input((16,), dtype="int32")
    x = layers.Embedding(1000, 64)(tokens)
    for _ in range(2):
        small = layers.MultiHeadAttention(1, 8)(x, x)
        x = layers.LayerNormalization()(layers.add([x, small]))
    parallel = _spread(keras.Model(tokens, layers.Dense(2)(x[:, 0])), 2)
    parallel.compile("adam", "mse")
    batch = rng.integers(0, 1000, size=(4, 16)), rng.normal(size=(4, 2))
    sent = reports.transfers(parallel, batch).bytes("training")
    whole = 4 * 16 * 64 * 8  # what the table gives, and so much of its gradient
    assert whole // 2 <= sent["activations"] < 1.5 * whole
    assert sent["gradients"] < 2 * whole < 1000 * 64 * 8


def _axes(parallel):
    return parallel.placement.items()


def test_calls_of_ones_own(rng):
    x = rng.normal(size=(6, 20))
    keras.utils.set_random_seed(2)
    plain, parallel = Subclassed(), _spread(Subclassed())
    plain(x), parallel(x)
    parallel.set_weights(plain.get_weights())

    def gradients(model):
        with tf.GradientTape() as tape:
            loss = ops.sum(model(x) ** 2)
        return tape.gradient(loss, [one.value for one in model.trainable_variables])

    expected = gradients(plain)
    assert difference(expected, tf.function(lambda: gradients(parallel))()) < 1e-12
    with pytest.warns(UserWarning, match="called eagerly"):
        assert difference(expected, gradients(parallel)) < 1e-12


def test_files_and_other_numbers_of_devices(rng, tmp_path):
    parallel = make_parallel(Subclassed(), 4, mode="model")  # no graph: it is spread
    parallel.compile("adam", "mse")
    x, y = rng.normal(size=(8, 20)), rng.normal(size=(8, 3))
    parallel.fit(x, y, verbose=0)
    parallel.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert list(loaded.placement.values()) == list(parallel.placement.values()) == [1, 0]
    again = make_parallel(loaded.template, 2, mode="model", placement="spread")
    one = make_parallel(again.template, 1, mode="model", placement="spread")
    assert not one.placement
    for model in (loaded, one):
        model.compile("adam", "mse")
        assert difference(model.predict(x, verbose=0), parallel.predict(x, verbose=0)) < 1e-12


def test_on_fewer_devices_it_uses_those_that_divide_its_layers(rng, tmp_path, monkeypatch):
    parallel, x = _spread(wide_transformer()), MODELS["transformer"][1](rng)
    parallel.save(tmp_path / "model.keras")
    fewer = ("cpu:0", "cpu:1", "cpu:2")
    monkeypatch.setattr("keras_multigpu.modes.saving.choose_again", lambda *_: fewer)
    with pytest.warns(UserWarning, match="saved on 4 devices, and 3 are here: .* 2 can be used"):
        again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.devices == fewer[:2]
    assert difference(parallel.predict(x, verbose=0), again.predict(x, verbose=0)) < 1e-12


def test_a_model_without_large_layers_is_told():
    small = keras.Sequential([keras.Input((3,)), layers.Dense(5)])
    with pytest.raises(ValueError, match="can be divided by 4"):
        _spread(small)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("options", [{"model_devices": 2}, {"mode": "model"}], ids=str)
def test_a_function_within_the_call(options, compiled, in_float64, rng):
    """What XLA compiles takes whole weights, which are read before it."""

    class Within(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.last = layers.Dense(64, activation="tanh"), layers.Dense(2)

        def build(self, shape):
            self.first.build(shape)
            self.last.build((None, 64))

        @tf.function(jit_compile=compiled)
        def head(self, x):
            return self.last(self.first(x))

        def call(self, x):
            return self.head(x)

    x, y, found = rng.normal(size=(23, 12)), rng.normal(size=(23, 2)), []
    for n in (1, 4):
        keras.utils.set_random_seed(1)
        model = Within()
        model.build((None, 12))
        parallel = make_parallel(model, n, **(options if n > 1 else {}))
        parallel.compile("adam", "mse", jit_compile=False)
        parallel.fit(x, y, batch_size=12, verbose=0)
        found.append([*parallel.get_weights(), parallel.predict(x, verbose=0)])
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-11)
