"""`shard`: weights and slots spread over the devices, and one device's numbers all the same."""

import keras
import numpy as np
import pytest
from keras import layers, optimizers
from support.parity import difference, variables
from support.precision import all_in_double_precision

from keras_multigpu import make_parallel

_ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
# On JAX Keras computes losses in float32, and so the gradients begin with its rounding.
LIMIT = 1e-12 if _ON_TENSORFLOW else 1e-5

SHARDS = ("optimizer", "weights")
every_shard = pytest.mark.parametrize("shard", SHARDS)


def _by_name():
    first = optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.3)
    return optimizers.MultiOptimizer(
        optimizers.OptimizerMap(optimizers.Adam(0.02), {".*/first/.*": first})
    )


def _by_function():
    made = {}

    def choose(variable):
        kind = "bias" if "bias" in variable.path else "kernel"
        return made.setdefault(
            kind, optimizers.SGD(0.05, momentum=0.9) if kind == "bias" else optimizers.Adam(0.02)
        )

    return optimizers.MultiOptimizer(choose)


OPTIMIZERS = {
    "adam": lambda: optimizers.Adam(0.02, amsgrad=True),
    "averaged": lambda: optimizers.AdamW(
        0.02, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=2
    ),
    "clipped_each": lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.02),
    "clipped_all": lambda: optimizers.RMSprop(0.01, global_clipnorm=0.02, weight_decay=0.1),
    "clipped_values": lambda: optimizers.Lion(0.01, clipvalue=0.001),
    "accumulated": lambda: optimizers.Nadam(
        0.02, gradient_accumulation_steps=2, global_clipnorm=0.1
    ),
    "scaled": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.02, global_clipnorm=0.1), initial_scale=8.0
    ),
    "adafactor": lambda: optimizers.Adafactor(0.05),
    "lamb": lambda: optimizers.Lamb(0.02),
    "muon": lambda: optimizers.Muon(0.02),
    "by_name": _by_name,
    "by_function": _by_function,
}


def _build():
    keras.utils.set_random_seed(2)
    tokens = keras.Input((5,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(12, 4, name="embedding")(tokens))
    x = layers.Dense(16, use_bias=False, name="first", kernel_regularizer="l2")(x)
    x = layers.BatchNormalization(momentum=0.5)(x)
    x = layers.Dense(8, activation="tanh", kernel_constraint="unit_norm")(x)
    return keras.Model(tokens, layers.Dense(2)(x))


def _data(rows=23):
    rng = np.random.default_rng(3)
    return rng.integers(0, 12, size=(rows, 5)), rng.normal(size=(rows, 2))


@pytest.fixture(autouse=True)
def _small_weights_are_spread(monkeypatch):
    if _ON_TENSORFLOW:
        from keras_multigpu.engines.tensorflow.weights import homes

        monkeypatch.setattr(homes, "LEAST", 16)
    else:
        from keras_multigpu.engines.jax.state import state_shards

        monkeypatch.setattr(state_shards, "_LEAST", 3)  # not seeds


@pytest.fixture
def _double():
    with all_in_double_precision():
        yield


def _train(model, optimizer=None, epochs=2, **options):
    x, y = _data()
    if optimizer is not None:
        model.compile(optimizer, "mse", metrics=["mae"], **options)
    history = model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return history.history


# Each optimizer once on each backend, with the other `shard` there.
@pytest.mark.thin(12)
@pytest.mark.parametrize(
    ("name", "shard"),
    [(name, SHARDS[(k + _ON_TENSORFLOW) % 2]) for k, name in enumerate(OPTIMIZERS)],
)
@pytest.mark.usefixtures("_double")
def test_every_optimizer(name, shard):
    plain, parallel = _build(), make_parallel(_build(), 4, shard=shard)
    histories = [_train(model, OPTIMIZERS[name]()) for model in (plain, parallel)]
    assert difference(*histories) < 1e-6  # Keras keeps its metrics in float32
    assert difference(variables(plain), variables(parallel)) < LIMIT
    assert difference(_build().get_weights(), plain.get_weights()) > 1e-3


@pytest.mark.filterwarnings("ignore:.*runs eagerly, and so on")
@pytest.mark.thin(6)
@pytest.mark.parametrize(
    "option", [{"jit_compile": True}, {"run_eagerly": True}, {"steps_per_execution": 2}], ids=str
)
@every_shard
@pytest.mark.usefixtures("_double")
def test_options_of_compile(option, shard):
    plain, parallel = _build(), make_parallel(_build(), 3, shard=shard)
    used = [optimizers.Adam(0.02, global_clipnorm=0.1) for _ in range(2)]
    _train(plain, used[0])
    _train(parallel, used[1], **option)
    assert difference(variables(plain), variables(parallel)) < LIMIT


@every_shard
@pytest.mark.usefixtures("_double")
def test_a_state_that_the_compiler_spreads_over_some_devices(shard):
    """A metric's, after a weight of whose last axis two devices have a half each."""
    plain, parallel = (
        keras.Sequential([keras.Input((5,)), *map(layers.Dense, (1, 3, 2))]) for _ in range(2)
    )
    parallel.set_weights(plain.get_weights())
    parallel = make_parallel(parallel, 4, shard=shard)
    x, y = _data(7)
    for model in (plain, parallel):
        model.compile(optimizers.Adam(0.02), "mse", weighted_metrics=[keras.metrics.R2Score()])
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert difference(variables(plain), variables(parallel)) < LIMIT
    logs = [model.evaluate(x, y, batch_size=4, verbose=0) for model in (plain, parallel)]
    assert difference(*logs) < LIMIT


@pytest.mark.filterwarnings("ignore:.*runs eagerly, and so on")
@every_shard
@pytest.mark.usefixtures("_double")
def test_a_step_that_runs_eagerly_with_weights_that_not_all_devices_divide(shard):
    plain, parallel = (
        keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(6, "tanh"),
                layers.BatchNormalization(),
                layers.Dense(2),
            ]
        )
        for _ in range(2)
    )
    parallel.set_weights(plain.get_weights())
    parallel = make_parallel(parallel, 4, shard=shard)
    x, y = _data(8)
    for model in (plain, parallel):
        model.compile(optimizers.Lamb(0.02, use_ema=True), "mse", run_eagerly=True)
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert difference(variables(plain), variables(parallel)) < LIMIT


@pytest.mark.slow
@every_shard
@pytest.mark.usefixtures("_double")
def test_the_template_works_on_its_own_at_any_time(shard):
    x, _ = _data()
    plain, template = _build(), _build()
    parallel = make_parallel(template, 4, shard=shard)
    used = [[optimizers.Adam(0.02), optimizers.SGD(0.1, momentum=0.9)] for _ in range(2)]
    for turn in (0, 1, 0):
        _train(plain, used[0][turn], epochs=1)
        _train((parallel, template)[turn], used[1][turn], epochs=1)
        assert difference(plain.get_weights(), template.get_weights()) < LIMIT
        outputs = [model.predict(x, verbose=0) for model in (plain, template, parallel)]
        assert difference(outputs[0], outputs[1]) < LIMIT
        assert difference(outputs[0], outputs[2]) < LIMIT


@pytest.mark.slow
@pytest.mark.usefixtures("_double")
def test_models_on_different_devices_share_a_template():
    plain, template = _build(), _build()
    both = [make_parallel(template, n, shard="weights") for n in (4, 2)]
    both.append(make_parallel(template, 3))
    used = [[optimizers.Adam(0.02, global_clipnorm=0.1) for _ in range(3)] for _ in range(2)]
    for turn in (0, 1, 2, 0, 1):
        _train(plain, used[0][turn], epochs=1)
        _train(both[turn], used[1][turn], epochs=1)
    assert difference(plain.get_weights(), template.get_weights()) < LIMIT
    for own, other in zip(*used):
        slots = [[np.asarray(slot) for slot in one.variables] for one in (own, other)]
        assert difference(*slots) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shard", "n"), [("weights", 2), (None, None), ("optimizer", 4), (None, 2)]
)
@pytest.mark.usefixtures("_double")
def test_a_saved_training_goes_on_anywhere(shard, n, tmp_path):
    plain, parallel = _build(), make_parallel(_build(), 4, shard="weights")
    for model in (plain, parallel):
        _train(model, optimizers.Adam(0.02), epochs=1)
    parallel.save_weights(tmp_path / "some.weights.h5")
    parallel.save(tmp_path / "some.keras")
    again = _build()
    if n is not None:
        again = make_parallel(again, n, shard=shard)
    again.compile(optimizers.Adam(0.02), "mse", metrics=["mae"])
    again.optimizer.build(again.trainable_variables)
    again.load_weights(tmp_path / "some.weights.h5")
    loaded = keras.saving.load_model(tmp_path / "some.keras")
    for model in (plain, again, loaded):
        _train(model, epochs=1)
    assert difference(variables(plain), variables(again)) < LIMIT
    assert difference(variables(plain), variables(loaded)) < LIMIT


@pytest.mark.slow
def test_mixed_precision_trains_like_plain_data_mode():
    keras.config.set_dtype_policy("mixed_float16")
    trained = []
    for shard in (None, "weights"):
        parallel = make_parallel(_build(), 4, shard=shard)
        _train(parallel, optimizers.SGD(0.1))
        trained.append(variables(parallel))
    assert difference(*trained) < 2e-3


@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_layers_that_are_built_in_a_step(shard):
    """`build` only marks the model as built. Its weights are moved before the next loop."""

    class Late(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.last = layers.Dense(8, "tanh"), layers.Dense(3)

        def call(self, x):
            return self.last(self.first(x))

    x, y = np.ones((7, 5)), np.ones((7, 3))
    found = []
    for n in (None, 4):
        keras.utils.set_random_seed(1)
        model = Late()
        with pytest.warns(UserWarning, match="does not have a `build\\(\\)` method"):
            model.build((None, 5))
        if n:
            model = make_parallel(model, n, shard=shard)
        model.compile(optimizers.Adam(0.1), "mse")
        for _ in range(3):
            model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
            found.append(model.get_weights())
    assert difference(found[:3], found[3:]) < 1e-6
