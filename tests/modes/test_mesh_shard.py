"""`shard` and `model_devices` together: large layers in parts, and all state over all devices."""

import keras
import numpy as np
import pytest
from keras import layers, optimizers
from support.mesh_models import convolutional
from support.models import recurrent_beside_wide, wide_perceptron, wide_transformer
from support.parity import difference, plainly, variables
from support.precision import all_in_double_precision, keras_in_double_precision

from keras_multigpu import make_parallel, reports
from keras_multigpu.layers import MultiHotDense

_ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
LIMIT = 1e-12
SHARDS = ("optimizer", "weights")


@pytest.fixture
def _double(monkeypatch):
    """In float64, and small weights are spread, too."""
    if _ON_TENSORFLOW:
        from keras_multigpu.engines.tensorflow.weights import homes

        monkeypatch.setattr(homes, "LEAST", 16)
    else:
        from keras_multigpu.engines.jax.state import state_shards

        monkeypatch.setattr(state_shards, "_LEAST", 16)
    with all_in_double_precision(), keras_in_double_precision():
        yield


def _multi_hot():
    places, tokens = keras.Input((3,), dtype="int32"), keras.Input((4,), dtype="int32")
    sums = MultiHotDense(6, 200, activation="relu")(places)
    both = [sums, layers.Flatten()(layers.Embedding(200, 6)(tokens))]
    x = layers.Dense(64, "relu")(layers.Concatenate()(both))
    return keras.Model([places, tokens], layers.Dense(3)(layers.Dense(64, "tanh")(x)))


MODELS = {
    "perceptron": (wide_perceptron, (20,)),
    "transformer": (lambda: wide_transformer(dropout=0.1), 9),
    "recurrent": (recurrent_beside_wide, (5, 4)),
    "convolutional": (convolutional, (8, 8, 3)),
    "multi_hot": (_multi_hot, None),
}
OPTIMIZERS = {
    "adam": lambda: optimizers.Adam(0.01),
    "momentum": lambda: optimizers.SGD(0.05, momentum=0.9),
    # Plain Keras on JAX has deleted the averages when it evaluates.
    "clipped": lambda: optimizers.Adam(0.01, global_clipnorm=0.1, use_ema=_ON_TENSORFLOW),
    "adafactor": lambda: optimizers.Adafactor(0.05),
    "muon": lambda: optimizers.Muon(0.02),
    "accumulated": lambda: optimizers.Lamb(0.01, gradient_accumulation_steps=2),
}
CASES = [
    ("perceptron", "adam", "optimizer", (4, 2)),
    ("perceptron", "momentum", "weights", (4, 4)),
    ("perceptron", "clipped", "weights", (4, 2)),
    ("perceptron", "adafactor", "optimizer", (4, 2)),
    ("perceptron", "muon", "weights", (2, 2)),
    ("transformer", "adam", "weights", (4, 2)),
    ("transformer", "momentum", "optimizer", (4, 4)),
    ("transformer", "clipped", "optimizer", (4, 2)),
    ("recurrent", "clipped", "weights", (4, 2)),
    ("recurrent", "accumulated", "optimizer", (4, 2)),
    ("convolutional", "adam", "optimizer", (4, 2)),
    ("convolutional", "accumulated", "weights", (4, 2)),
    ("multi_hot", "adam", "weights", (4, 2)),
    ("multi_hot", "momentum", "optimizer", (4, 2)),
]


def _data(name, rows=23):
    rng, shape = np.random.default_rng(3), MODELS[name][1]
    if shape is None:
        x = [rng.integers(0, 200, (rows, length)) for length in (3, 4)]
    elif isinstance(shape, int):
        x = rng.integers(0, 200, (rows, shape))
    else:
        x = rng.normal(size=(rows, *shape))
    return x, rng.normal(size=(rows, 3))


def _made(name, devices=None, width=2, shard="weights", **options):
    keras.utils.set_random_seed(2)
    model = MODELS[name][0]()
    if devices is None:
        return model
    return make_parallel(model, devices, model_devices=width, shard=shard, **options)


@pytest.mark.thin(6)
@pytest.mark.parametrize(("name", "optimizer", "shard", "shape"), CASES)
@pytest.mark.usefixtures("_double")
def test_trains_like_one_device(name, optimizer, shard, shape):
    (x, y), found = _data(name), []
    for model in (_made(name), _made(name, *shape, shard)):
        model.compile(OPTIMIZERS[optimizer](), "mse", metrics=["mae"])
        logs = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        scores = model.evaluate(x, y, batch_size=7, verbose=0)
        found.append((variables(model), model.predict(x, batch_size=11, verbose=0)))
        found[-1] += (logs["loss"], scores)
    assert difference(found[0][:2], found[1][:2]) < LIMIT
    assert difference(found[0][2:], found[1][2:]) < 1e-5  # Keras keeps its metrics in float32


@pytest.mark.filterwarnings("ignore:.*runs eagerly, and so on", "ignore:.*are not compiled")
@pytest.mark.thin(3)
@pytest.mark.parametrize(
    "option", [{"jit_compile": True}, {"run_eagerly": True}, {"steps_per_execution": 2}], ids=str
)
@pytest.mark.usefixtures("_double")
def test_options_of_compile(option):
    (x, y), found = _data("recurrent"), []
    for model, options in ((_made("recurrent"), {}), (_made("recurrent", 4), option)):
        model.compile(optimizers.Adam(0.01, global_clipnorm=0.1), "mse", **options)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        found.append(variables(model))
    assert difference(*found) < LIMIT


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.usefixtures("_double")
def test_few_rows(rows):
    (x, y), found = _data("perceptron", rows), []
    for model in (_made("perceptron"), _made("perceptron", 4)):
        model.compile(optimizers.SGD(0.1, momentum=0.9), "mse")
        loss = model.train_on_batch(x, y)
        found.append((variables(model), model.predict_on_batch(x), model.test_on_batch(x, y), loss))
    assert difference(*found) < 1e-6  # Keras keeps its metrics in float32
    assert difference(found[0][0], found[1][0]) < LIMIT


def _wide():
    keras.utils.set_random_seed(1)
    hidden = [layers.Dense(128, "relu") for _ in range(4)]
    return keras.Sequential([keras.Input((128,)), *hidden, layers.Dense(10)])


@pytest.mark.parametrize("shard", SHARDS)
def test_each_device_keeps_its_part(shard):
    parallel = make_parallel(_wide(), 4, model_devices=2, shard=shard)
    parallel.compile("adam", "mse")
    data = np.ones((16, 128)), np.ones((16, 10))
    parallel.fit(*data, batch_size=8, verbose=0)
    whole = 4 * sum(np.prod(one.shape) for one in parallel.weights)
    report = reports.memory(parallel, data)
    # On JAX each group has the weights whole, if only slots are spread.
    share = 1 / 2 if shard == "optimizer" and not _ON_TENSORFLOW else 1 / 4
    small = 4 * (4 * 128 + 10)  # biases, whole on a device or on each
    last = 4 * 1280  # the last kernel's axes are not the longest, or not large
    for device in parallel.devices:
        weights, slots = (report.bytes(device, kind) for kind in ("weights", "slots"))
        assert share * (whole - small - last) <= weights <= share * whole + small
        assert (whole - small - last) / 2 <= slots <= whole / 2 + 2 * small + 16
    kernel = next(path for path in parallel.placement if path.endswith("dense_1/kernel"))
    assert parallel.placement[kernel] == (128 * 32,) * 4
    assert "2 replicas, each on 2 devices, shard=" in repr(parallel)


@pytest.mark.usefixtures("_double")
def test_a_saved_training_goes_on_anywhere(tmp_path, monkeypatch):
    x, y = _data("perceptron")
    plain, parallel = _made("perceptron"), _made("perceptron", 4)
    saving = keras.callbacks.ModelCheckpoint(tmp_path / "last.weights.h5", save_weights_only=True)
    for model, callbacks in ((plain, []), (parallel, [saving])):
        model.compile(optimizers.Adam(0.01), "mse")
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
    assert int(parallel.optimizer.iterations) == 3
    plain.save(tmp_path / "plain.keras")
    parallel.save(tmp_path / "some.keras")
    loaded = [keras.saving.load_model(tmp_path / "some.keras")]
    assert (loaded[0].shard, loaded[0].model_devices) == ("weights", 2)
    assert [*loaded[0].placement.values()] == [*parallel.placement.values()]
    for devices in (("cpu:0", "cpu:1", "cpu:2"), ("cpu:0",)):
        monkeypatch.setattr("keras_multigpu.modes.saving.choose_again", lambda *_, d=devices: d)
        with pytest.warns(UserWarning, match=f"saved on 4 devices, and {len(devices)} "):
            loaded.append(keras.saving.load_model(tmp_path / "some.keras"))
    again = keras.saving.load_model(tmp_path / "plain.keras")  # its dropout begins anew
    for model in (again, *loaded):
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        assert difference(variables(again), variables(model)) < LIMIT
    parallel.load_weights(tmp_path / "last.weights.h5")
    assert difference(plain.get_weights(), parallel.get_weights()) < LIMIT
    assert [*loaded[0].placement.values()] == [*parallel.placement.values()]


@pytest.mark.usefixtures("_double")
def test_the_template_and_other_models_share_the_weights():
    x, y = _data("perceptron")
    plain, template = _made("perceptron"), _made("perceptron")
    others = [
        make_parallel(template, 4, model_devices=2, shard="weights"),
        template,
        make_parallel(template, 4, model_devices=2),
        make_parallel(template, 2, shard="weights"),
        make_parallel(template, 4, model_devices=2, shard="optimizer"),
    ]
    used = [[optimizers.Adam(0.01) for _ in others] for _ in range(2)]
    for turn in (0, 1, 2, 0, 3, 4, 0):
        for model, optimizer in ((plain, used[0][turn]), (others[turn], used[1][turn])):
            model.compile(optimizer, "mse", **(plainly() if model is plain else {}))
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        assert difference(plain.get_weights(), template.get_weights()) < 100 * LIMIT
        value = np.random.default_rng(turn).normal(size=(64, 64)) / 8
        kernels = [next(v for v in m.weights if v.shape == (64, 64)) for m in (plain, others[turn])]
        for kernel in kernels:
            kernel.assign(value)
        assert (np.asarray(kernels[1]) == value).all()
        outputs = [model(x[:5]) for model in (plain, template, others[0])]
        assert difference(outputs[:1] * 2, outputs[1:]) < 100 * LIMIT


def test_less_crosses_than_with_whole_layers():
    parallel = make_parallel(_wide(), 4, model_devices=2, shard="weights")
    parallel.compile("adam", "mse")
    data = np.ones((16, 128), "float32"), np.ones((16, 10), "float32")
    sent = reports.transfers(parallel, data)
    alone = make_parallel(_wide(), 4, shard="weights")
    alone.compile("adam", "mse")
    whole = reports.transfers(alone, data)
    total = [sum(one.bytes("training").values()) for one in (sent, whole)]
    assert 0 < total[0] < 0.8 * total[1]


@pytest.mark.usefixtures("_double")
def test_a_step_of_ones_own_calls_parts():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.out = layers.Dense(64, "relu"), layers.Dense(3)

        def build(self, shape):
            self.hidden.build(shape)
            self.out.build((None, 64))

        def call(self, x):
            return self.out(self.hidden(x))

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            own = super().compute_loss(x, y, y_pred, sample_weight)
            return own + keras.ops.mean(self.hidden(x) ** 2)

    (x, y), found = _data("perceptron"), []
    for devices in (None, 4):
        keras.utils.set_random_seed(0)
        model = Own()
        model.build((None, 20))
        if devices:
            model = make_parallel(model, devices, model_devices=2, shard="weights")
        model.compile(optimizers.Adam(0.01), "mse")
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        found.append(variables(model))
    assert difference(*found) < LIMIT


@pytest.mark.skipif(not _ON_TENSORFLOW, reason="JAX takes gradients of functions")
def test_gradients_outside_of_steps_are_those_of_one_device():
    import tensorflow as tf

    x, _ = _data("perceptron", 6)
    plain, parallel = _made("perceptron"), _made("perceptron", 4)

    def gradients(model):
        with tf.GradientTape() as tape:
            loss = keras.ops.sum(model(tf.constant(x, "float32")) ** 2)
        return tape.gradient(loss, [one.value for one in model.trainable_variables])

    with pytest.warns(UserWarning, match="runs on 1 of its 4 devices: with `model_devices` only"):
        assert difference(gradients(plain), tf.function(lambda: gradients(parallel))()) < 1e-4
