"""`shard` on JAX: weights and slots spread over the devices, one device's numbers."""

from contextlib import nullcontext

import keras
import numpy as np
import pytest
from keras import layers
from support.cases import CASES, build_equal, compile_case
from support.parity import difference, take, variables

from keras_multigpu import make_parallel, reports
from keras_multigpu.engines.jax.state import state_shards
from keras_multigpu.layers import MultiHotDense

SHARDS = ["optimizer", "weights"]


@pytest.fixture
def small(monkeypatch):
    """Spreads the weights of small models too."""
    monkeypatch.setattr(state_shards, "_LEAST", 3)  # not of seeds


def _model():
    keras.utils.set_random_seed(1)
    dense = [layers.Dense(64, "tanh", name="wide"), layers.Dense(66)]
    return keras.Sequential([keras.Input((16,)), *dense, layers.Dense(5)])


def _data(rng, rows=40):
    return rng.normal(size=(rows, 16)), rng.integers(0, 5, rows)


def _compile(model, optimizer="adam"):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def _parts(variables):
    """How many elements of each variable the first device keeps."""
    return [variable.value.addressable_shards[0].data.size for variable in variables]


@pytest.mark.thin(8)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_trains_like_one_device(case, rng, small):
    number = CASES.index(case)
    x, y = case.data(rng, 70)
    plain, template = build_equal(case)
    parallel = make_parallel(template, (2, 4)[number % 2], shard=SHARDS[number % 3 > 0])
    histories = []
    for model in (plain, parallel):
        compile_case(case, model)
        histories.append(model.fit(x, y, 32, 2, shuffle=False, verbose=0).history)
    assert difference(*histories) < case.tolerance
    assert difference(variables(plain), variables(parallel)) < case.tolerance
    outputs = [model.predict(take(x, 5), verbose=0) for model in (plain, parallel, template)]
    assert difference(*outputs[:2]) < case.tolerance
    assert difference(*outputs[1:]) < case.tolerance


@pytest.mark.parametrize("shard", SHARDS)
def test_each_device_keeps_its_part(shard, rng):
    parallel = _compile(make_parallel(_model(), 4, shard=shard))
    before = parallel.placement
    # The biases and the last kernel are small, and whole.
    shares = [64 * 16 // 4, 64, 64 * 66 // 4, 66, 66 * 5, 5]
    assert list(before.values()) == [(share,) * 4 for share in shares]
    x, y = _data(rng, 32)
    for step in (parallel.train_on_batch, parallel.fit, parallel.evaluate):
        step(x, y)
        slots = parallel.optimizer.variables[2:]
        trained = parallel.trainable_variables
        assert _parts(slots) == [share for share in shares for _ in range(2)]
        kept = shares if shard == "weights" else [variable.value.size for variable in trained]
        assert _parts(trained) == kept
    assert make_parallel(_model(), 4).placement == {}


@pytest.mark.parametrize("shard", SHARDS)
def test_weights_that_are_cut_along_two_axes_only(shard, rng):
    """No axis of 34 can be cut for 4 devices: each is cut for 2."""
    results = []
    x, y = rng.normal(size=(12, 34)), rng.normal(size=(12, 34))
    for n in (0, 4):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((34,)), layers.Dense(34), layers.Dense(34)])
        model = make_parallel(model, n, shard=shard) if n else model
        model.compile("adam", "mse")
        losses = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
        steps = [model.train_on_batch(x, y), model.test_on_batch(x, y), model.evaluate(x, y)]
        results.append([losses, steps, model.predict(x), variables(model)])
    assert difference(*results) < 2e-5
    assert set(model.placement.values()) == {(34 * 34 // 4,) * 4, (34,) * 4}


@pytest.mark.parametrize("shard", SHARDS)
def test_a_depthwise_convolution_beside_a_weight_of_which_devices_have_copies(shard, small, rng):
    """Four devices divide no axis of (2, 3): XLA's compiler must not compute with its halves."""
    results = []
    x, y = rng.normal(size=(9, 6, 6, 2)), rng.normal(size=(9, 3))
    for n in (0, 4):
        keras.utils.set_random_seed(1)
        inner = [layers.DepthwiseConv2D(1), layers.GlobalAveragePooling2D(), layers.Dense(3)]
        model = keras.Sequential([keras.Input((6, 6, 2)), *inner])
        model = make_parallel(model, n, shard=shard) if n else model
        model.compile("adam", "mse")
        losses = model.fit(x, y, batch_size=5, shuffle=False, verbose=0).history
        results.append([losses, variables(model)])
    assert difference(*results) < 2e-5


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("rows", [1, 6])
def test_a_grouped_convolution_after_a_transposed_one(shard, rows, rng):
    """XLA must not compute with the parts of the first kernel's gradient: they are wrong."""
    results = []
    x, y = rng.normal(size=(rows, 4, 4, 16)), rng.normal(size=(rows, 2))
    for n in (0, 3):
        keras.utils.set_random_seed(1)
        convolutions = [layers.Conv2DTranspose(24, 3, strides=2), layers.Conv2D(32, 3, groups=4)]
        inner = [*convolutions, layers.GlobalAveragePooling2D(), layers.Dense(2)]
        model = keras.Sequential([keras.Input((4, 4, 16)), *inner])
        model = make_parallel(model, n, shard=shard) if n else model
        model.compile("sgd", "mse")
        losses = [model.train_on_batch(x, y) for _ in range(3)]
        results.append([losses, variables(model)])
    assert difference(*results) < 2e-5


def test_lengths_that_the_devices_do_not_divide():
    parts = state_shards.StateShards([f"cpu:{number}" for number in range(4)], "weights")
    assert parts.share((1023, 4)) == (1023,) * 4
    assert parts.share((1022, 6)) == (1022 * 6 // 4,) * 4  # twice along each axis
    assert parts.share((1022, 3)) == (1022 * 3 // 2,) * 4
    assert parts.share((1021, 3)) == (1021 * 3,) * 4
    large = keras.Sequential([keras.Input((1023,)), layers.Dense(1027, name="undivided")])
    with pytest.warns(
        UserWarning, match=r"more than its part of: .*undivided/kernel \(1023, 1027\)"
    ):
        make_parallel(large, 4, shard="weights")
    small = keras.Sequential([keras.Input((101,)), layers.Dense(53)])
    with pytest.warns(UserWarning, match=r"more than its part of: .*kernel \(101, 53\)"):
        make_parallel(small, 4, shard="weights")  # nothing is spread
    small.add(layers.Dense(52))
    make_parallel(small, 4, shard="weights")


@pytest.mark.parametrize("shard", SHARDS)
def test_no_more_is_sent_than_needed(shard, rng):
    """A gradient's part goes to one device, a weight's to all: 2 P (n - 1) / n bytes each way."""
    keras.utils.set_random_seed(1)
    dense = [keras.Input((128,)), *(layers.Dense(128, use_bias=False) for _ in range(3))]
    parallel = make_parallel(keras.Sequential(dense), 4, shard=shard)
    parallel.compile("adam", "mse")
    x = rng.normal(size=(32, 128))
    sent = reports.transfers(parallel, (x, x)).bytes("training", "cpu:0", "cpu:1")
    least = parallel.count_params() * 4 * 3 / 4
    assert least <= sent["weights"] < 1.01 * least
    assert least <= sent["gradients"] < 1.01 * least
    assert sent.get("activations", 0) < 0.01 * least


def test_a_file_is_spread_when_it_is_loaded(rng, tmp_path):
    x, y = _data(rng)
    parallel = _compile(make_parallel(_model(), 4, shard="weights"))
    parallel.fit(x, y, verbose=0)
    parallel.save_weights(tmp_path / "model.weights.h5")
    on_two = _compile(make_parallel(_model(), 2, shard="weights"))
    on_two.optimizer.build(on_two.trainable_variables)
    on_two.load_weights(tmp_path / "model.weights.h5")
    for variable in (on_two.variables[0], on_two.optimizer.variables[2]):
        assert _parts([variable]) == [16 * 64 // 2]
    assert difference(variables(parallel), variables(on_two)) == 0


def test_interrupted_and_resumed(rng, tmp_path):
    x, y = _data(rng)

    class Interrupts(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def trained(n, *callbacks):
        model = _compile(make_parallel(_model(), n, shard="weights"))
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
        model.fit(x, y, 16, 4, shuffle=False, verbose=0, callbacks=[backup, *callbacks])
        return model

    with pytest.raises(KeyboardInterrupt):
        trained(4, Interrupts())
    plain = _compile(_model())
    plain.fit(x, y, 16, 4, shuffle=False, verbose=0)
    assert difference(variables(plain), variables(trained(2))) < 2e-5


@pytest.mark.thin(4)
@pytest.mark.parametrize("units", [1, 3])
@pytest.mark.parametrize("shard", SHARDS)
def test_tables_stay_spread_by_rows(shard, units, rng):
    """Indices and sums cross, not the rows: as few bytes for a table of any width."""
    sent = []
    for width in (4096, 8192):
        indices, weights = rng.integers(-1, width, (40, 6)), rng.normal(size=(40, 6))
        x, y = {"i": indices, "w": weights}, rng.normal(size=(40, units))
        plain, parallel = (_wide(width, units) for _ in range(2))
        parallel = make_parallel(parallel, 4, shard=shard)
        assert parallel.placement["table/kernel"] == (width * units // 4,) * 4
        logs = []
        for model in (plain, parallel):
            model.compile("adam", "mse")
            logs.append(model.fit(x, y, 16, 2, shuffle=False, verbose=0).history)
        assert difference(*logs) < 1e-5
        assert difference(variables(plain), variables(parallel)) < 1e-5
        assert difference(plain.predict(x, verbose=0), parallel.predict(x, verbose=0)) < 1e-5
        batch = {name: part[:16] for name, part in x.items()}, y[:16]
        report = reports.transfers(parallel, batch)
        sent.append(sum(report.bytes("training", "cpu:0", "cpu:1").values()))
    if shard == "weights":
        assert sent[0] == sent[1] < 16 * 6 * 4 * 4


def _wide(width, units):
    keras.utils.set_random_seed(1)
    i = keras.Input((6,), dtype="int32", name="i")
    w = keras.Input((6,), name="w")
    table = MultiHotDense(units, width, padding=-1, name="table")
    return keras.Model({"i": i, "w": w}, table(i, layers.Dense(6, "tanh")(w)))


@pytest.mark.parametrize("dtype", ["uint8", pytest.param("int16", marks=pytest.mark.slow)])
def test_indices_of_types_that_do_not_hold_the_width(dtype, rng):
    width = {"uint8": 256, "int16": 40_000}[dtype]
    x = rng.integers(0, 200, (8, 6)).astype(dtype)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,), dtype=dtype), MultiHotDense(8, width)])
    parallel = make_parallel(model, 4, shard="weights")
    parallel.compile("sgd", "mse")
    parallel.fit(x, rng.normal(size=(8, 8)), batch_size=8, verbose=0)
    assert difference(parallel.predict(x, batch_size=8, verbose=0), np.asarray(model(x))) < 1e-5


def test_the_templates_own_optimizer_follows_to_other_devices(rng):
    x, y = _data(rng)
    template = _compile(_model())
    for n in (4, 2):
        parallel = _compile(make_parallel(template, n, shard="weights"))
        parallel.fit(x, y, 16, verbose=0)
        template.fit(x, y, 16, verbose=0)
    assert np.isfinite(template.get_weights()[0]).all()


def test_a_look_at_a_step_leaves_the_state_in_parts(rng):
    x, y = _data(rng, 16)
    parallel = _compile(make_parallel(_model(), 4, shard="weights"))
    parallel.fit(x, y, verbose=0)
    slots = parallel.optimizer.variables[2:3]
    reports.transfers(parallel, (x, y))
    assert _parts([*parallel.variables[:1], *slots]) == [16 * 64 // 4] * 2


@pytest.mark.parametrize("way", [{"shard": "weights"}, {"shard": "optimizer"}, {"mode": "model"}])
def test_what_a_file_gives_is_spread_at_once(way, rng, tmp_path):
    """No device has a whole model while a file is read, or when the template gets new weights."""
    parallel = _compile(make_parallel(_model(), 2, **way))
    parallel.fit(*_data(rng), verbose=0)
    parallel.save(tmp_path / "some.keras")
    loaded = keras.saving.load_model(tmp_path / "some.keras")

    def matrices(model):
        return [one for one in (*model.variables, *model.optimizer.variables) if len(one.shape) > 1]

    parts = _parts(matrices(loaded))
    assert sum(parts) < sum(np.size(one) for one in matrices(loaded))
    assert parts == _parts(matrices(parallel))
    assert difference(variables(parallel), variables(loaded)) == 0
    weights = [2 * one for one in parallel.get_weights()]
    loaded.template.set_weights(weights)
    assert _parts(matrices(loaded)) == parts
    assert difference(loaded.get_weights(), weights) == 0
    with pytest.raises(ValueError, match="shape"):
        loaded.get_layer("wide").kernel.assign(np.ones((3, 3)))


@pytest.mark.parametrize(("n", "spread_first"), [(3, True), (2, True), (2, False)])
def test_a_template_of_models_that_spread_other_weights(n, spread_first, rng):
    """What one model spreads over its devices, another leaves on one: all compute at any time."""
    dense = [layers.Dense(64), layers.Dense(64), layers.Dense(3)]
    template = keras.Sequential([keras.Input((64,)), *dense])
    ways = [(4, {"shard": "weights"}), (n, {"mode": "model"})]
    parallel = [make_parallel(template, k, **way) for k, way in ways[:: 1 if spread_first else -1]]
    x, y = rng.normal(size=(8, 64)), rng.normal(size=(8, 3))
    for trained in (*parallel, template):
        trained.compile("adam", "mse")
        trained.fit(x, y, verbose=0)
        expected = trained.predict(x, verbose=0)
        for model in (template, *parallel, template, *parallel[::-1]):
            assert difference(model.predict(x, verbose=0), expected) < 1e-5
            assert difference(np.asarray(model(x)), expected) < 1e-5


@pytest.mark.filterwarnings("error:`shard` spreads a weight along axes that")
def test_what_is_not_spread_is_told_if_it_is_much():
    """511 has no factor of 4."""
    told = r"Each device keeps more than its part of: \S+ \(511, 511\)"
    for width, context in ((511, pytest.warns(UserWarning, match=told)), (64, nullcontext())):
        model = keras.Sequential([keras.Input((64,)), layers.Dense(511), layers.Dense(width)])
        with context:
            make_parallel(model, 4, shard="weights").build((None, 64))
