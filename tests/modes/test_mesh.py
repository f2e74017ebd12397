"""`model_devices`: rows over groups of devices, and large layers over the devices of a group."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops, optimizers
from support.mesh_models import convolutional
from support.models import recurrent_beside_wide, wide_perceptron, wide_transformer
from support.parity import difference, variables
from support.precision import all_in_double_precision

from keras_multigpu import make_parallel, reports
from keras_multigpu.engines import values, wide

_ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
# On JAX Keras computes losses in float32, and so the gradients begin with its rounding.
LIMIT = 1e-11 if _ON_TENSORFLOW else 1e-5
ROWS = 23


@pytest.fixture
def _double():
    with all_in_double_precision():
        yield


@keras.saving.register_keras_serializable(package="test_mesh")
class Contrastive(keras.Model):
    """Its loss compares the rows of a batch; it calls its parts itself."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden, self.out = layers.Dense(64, "relu"), layers.Dense(3)

    def call(self, inputs):
        return self.out(self.hidden(inputs))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        away = ops.sum((y_pred[:, None] - y_pred[None]) ** 2, -1)
        return super().compute_loss(x, y, y_pred, sample_weight) + ops.mean(ops.exp(-away))


MODELS = {
    "perceptron": (wide_perceptron, (20,)),
    "transformer": (lambda: wide_transformer(dropout=0.1), 9),
    "recurrent": (recurrent_beside_wide, (5, 4)),
    "convolutional": (convolutional, (8, 8, 3)),
    "contrastive": (Contrastive, (20,)),
}
OPTIMIZERS = {
    # Plain Keras on JAX has deleted the averages when it evaluates.
    "adam": lambda: optimizers.Adam(0.01, global_clipnorm=0.1, use_ema=_ON_TENSORFLOW),
    "accumulated": lambda: optimizers.AdamW(0.01, gradient_accumulation_steps=2),
    "lamb": lambda: optimizers.Lamb(0.01),
}
CASES = [
    (model, optimizer, shape)
    for number, model in enumerate(MODELS)
    for place, optimizer in enumerate(OPTIMIZERS)
    for shape in [((4, 2), (4, 4), (4, 2), (2, 2))[(number + place) % 4]]
]


def _data(name, rows=ROWS):
    rng, shape = np.random.default_rng(3), MODELS[name][1]
    x = rng.normal(size=(rows, *shape)) if isinstance(shape, tuple) else None
    return rng.integers(0, 200, (rows, shape)) if x is None else x, rng.normal(size=(rows, 3))


def _made(name, devices=None, width=2, **options):
    keras.utils.set_random_seed(2)
    model = MODELS[name][0]()
    if devices is None:
        return model
    return make_parallel(model, devices, model_devices=width, **options)


@pytest.mark.thin(5)
@pytest.mark.parametrize(("name", "optimizer", "shape"), CASES)
@pytest.mark.usefixtures("_double")
def test_trains_like_one_device(name, optimizer, shape):
    (x, y), found = _data(name), []
    for model in (_made(name), _made(name, *shape)):
        model.compile(OPTIMIZERS[optimizer](), "mse", metrics=["mae"])
        logs = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        scores = model.evaluate(x, y, batch_size=7, verbose=0)
        found.append((variables(model), model.predict(x, batch_size=11, verbose=0)))
        found[-1] += (logs["loss"], scores)
    assert difference(found[0][:2], found[1][:2]) < LIMIT
    assert difference(found[0][2:], found[1][2:]) < 1e-5  # Keras keeps its metrics in float32


@pytest.mark.thin(3)
@pytest.mark.parametrize("option", [{"jit_compile": True}, {"steps_per_execution": 2}], ids=str)
@pytest.mark.usefixtures("_double")
def test_options_of_compile(option):
    (x, y), found = _data("recurrent"), []
    for model, options in ((_made("recurrent"), {}), (_made("recurrent", 4), option)):
        model.compile(optimizers.Adam(0.01), "mse", **options)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        found.append(variables(model))
    assert difference(*found) < LIMIT


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.usefixtures("_double")
def test_few_rows(rows):
    (x, y), found = _data("perceptron", rows), []
    for model in (_made("perceptron"), _made("perceptron", 4)):
        model.compile("sgd", "mse")
        loss = model.train_on_batch(x, y)
        found.append((variables(model), model.predict_on_batch(x), model.test_on_batch(x, y), loss))
    assert difference(*found) < max(LIMIT, 1e-6)


def test_each_device_has_a_part_of_a_large_layer():
    parallel = _made("perceptron", 4)
    kernel = next(path for path in parallel.placement if path.endswith("dense_1/kernel"))
    parts = parallel.placement[kernel]
    assert parts[:2] == (64 * 32, 64 * 32)
    parallel.compile("adam", "mse")
    x, y = _data("perceptron", 16)
    parallel.fit(x, y, verbose=0, batch_size=16)
    slots = [one for one in parallel.optimizer.variables if one.shape == (64, 64)]
    assert len(slots) == 2
    for one in slots:
        own = one._value
        shapes = (
            [tuple(part.shape) for part in own.parts]
            if _ON_TENSORFLOW
            else [own.sharding.shard_shape(own.shape)] * 2
        )
        # Between steps on JAX all four devices have other parts.
        assert [np.prod(shape) for shape in shapes] == [64 * (32 if _ON_TENSORFLOW else 16)] * 2
    report = reports.memory(parallel, (x, y))
    whole = 4 * sum(np.prod(one.shape) for one in parallel.weights)
    assert all(report.bytes(one, "weights") < 0.6 * whole for one in parallel.devices)


def test_all_devices_compute():
    parallel = _made("transformer", 4)
    parallel.compile("sgd", "mse")
    x, y = _data("transformer", 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel.fit(x, y, batch_size=8, verbose=0)
    report = reports.transfers(parallel, (x[:8], y[:8]))
    assert all(report.bytes("training", source=one) for one in parallel.devices)
    assert report.least is None
    if _ON_TENSORFLOW:
        assert "train_step: 100.0%" in parallel.explain()


@pytest.mark.usefixtures("_double")
def test_a_step_of_ones_own():
    (x, y), found = _data("transformer", 12), []
    for model in (_made("transformer"), _made("transformer", 4)):
        found.append(_stepped(model, x, y))
    assert difference(*found) < LIMIT


def _stepped(model, x, y):
    """The loss and the outputs of a step that a user has written."""
    if not _ON_TENSORFLOW:

        def loss_of(trained, others, x, y):
            outputs, _ = model.stateless_call(trained, others, x, training=True)
            return ops.mean((outputs - y) ** 2)

        import jax

        own = jax.grad(loss_of)
        is_parallel = hasattr(model, "template")
        step = model.function(own, rows=("x", "y")) if is_parallel else jax.jit(own)
        state = [[v.value for v in model.trainable_variables]]
        state.append([v.value for v in model.non_trainable_variables])
        return [np.asarray(one) for one in step(*state, x, y)]
    import tensorflow as tf

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = ops.mean((model(x, training=True) - y) ** 2)
        return tape.gradient(loss, [one.value for one in model.trainable_variables])

    run = model.function(step) if hasattr(model, "template") else tf.function(step)
    return [tf.convert_to_tensor(one).numpy() for one in run(tf.constant(x), tf.constant(y))]


@pytest.mark.skipif(not _ON_TENSORFLOW, reason="JAX takes gradients of functions")
def test_gradients_outside_of_steps_are_those_of_one_device():
    import tensorflow as tf

    x, _ = _data("contrastive", 6)
    plain, parallel = _made("contrastive"), _made("contrastive", 4)
    plain(x), parallel(x)
    parallel.set_weights(plain.get_weights())

    def gradients(model):
        with tf.GradientTape() as tape:
            loss = ops.sum(model(tf.constant(x, "float32")) ** 2)
        return tape.gradient(loss, [one.value for one in model.trainable_variables])

    with pytest.warns(UserWarning, match="runs on 2 of its 4 devices"):
        assert difference(gradients(plain), tf.function(lambda: gradients(parallel))()) < 1e-4


@pytest.mark.usefixtures("_double")
def test_a_saved_training_goes_on_anywhere(tmp_path, monkeypatch):
    x, y = _data("perceptron")
    trained = []
    for model in (_made("perceptron"), _made("perceptron", 4)):
        model.compile(optimizers.Adam(0.01), "mse")
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        trained.append(model)
    plain, parallel = trained
    plain.save(tmp_path / "plain.keras")
    parallel.save(tmp_path / "some.keras")
    loaded = [keras.saving.load_model(tmp_path / "some.keras")]
    assert [*loaded[0].placement.values()] == [*parallel.placement.values()]
    monkeypatch.setattr("keras_multigpu.modes.saving.choose_again", lambda *_: ("cpu:0", "cpu:1"))
    with pytest.warns(UserWarning, match="saved on 4 devices, and 2 are here"):
        loaded.append(keras.saving.load_model(tmp_path / "some.keras"))
    fewer = ("cpu:0", "cpu:1", "cpu:2")
    monkeypatch.setattr("keras_multigpu.modes.saving.choose_again", lambda *_: fewer)
    with pytest.warns(UserWarning, match="saved on 4 devices, and 3 are here"):
        loaded.append(keras.saving.load_model(tmp_path / "some.keras"))
    again = keras.saving.load_model(tmp_path / "plain.keras")  # its dropout begins anew
    for model in (plain, parallel, again, *loaded):
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert difference(variables(plain), variables(parallel)) < LIMIT
    for model in loaded:
        assert difference(variables(again), variables(model)) < LIMIT


@pytest.mark.usefixtures("_double")
def test_the_template_and_other_models_share_the_weights():
    x, y = _data("perceptron")
    plain, template = _made("perceptron"), _made("perceptron")
    others = [
        make_parallel(template, 4, model_devices=2),
        template,
        make_parallel(template, 3),
        make_parallel(template, 4, shard="weights"),
        make_parallel(template, 4, model_devices=4),
    ]
    used = [[optimizers.Adam(0.01) for _ in others] for _ in range(2)]
    for turn in (0, 1, 2, 0, 3, 4, 0):
        for model, optimizer in ((plain, used[0][turn]), (others[turn], used[1][turn])):
            model.compile(optimizer, "mse")
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        # BatchNormalization's float32 on JAX adds up from turn to turn.
        assert difference(plain.get_weights(), template.get_weights()) < 100 * LIMIT
        outputs = [model.predict(x, verbose=0) for model in (plain, template, *others[:3])]
        assert difference(outputs[:1] * 4, outputs[1:]) < 100 * LIMIT


def test_mixed_precision_trains_like_plain_data_mode():
    keras.config.set_dtype_policy("mixed_float16")
    (x, y), trained = _data("perceptron"), []
    for width in (1, 2):
        model = _made("perceptron", 4, width)
        # A larger scale may overflow in one order of sums, and not in the other.
        model.compile(optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=8.0), "mse")
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        trained.append(variables(model))
    assert difference(*trained) < 5e-3


@pytest.mark.skipif(not _ON_TENSORFLOW, reason="JAX's compiler chooses the types that cross")
def test_weights_cross_in_another_type():
    x, y = _data("perceptron", 8)
    found = []
    for wire_dtype in (None, "bfloat16"):
        model = _made("perceptron", 4, wire_dtype=wire_dtype)
        model.compile("sgd", "mse")
        found.append(reports.transfers(model, (x, y)).bytes("training"))
    assert found[1]["weights"] < 0.6 * found[0]["weights"]
    # Within a group sums cross in their own type: they are no gradients of weights.
    assert found[1]["gradients"] < 0.8 * found[0]["gradients"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_gpus": 4, "model_devices": 3}, "must divide .* model_devices=3 and 4 devices"),
        ({"n_gpus": 2, "model_devices": 4}, "Take 4 devices, or"),
        ({"n_gpus": 4, "model_devices": 0}, "positive integer. Received: model_devices=0"),
        ({"n_gpus": 4, "model_devices": "2"}, "positive integer. Received: model_devices='2'"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_told(options, message):
    with pytest.raises(ValueError, match=message):
        make_parallel(_made("perceptron"), **options)


def test_a_group_is_within_a_process():
    request = values.Request("data", _made("perceptron"), ("cpu:0",) * 6, {"model_devices": 2})
    wide.check_mesh(request, (0, 0, 1, 1, 1, 1))
    for owners in ((0, 0, 0, 1, 1, 1), (0, 1, 0, 1, 0, 1)):
        with pytest.raises(ValueError, match=f"processes {owners[0]}, {owners[1]}, 0, 1, .*Take"):
            wide.check_mesh(request, owners)


def test_a_model_without_large_layers_is_told():
    small = keras.Sequential([keras.Input((3,)), layers.Dense(5)])
    with pytest.raises(ValueError, match="can be divided by 2"):
        make_parallel(small, 4, model_devices=2)


@pytest.mark.parametrize(
    "options", [{"model_devices": 2}, {"mode": "model", "placement": "spread"}]
)
def test_a_model_whose_work_is_in_other_layers_is_told(options):
    convolutions = [layers.Conv2D(8, 3), layers.Conv2D(16, 3), layers.GlobalMaxPooling2D()]
    model = keras.Sequential([keras.Input((32, 32, 3)), *convolutions, layers.Dense(16)])
    told = "spread over 2 devices, do about 0% of the work of .*use `mode='data'` without"
    with pytest.warns(UserWarning, match=told):
        make_parallel(model, 2, **options)
    unbuilt = make_parallel(keras.Sequential([*convolutions, layers.Dense(16)]), 2, **options)
    with pytest.warns(UserWarning, match=told) as warned:
        unbuilt.predict(np.ones((4, 32, 32, 3)), verbose=0)
    assert len(warned) == 1


@pytest.mark.parametrize(
    "options", [{"model_devices": 2}, {"mode": "model", "placement": "spread"}]
)
def test_large_layers_that_the_devices_dont_divide_are_told(options):
    units = [layers.Dense(63), layers.Dense(63), layers.Dense(63)]
    told = r"that 2 divides. Received: .*/kernel \(63, 63\), .*, 78% of the weights of .* lengths"
    with pytest.warns(UserWarning, match=told):
        make_parallel(keras.Sequential([keras.Input((32,)), *units]), 2, **options)


def test_its_text_says_what_the_devices_do():
    assert "2 replicas, each on 2 devices" in repr(_made("perceptron", 4))


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="XLA does not say what it spreads")
@pytest.mark.parametrize("width", [2, 4])
def test_a_batch_as_long_as_a_layer_is_wide(width, rng):
    """Outputs of the shape of a kernel are no gradients of it."""
    layers = [keras.layers.Dense(units, "relu") for units in (128, 64)]
    model = keras.Sequential([keras.Input((32,)), *layers, keras.layers.Dense(10)])
    parallel = make_parallel(model, 4, model_devices=width)
    parallel.compile("sgd", "mse")
    parallel.train_on_batch(rng.normal(size=(64, 32)), rng.normal(size=(64, 10)))
    share = parallel.explain().partition("% of the work on rows")[0].rpartition(" ")[2]
    assert float(share) > 98
