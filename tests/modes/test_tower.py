"""Tower mode: replicas that see the whole batch, mixed into one prediction."""

import copy
import re
import sys

import keras
import numpy as np
import pytest
from keras import layers, ops
from support.cases import CASES, build_equal, compile_case
from support.parity import difference, take, variables

import keras_multigpu
from keras_multigpu import make_parallel
from keras_multigpu.layers import MultiHotDense

pytestmark = pytest.mark.thin(10)

# The cases of which each shows something that the others don't.
NAMES = {
    *("mlp", "unbuilt_sequential", "conv", "residual_shared_block", "embedding_lstm_masked"),
    *("regularized", "bidirectional_masked_output", "dict_inputs_and_outputs", "own_steps"),
    *("subclassed_add_loss", "nested_structures", "frozen_backbone", "text_input"),
    *("scipy_csr_input", "clipped_accumulated_ema"),
}
every_case = pytest.mark.parametrize("case", [c for c in CASES if c.name in NAMES], ids=str)


@every_case
@pytest.mark.slow_on_jax
def test_shared_replicas_train_like_one_device(case, rng, tmp_path):
    x, y = case.data(rng, 70)
    plain, template = build_equal(case)
    parallel = make_parallel(template, 3, mode="tower")
    histories = []
    for model in (plain, parallel):
        compile_case(case, model)
        keras.utils.set_random_seed(3)
        histories.append(model.fit(x, y, 32, 2, shuffle=False, verbose=0).history)
    assert difference(*histories) < case.tolerance
    assert difference(variables(plain), variables(parallel)) < case.tolerance
    outputs = [model.predict(take(x, 5), verbose=0) for model in (plain, parallel)]
    assert difference(*outputs) < case.tolerance
    parallel.save_weights(tmp_path / "tower.weights.h5")
    plain.load_weights(tmp_path / "tower.weights.h5")
    assert difference(plain.get_weights(), parallel.get_weights()) == 0


@every_case
@pytest.mark.slow_on_jax
def test_independent_replicas_of_every_case(case, rng, tmp_path):
    x, y = case.data(rng, 37)
    (template,) = build_equal(case, 1)
    parallel = make_parallel(template, 2, mode="tower", replicas="independent")
    compile_case(case, parallel)
    parallel.fit(x, y, 32, 2, verbose=0)
    first, second = parallel.replicas
    assert first is template
    assert len(first.weights) == len(second.weights)
    assert not set(map(id, first.weights)) & set(map(id, second.weights))
    parts = parallel.predict_replicas(x, verbose=0)
    alone = [model.predict(x, verbose=0) for model in (first, second)]
    if case.name != "own_steps":
        assert difference(parts, alone) < case.tolerance
    spread = keras.tree.flatten(parallel.disagreement(x, verbose=0))
    assert all(one.shape == (37,) and np.isfinite(one).all() for one in spread)
    parallel.save_weights(tmp_path / "tower.weights.h5")
    kept = parallel.get_weights()
    parallel.set_weights([0 * weight for weight in kept])
    parallel.load_weights(tmp_path / "tower.weights.h5")
    assert difference(parallel.get_weights(), kept) == 0


def _regressor(regularizer="l2", **first_layer):
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "tanh", **first_layer),
            layers.BatchNormalization(),
            layers.Dense(2, kernel_regularizer=regularizer),
        ]
    )


def _data(rng, rows=70):
    return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 2))


def _trained(model):
    """How many numbers are trained."""
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


def _committee(n=3, template=None, **options):
    template = template or _regressor()
    return make_parallel(template, n, mode="tower", replicas="independent", **options)


def _by_hand(parallel, mix):
    """The same committee as one ordinary Keras model on one device."""
    models = [keras.models.clone_model(model) for model in parallel.replicas]
    for model, replica in zip(models, parallel.replicas):
        model.set_weights(replica.get_weights())
    inputs = keras.Input((6,))
    outputs = [model(inputs) for model in models]
    takes_inputs = isinstance(mix, keras_multigpu.layers.GatedMix)
    mixed = mix(outputs, features=inputs) if takes_inputs else mix(outputs)
    return keras.Model(inputs, mixed), models


MIXES = {
    "mean": keras_multigpu.layers.mean_mix,
    "weighted": keras_multigpu.layers.WeightedMix,
    "gaussian": keras_multigpu.layers.GaussianMix,
    "gated": keras_multigpu.layers.GatedMix,
}


@pytest.mark.parametrize("mix", MIXES)
def test_a_committee_trains_like_one_model_of_its_parts(mix, rng):
    x, y = _data(rng)
    parallel = _committee(3, _regressor(None), mix=mix, loss_of="mix")
    keras.utils.set_random_seed(5)
    reference_mix = MIXES[mix]()
    reference, members = _by_hand(parallel, reference_mix)
    parallel.mix.set_weights(reference_mix.get_weights())
    loss = keras_multigpu.layers.GaussianNLL() if mix == "gaussian" else "mse"
    y = y[:, :1] if mix == "gaussian" else y
    histories = []
    for model in (reference, parallel):
        model.compile(keras.optimizers.SGD(0.1), loss)
        histories.append(model.fit(x, y, 32, 3, shuffle=False, verbose=0).history)
    assert difference(*histories) < 1e-5
    for member, replica in zip(members, parallel.replicas):
        assert difference(member.get_weights(), replica.get_weights()) < 1e-5
    assert difference(reference_mix.get_weights(), parallel.mix.get_weights()) < 1e-5
    assert difference(*[model.predict(x, verbose=0) for model in (reference, parallel)]) < 1e-5


def test_replicas_trained_each_by_its_own_loss(rng):
    x, y = _data(rng)
    parallel = _committee(3)
    alone = [keras.models.clone_model(model) for model in parallel.replicas]
    for model, replica in zip(alone, parallel.replicas):
        model.set_weights(replica.get_weights())
        model.compile(keras.optimizers.SGD(0.1), "mse")
    parallel.compile(keras.optimizers.SGD(0.1), "mse")
    losses = [model.fit(x, y, 32, 3, shuffle=False, verbose=0).history["loss"] for model in alone]
    history = parallel.fit(x, y, 32, 3, shuffle=False, verbose=0).history
    assert difference(history["loss"], list(np.mean(losses, axis=0))) < 1e-5
    for model, replica in zip(alone, parallel.replicas):
        assert difference(model.get_weights(), replica.get_weights()) < 1e-5
    mixed = np.mean([model.predict(x, verbose=0) for model in alone], axis=0)
    own = sum(float(ops.sum(model.losses[0])) for model in alone) / 3
    logs = parallel.evaluate(x, y, verbose=0, return_dict=True)
    assert abs(logs["mix_loss"] - np.mean((mixed - y) ** 2) - own) < 1e-5
    losses = [model.evaluate(x, y, verbose=0) for model in alone]
    assert abs(logs["loss"] - np.mean(losses)) < 1e-5


def test_own_losses_need_a_mix_without_weights(rng):
    x, y = _data(rng)
    parallel = _committee(2, loss_of="replicas", mix="weighted")
    with pytest.raises(ValueError, match="a mix without weights. Received: mix=.*1 weight. Set"):
        parallel.compile("sgd", "mse")
    assert not parallel.compiled
    parallel.loss_of = "mix"
    parallel.compile("sgd", "mse")
    parallel.fit(x, y, verbose=0)


def test_own_losses_need_the_outputs_as_they_are(rng):
    x, y = _data(rng)
    parallel = _committee(2)
    parallel.compile("sgd", "mse")
    with pytest.raises(ValueError, match="(?s)outputs as they are. Received: y_pred=.*Set `par"):
        parallel.compute_loss(x, y, parallel(x) / 2)


class Blend(layers.Layer):
    """A mix with weights."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, outputs):
        return self.dense(ops.concatenate(outputs, axis=-1))


def test_what_is_trained_by_default():
    without_weights = ("mean", "gaussian", layers.Maximum(), sum)
    for mix in (*without_weights, "weighted", "gated", Blend()):
        expected = "replicas" if mix in without_weights else "mix"
        assert _committee(2, mix=mix).loss_of == expected, mix
    for given in ("mix", "replicas"):
        assert _committee(2, loss_of=given).loss_of == given
    assert make_parallel(_regressor(), 2, mode="tower").loss_of == "mix"


def test_what_is_trained_by_default_where_the_model_has_its_own_step():
    template = next(case for case in CASES if case.name == "own_steps").build()
    assert _committee(2, template).loss_of == "mix"
    assert _committee(2, Plain()).loss_of == "replicas"


def test_what_is_trained_follows_the_mix_and_is_kept_in_files(rng):
    x, y = _data(rng)
    parallel = _committee(2)
    parallel.compile("sgd", "mse")
    for mix, loss_of in (("weighted", "mix"), ("mean", "replicas")):
        parallel.mix = mix
        assert (parallel.loss_of, parallel.compiled) == (loss_of, False)
        parallel.compile("sgd", "mse")
        parallel.fit(x, y, verbose=0)
    cls, config = type(parallel), parallel.get_config()
    assert cls.from_config(config).loss_of == config["loss_of"] == "replicas"
    assert cls.from_config({**config, "loss_of": "mix"}).loss_of == "mix"
    del config["loss_of"]  # as in files from before there was a choice
    assert cls.from_config(config).loss_of == "mix"
    with pytest.raises(ValueError, match="`loss_of` must be None, .*loss_of='all'"):
        parallel.loss_of = "all"


def test_replicas_begin_apart_and_share_what_is_fixed(rng):
    template = _regressor(kernel_initializer=keras.initializers.GlorotUniform(seed=3))
    norm = template.layers[1]
    norm.moving_mean.assign(np.arange(8.0))
    template.layers[2].trainable = False
    parallel = _committee(3, template)
    kernels = [model.layers[0].kernel.numpy() for model in parallel.replicas]
    assert parallel.replicas[0] is template
    for first, second in [(0, 1), (0, 2), (1, 2)]:
        assert np.abs(kernels[first] - kernels[second]).max() > 0.1
    for model in parallel.replicas[1:]:
        assert difference(model.layers[1].get_weights()[2:], norm.get_weights()[2:]) == 0
        assert difference(model.layers[2].get_weights(), template.layers[2].get_weights()) == 0
    template.layers[2].trainable = True
    assert _trained(parallel) == 3 * _trained(template)
    parallel.trainable = False
    assert not parallel.trainable_variables


@pytest.mark.parametrize("how", ["member", "layer", "weight"])
def test_a_member_frozen_alone(how, rng):
    template = _regressor()
    template.layers[0].trainable = False  # is no reason to warn
    parallel = _committee(2, template)
    member = parallel.replicas[1]
    kernel = member.layers[2].kernel
    frozen = {"member": member, "layer": member.layers[2], "weight": kernel}[how]
    frozen.trainable = False
    told = f"trainable=False for '{frozen.name}' in the member '{member.name}', which is undone"
    parallel.compile("sgd", "mse")
    with pytest.warns(UserWarning, match=told):
        parallel.fit(*_data(rng), verbose=0)
    assert kernel.trainable
    template.layers[2].trainable = False
    assert parallel.trainable_variables  # follows, without a warning
    assert not kernel.trainable


def test_the_template_is_trained_alone_beside_replicas_on_its_device(rng):
    """Each has its copy of what is fixed: on JAX a step takes over the memory of its model's."""
    x, y = _data(rng)
    template = _regressor()
    template.layers[2].trainable = False
    parallel = _committee(1, template, num_replicas=3)
    for model in (template, parallel):
        model.compile("sgd", "mse")
        model.fit(x, y, verbose=0)
    second = parallel.replicas[1].layers[2].get_weights()
    assert difference(second, template.layers[2].get_weights()) == 0


def test_each_shared_replica_draws_its_own_numbers():
    template = keras.Sequential([keras.Input((50,)), layers.Dropout(0.5, seed=1)])
    parallel = make_parallel(template, 3, mode="tower")
    x = np.ones((4, 50), "float32")
    parts = parallel.predict_replicas(x, training=True, verbose=0)
    assert len(parts) == 3
    assert all(set(np.unique(part)) == {0.0, 2.0} for part in parts)
    assert not any(np.array_equal(parts[a], parts[b]) for a, b in [(0, 1), (0, 2), (1, 2)])
    again = parallel.predict_replicas(x, training=True, verbose=0)
    assert not np.array_equal(parts[0], again[0])
    mixed = np.asarray(parallel(x, training=True))
    assert set(np.unique(np.round(mixed * 3))) <= {0.0, 2.0, 4.0, 6.0}
    assert len(np.unique(np.round(mixed, 4))) == 4
    assert difference(parallel.predict(x, verbose=0), x) == 0
    with pytest.warns(UserWarning, match="zero by construction.*training=False. Use `tr"):
        assert difference(parallel.disagreement(x, verbose=0), np.zeros(4)) == 0
    assert parallel.disagreement(x, training=True, verbose=0).min() > 0.3


def test_a_disagreement_that_is_zero_by_construction(rng):
    x, _ = _data(rng, 5)
    shared = make_parallel(_regressor(), 2, mode="tower")
    with pytest.warns(UserWarning, match="no random numbers.*replicas='shared', training=True"):
        shared.disagreement(x, training=True, verbose=0)
    for single in (_committee(1), make_parallel(_regressor(), 1, mode="tower")):
        with pytest.warns(UserWarning, match="single replica is zero.*Received: 1 replica"):
            assert np.array_equal(single.disagreement(x, verbose=0), np.zeros(5))


def test_a_gaussian_mix_needs_its_loss(rng):
    x, y = _data(rng)
    parallel = _committee(2, mix="gaussian")
    for loss in ("mse", keras.losses.MeanSquaredError(), ["mse"], {"any": ops.mean}):
        with pytest.raises(ValueError, match=r"compares with the targets.*loss=.*GaussianNLL\(\)"):
            parallel.compile("sgd", loss)
        assert not parallel.compiled
    parallel.compile("sgd", keras_multigpu.layers.GaussianNLL())
    parallel.fit(x, y[:, :1], verbose=0)
    parallel.mix = "mean"
    parallel.compile("sgd", "mse")
    parallel.mix = "gaussian"
    assert parallel.predict(x, verbose=0).shape == (70, 2)
    with pytest.raises(ValueError, match="compiled again after its `mix` was set"):
        parallel.fit(x, y, verbose=0)
    template = _regressor()
    template.compile("sgd", "mse")  # fits the two columns, which the mix reads otherwise
    assert not _committee(2, template, mix="gaussian").compiled


def test_metrics_that_read_variances_are_told_once(rng):
    x, y = _data(rng)

    def error_of_means(y_true, y_pred):
        return ops.abs(y_true - y_pred[:, :1])

    parallel, rmse = _committee(2, mix="gaussian"), keras_multigpu.layers.GaussianRMSE()
    loss = keras_multigpu.layers.GaussianNLL()
    parallel.compile("sgd", loss, metrics=[rmse, error_of_means])
    parallel.fit(x, y[:, :1], verbose=0)
    parallel.compile("sgd", loss, metrics=["mae", rmse], weighted_metrics=["mse"])
    parallel.predict(x, verbose=0)
    with pytest.warns(UserWarning, match="variances too. Received: 'mae', 'mse'. Use") as told:
        parallel.fit(x, y[:, :1], validation_split=0.5, verbose=0)
    parallel.evaluate(x, y[:, :1], verbose=0)
    assert len(told) == 1
    assert told[0].filename == __file__


@pytest.mark.slow_on_jax
def test_looking_at_the_replicas_changes_nothing(rng):
    x, y = _data(rng)
    template = _regressor()
    template.add(layers.Dropout(0.5))
    parallel = make_parallel(template, 2, mode="tower")
    parallel.compile("sgd", "mse")
    parallel.fit(x, y, verbose=0)
    before = parallel.predict(x, verbose=0)
    statistics = template.layers[1].get_weights()
    parallel.predict_replicas(x, training=True, verbose=0)
    assert difference(template.layers[1].get_weights(), statistics) == 0
    assert difference(parallel.predict(x, verbose=0), before) == 0


def test_disagreement_is_the_spread_over_the_replicas(rng):
    x, _ = _data(rng, 5)
    parallel = _committee(4)
    parts = np.stack(parallel.predict_replicas(x, batch_size=2, verbose=0)).astype("float64")
    assert parts.shape == (4, 5, 2)
    expected = np.sqrt(parts.var(axis=0).mean(axis=1))
    assert difference(parallel.disagreement(x, verbose=0), expected) < 1e-6
    assert expected.min() > 0.01


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`")
def test_shared_replicas_of_a_float8_model_are_not_trained(rng):
    """Each replica's gradient is the new value of a scale, and must not be added to the others'."""
    x, y = _data(rng)
    template = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    template.quantize("float8")
    parallel = make_parallel(template, 2, "tower")
    parallel.compile("sgd", "mse")
    with pytest.raises(
        ValueError, match="such as the scales of float8 layers. Received: 'sequential"
    ):
        parallel.fit(x, y, verbose=0)
    assert np.isfinite(parallel.predict(x, verbose=0)).all()


def test_another_mix_trains_something_else(rng):
    """A layer that was not built when it was given may have had weights, so the mix was trained."""
    x, y = _data(rng)
    template = keras.Sequential([layers.Dense(2)])
    parallel = make_parallel(template, 2, "tower", replicas="independent", mix=layers.Average())
    parallel.compile("sgd", "mse")
    parallel.fit(x, y, verbose=0)
    assert parallel.loss_of == "mix"
    parallel.mix = "mean"
    assert parallel.loss_of == "replicas"
    assert not parallel.compiled


@pytest.mark.slow_on_jax
def test_the_mix_is_changed_after_training(rng, tmp_path):
    x, y = _data(rng)
    parallel = _committee(3)
    parallel.compile("sgd", "mse")
    parallel.fit(x, y, verbose=0)
    parts = parallel.predict_replicas(x, verbose=0)
    assert difference(parallel.predict(x, verbose=0), np.mean(parts, axis=0)) < 1e-6
    parallel.mix = lambda outputs: ops.max(ops.stack(outputs), axis=0)
    assert difference(parallel.predict(x, verbose=0), np.max(parts, axis=0)) < 1e-6
    parallel.fit(x, y, verbose=0)
    parallel.mix = keras_multigpu.layers.GaussianMix(own_variance=False)
    assert parallel.outputs[0].shape == (None, 4)
    assert parallel.compute_output_shape((None, 6)) == (None, 4)
    assert parallel.predict(x, verbose=0).shape == (70, 4)
    parallel.mix = "weighted"
    with pytest.raises(ValueError, match="compiled again after its `mix` was set"):
        parallel.fit(x, y, verbose=0)
    parallel.compile("sgd", "mse")
    parallel.fit(x, y, verbose=0)
    assert len(parallel.layers) == 3
    assert _trained(parallel) == 3 * _trained(parallel.template) + 3
    assert np.abs(parallel.mix.get_weights()[0]).max() > 0


@pytest.mark.parametrize(
    ("replicas", "mix"), [("shared", "mean"), *(("independent", mix) for mix in MIXES)]
)
@pytest.mark.slow_on_jax
def test_whole_models_are_loaded_in_safe_mode(replicas, mix, rng, tmp_path):
    x, y = _data(rng)
    parallel = make_parallel(_regressor(), 2, mode="tower", replicas=replicas, mix=mix)
    loss = keras_multigpu.layers.GaussianNLL() if mix == "gaussian" else "mse"
    y = y[:, :1] if mix == "gaussian" else y
    parallel.compile("adam", loss)
    parallel.fit(x, y, verbose=0)
    parallel.save(tmp_path / "tower.keras")
    loaded = keras.saving.load_model(tmp_path / "tower.keras")
    assert (loaded.mode, loaded.devices) == ("tower", parallel.devices)
    assert loaded._parallel_options == {**parallel._parallel_options, "loss_of": parallel.loss_of}
    assert type(loaded.mix) is type(parallel.mix)
    outputs = [model.predict(x, verbose=0) for model in (parallel, loaded)]
    assert difference(*outputs) < 1e-6
    assert difference(variables(parallel), variables(loaded)) == 0
    logs = [model.train_on_batch(x, y) for model in (parallel, loaded)]
    assert difference(*logs) < 1e-5
    assert difference(variables(parallel), variables(loaded)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True])
def test_weights_loaded_before_a_training(wrapped, rng, tmp_path):
    """The optimizer has no state yet. Keras warns, and loads the rest."""
    x, y = _data(rng)
    loss_of = "mix" if wrapped else "replicas"
    trained, built, fresh = models = [_committee(3, loss_of=loss_of) for _ in range(3)]
    for model in models:
        adam = keras.optimizers.Adam(0.01)
        model.compile(keras.optimizers.LossScaleOptimizer(adam) if wrapped else adam, "mse")
    trained.fit(x, y, verbose=0)
    trained.save_weights(tmp_path / "tower.weights.h5")
    text = r"Skipping variable loading for optimizer '\w+', because it has \d+ variables"
    with pytest.warns(UserWarning, match=text + ".*the saved optimizer has"):
        fresh.load_weights(tmp_path / "tower.weights.h5")
    built.optimizer.build(built.trainable_variables)
    built.load_weights(tmp_path / "tower.weights.h5")
    assert difference(trained.get_weights(), fresh.get_weights()) == 0
    outputs = [model.predict_replicas(x, verbose=0) for model in models]
    assert difference(*outputs[:2]) == difference(*outputs[1:]) == 0
    logs = [model.train_on_batch(x, y) for model in (trained, built)]
    assert difference(*logs) < 1e-5
    assert difference(variables(trained), variables(built)) < 1e-5
    assert fresh.train_on_batch(x, y) == pytest.approx(logs[0], abs=1e-5)


def test_no_member_of_a_file_is_lost(rng, tmp_path):
    three, two = _committee(3), _committee(2)
    three.save_weights(tmp_path / "three.weights.h5")
    two.save_weights(tmp_path / "two.weights.h5")
    _regressor().save_weights(tmp_path / "one.weights.h5")
    kept, all_kept = two.get_weights(), three.get_weights()
    for model, name in ((two, "three"), (three, "two"), (three, "one")):
        with pytest.raises(ValueError, match="of as many replicas, with the same mix. Received"):
            model.load_weights(filepath=tmp_path / f"{name}.weights.h5")
    assert difference(two.get_weights(), kept) == 0
    assert difference(three.get_weights(), all_kept) == 0


def test_no_rows_have_no_disagreement(rng):
    x, _ = _data(rng)
    parallel = _committee(2)
    for one in ([], None, x[:0]):
        with pytest.raises(ValueError, match="`x` must have at least one row. Received: "):
            parallel.disagreement(one)


@pytest.mark.slow
def test_on_fewer_devices(rng, tmp_path, monkeypatch):
    x, y = _data(rng)
    parallel = _committee(4)
    parallel.compile("adam", "mse")
    parallel.fit(x, y, verbose=0)
    parallel.save(tmp_path / "tower.keras")
    fewer = ("cpu:0", "cpu:1")
    monkeypatch.setattr("keras_multigpu.modes.saving.choose_again", lambda *_: fewer)
    with pytest.warns(UserWarning, match="saved on 4 devices, and 2 are here.*several replicas"):
        loaded = keras.saving.load_model(tmp_path / "tower.keras")
    assert (loaded.devices, len(loaded.replicas)) == (fewer, 4)
    outputs = [model.predict_replicas(x, verbose=0) for model in (parallel, loaded)]
    assert difference(*outputs) < 1e-6


@pytest.mark.slow
def test_the_committees_file_and_the_templates(rng, tmp_path):
    x, y = _data(rng)
    parallel = _committee(3, mix="weighted")
    parallel.compile("adam", "mse")
    parallel.fit(x, y, verbose=0)
    parallel.save_weights(tmp_path / "tower.weights.h5")
    other = _committee(3, mix="weighted")
    other.compile("adam", "mse")
    other.fit(x, y, verbose=0)  # builds the optimizer
    other.load_weights(tmp_path / "tower.weights.h5")
    assert difference(variables(parallel), variables(other)) == 0
    alone = _regressor()
    alone.load_weights(tmp_path / "tower.weights.h5")
    assert difference(alone.get_weights(), parallel.template.get_weights()) == 0


@pytest.mark.slow_on_jax
@pytest.mark.parametrize("replicas", ["shared", "independent"])
def test_a_committee_is_ready_for_onnx(replicas, tmp_path, monkeypatch):
    """Keras exports to ONNX only what was called. Without the converter it gets as far as that."""
    for name in ("onnx", "tf2onnx", "jax2onnx"):
        monkeypatch.setitem(sys.modules, name, None)
    template = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    parallel = make_parallel(template, 2, mode="tower", replicas=replicas)
    parallel.predict(np.ones((3, 6)), verbose=0)
    with pytest.raises(ImportError, match="onnx"):
        parallel.export(tmp_path / "committee.onnx", format="onnx", verbose=False)


def test_more_replicas_than_devices(rng):
    x, y = _data(rng)
    parallel = _committee(2, num_replicas=5)
    assert len(parallel.replicas) == 5
    parallel.compile("sgd", "mse")
    parallel.fit(x, y, verbose=0)
    parts = parallel.predict_replicas(x, verbose=0)
    assert difference(parallel.predict(x, verbose=0), np.mean(parts, axis=0)) < 1e-6


@pytest.mark.parametrize("sparse_gradient", [False, True])
@pytest.mark.slow_on_jax
def test_more_shared_replicas_than_devices(sparse_gradient, rng):
    """Each counts, also where several are on one device; and each row of a gradient once."""
    x, y = rng.integers(30, size=(33, 4)), rng.normal(size=(33, 3))
    inputs = keras.Input((4,), dtype="int32")
    template = keras.Model(inputs, MultiHotDense(3, 30, sparse_gradient=sparse_gradient)(inputs))
    plain = keras.models.clone_model(template)
    plain.set_weights(template.get_weights())
    parallel = make_parallel(template, 2, mode="tower", num_replicas=5)
    for model in (plain, parallel):
        model.compile("adam" if sparse_gradient else "sgd", "mse")
        model.fit(x, y, epochs=2, shuffle=False, verbose=0)
    assert difference(plain.get_weights(), parallel.get_weights()) < 1e-6


@pytest.mark.slow_on_jax
def test_every_batch_size_of_a_committee(rng):
    x, y = _data(rng)
    template = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    parallel = _committee(4, template, loss_of="mix")
    reference, _ = _by_hand(parallel, layers.Average())
    for model in (parallel, reference):
        model.compile("sgd", "mse")
    for rows in (1, 2, 3, 5, 33):
        logs = [model.train_on_batch(x[:rows], y[:rows]) for model in (parallel, reference)]
        assert difference(*logs) < 1e-5, rows
        outputs = [model.predict(x[:rows], verbose=0) for model in (parallel, reference)]
        assert difference(*outputs) < 1e-5, rows


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("option", [{"run_eagerly": True}, {"jit_compile": True}], ids=str)
@pytest.mark.parametrize("replicas", ["shared", "independent"])
def test_ways_of_running(replicas, option, rng):
    x, y = _data(rng, 21)
    options = {"mode": "tower", "replicas": replicas, "loss_of": "mix"}
    parallel = make_parallel(_regressor(None), 3, **options)
    if replicas == "independent":
        reference, _ = _by_hand(parallel, layers.Average())
    else:
        reference = keras.models.clone_model(parallel.template)
        reference.set_weights(parallel.template.get_weights())
    histories = []
    for model in (reference, parallel):
        extra = option if model is parallel else {}
        model.compile(keras.optimizers.SGD(0.1), "mse", **extra)
        histories.append(model.fit(x, y, 16, shuffle=False, verbose=0).history)
    assert difference(*histories) < 1e-5
    assert difference(reference.predict(x, verbose=0), parallel.predict(x, verbose=0)) < 1e-5


def test_penalties_are_the_mean_of_the_replicas(rng):
    x, y = _data(rng)
    parallel = _committee(3)
    parallel.compile("sgd", "mse")
    parts = parallel.predict_replicas(x, verbose=0)
    penalties = [sum(map(float, model.losses)) for model in parallel.replicas]
    expected = np.mean((np.mean(parts, axis=0) - y) ** 2) + np.mean(penalties)
    logs = parallel.evaluate(x, y, verbose=0, return_dict=True)
    assert abs(logs["mix_loss"] - expected) < 1e-5
    assert len(set(np.round(penalties, 6))) == 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mix": "median"}, "Received: mix='median'"),
        ({"mix": 3}, "Received: mix=3"),
        ({"replicas": "own"}, '`replicas` must be "shared" or "independent".*replicas=\'own\''),
        (
            {"loss_of": "all"},
            '`loss_of` must be None, "mix" or "replicas". Received: loss_of=\'all\'',
        ),
        ({"num_replicas": 0}, "`num_replicas` must be a positive integer.*num_replicas=0"),
        ({"num_replicas": True}, "`num_replicas` must be a positive integer.*num_replicas=True"),
    ],
    ids=str,
)
def test_options_that_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        make_parallel(_regressor(), 2, mode="tower", **options)


@pytest.mark.parametrize("option", ["wire_dtype", "shard"])
def test_options_of_another_mode(option):
    with pytest.raises(TypeError, match=f"mode='tower' has the options replicas, mix.*{option}="):
        make_parallel(_regressor(), 2, mode="tower", **{option: None})


def test_a_template_that_cannot_be_made_again():
    class Closed(keras.Model):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def call(self, inputs):
            return self.layer(inputs)

    with pytest.raises(ValueError, match="(?s)made from the template's configuration.*get_config"):
        make_parallel(Closed(layers.Dense(2)), 2, mode="tower", replicas="independent")
    x = np.ones((3, 2))
    shared = make_parallel(Closed(layers.Dense(2)), 2, mode="tower")
    assert shared.predict(x, verbose=0).shape == (3, 2)


class Adversary(keras.Model):
    """Calls a layer directly in its step."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = layers.Dense(3), layers.Dense(1)

    def call(self, inputs):
        return self.generator(inputs)

    def test_step(self, data):
        return {"score": self.critic(self(data[0]))}


def test_layers_that_a_step_calls_directly_are_told():
    """In data mode they run on all devices."""
    with pytest.warns(UserWarning, match=r"`self.critic\(...\)` in `test_step`") as told:
        make_parallel(Adversary(), 2, mode="tower")
    assert len(told) == 1
    assert told[0].filename == __file__
    make_parallel(Adversary(), 2)


def test_names_that_clash():
    template = _regressor()
    template.mix = 3
    with pytest.raises(ValueError, match="attributes of the same names: mix"):
        make_parallel(template, 2, mode="tower")


def test_summary_and_structure(capsys):
    parallel = _committee(2, mix="weighted", num_replicas=3)
    parallel.summary()
    shown = capsys.readouterr().out
    told = "mode 'tower' on cpu:0, cpu:1: 3 independent replicas, mixed by WeightedMix"
    assert told in shown
    assert told in repr(parallel)
    rows, total = sum(layer.count_params() for layer in parallel.layers), parallel.count_params()
    assert re.search(rf"Total params: .*{rows} ", re.sub(r"\x1b\[[\d;]*m", "", shown))
    numbers = [int(one) for one in re.findall(r"(\d+) of '", shown.partition(" Parameters: ")[2])]
    assert numbers == [rows, rows, rows, 3]
    assert sum(numbers) == total
    assert f"= {total}" in shown
    assert parallel.get_layer(index=0) is parallel.template.layers[0]
    assert [layer.name for layer in parallel.layers] == [
        layer.name for layer in parallel.template.layers
    ]


def test_a_compiled_template(rng):
    x, y = _data(rng)
    template = _regressor()
    template.compile("adam", "mse")
    template.fit(x, y, verbose=0)
    shared = make_parallel(template, 2, mode="tower")
    assert difference(variables(shared), variables(template)) == 0
    parallel = _committee(2, template)
    parallel.fit(x, y, verbose=0)
    assert not _committee(
        2, template, mix=keras_multigpu.layers.GaussianMix(own_variance=False)
    ).compiled


def test_a_large_committee_is_loaded_and_copied(rng, tmp_path):
    x, _ = _data(rng, 5)
    parallel = _committee(4, num_replicas=5)
    parallel.save(tmp_path / "tower.keras")
    for other in (keras.saving.load_model(tmp_path / "tower.keras"), copy.deepcopy(parallel)):
        assert len({id(model) for model in other.replicas}) == 5
        parts = [model.predict_replicas(x, verbose=0) for model in (parallel, other)]
        assert difference(*parts) < 1e-6


@pytest.mark.slow_on_jax
def test_frozen_and_unfrozen_again(rng):
    x, y = _data(rng)
    parallel = _committee(2, _regressor(None), loss_of="mix")
    reference, members = _by_hand(parallel, layers.Average())
    for trainable in (False, True):
        for first in (parallel.template.layers[0], *(model.layers[0] for model in members)):
            first.trainable = trainable
        for model in (reference, parallel):
            model.compile(keras.optimizers.SGD(0.1), "mse")
            model.train_on_batch(x, y)
        for member, replica in zip(members, parallel.replicas):
            assert difference(member.get_weights(), replica.get_weights()) < 1e-6, trainable


def test_the_replicas_outputs_follow_a_new_compile(rng):
    x, _ = _data(rng)
    parallel = _committee(2)
    parallel.predict_replicas(x, verbose=0)
    for model in parallel.replicas:
        model.layers[0].activation = keras.activations.relu
    parallel.compile()
    parts = parallel.predict_replicas(x, verbose=0)
    assert difference(parts, [model.predict(x, verbose=0) for model in parallel.replicas]) < 1e-6


def test_a_state_of_no_model(rng):
    """On JAX the members' states are stacked, if a model lists them."""
    inputs = keras.Input(batch_shape=(2, 3, 4))
    template = keras.Model(inputs, layers.GRU(3, stateful=True)(inputs))
    x = rng.normal(size=(8, 3, 4)).astype("float32")
    parallel = _committee(2, template)
    if keras.backend.backend() == "jax":
        with pytest.raises(ValueError, match="need separate state.*stateful=True"):
            parallel.predict(x, batch_size=2, verbose=0)
        return
    mean, parts = parallel.predict(x, batch_size=2, verbose=0), []
    for member in parallel.replicas:
        member.layers[1].reset_state()
        parts.append(member.predict(x, batch_size=2, verbose=0))
    assert difference(mean, np.mean(parts, axis=0)) < 1e-6


class Scaled(keras.Model):
    """Its argument is not in its configuration."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = scale
        self.out = layers.Dense(2)

    def call(self, inputs):
        return self.scale * self.out(inputs)


def test_arguments_that_a_clone_would_not_have():
    with pytest.raises(ValueError, match="Received: Scaled, which takes scale.*`get_config`"):
        _committee(2, Scaled(7.0))


def test_two_classes_of_one_name():
    class Dense(layers.Layer):
        def call(self, inputs):
            return 2 * inputs

    template = keras.Sequential([keras.Input((6,)), Dense(), layers.Dense(2)])
    with pytest.raises(ValueError, match="two classes named 'Dense'"):
        _committee(2, template)


def test_layers_are_fixed_once_the_replicas_are_made(rng):
    parallel = _committee(2)
    with pytest.raises(ValueError, match="a call of `add` on a model with 2 of them"):
        parallel.add(layers.Dense(2))
    parallel.template.add(layers.Dense(2))
    with pytest.raises(ValueError, match="must be built alike.*in replica 1"):
        parallel.predict(np.ones((3, 6)), verbose=0)


def test_a_refused_mix_leaves_the_old_one(rng):
    x, _ = _data(rng, 4)
    parallel = _committee(2)
    before = parallel.predict(x, verbose=0)
    for mix in ("median", lambda outputs: outputs[7]):
        with pytest.raises((ValueError, IndexError)):
            parallel.mix = mix
        assert difference(parallel.predict(x, verbose=0), before) == 0
        assert difference(np.asarray(parallel(x)), before) < 1e-6


class Plain(keras.Model):
    """Built by its first call."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(2)

    def call(self, inputs):
        return self.out(inputs)


def test_a_mix_with_weights_must_be_compiled(rng):
    x, y = _data(rng)
    parallel = make_parallel(Plain(), 2, mode="tower")
    parallel.compile("sgd", "mse")
    parallel.fit(x, y, verbose=0)
    parallel.mix = "weighted"
    with pytest.raises(ValueError, match="compiled again after its `mix` was set"):
        parallel.fit(x, y, verbose=0)


def test_only_the_mix_is_trained(rng):
    x, y = _data(rng)
    parallel = _committee(2, mix="weighted")
    parallel.template.trainable = False
    parallel.compile(keras.optimizers.SGD(0.1), "mse")
    before = [model.get_weights()[0] for model in parallel.replicas]
    parallel.fit(x, y, verbose=0)
    assert difference([model.get_weights()[0] for model in parallel.replicas], before) == 0
    assert np.abs(parallel.mix.get_weights()[0]).max() > 0


def test_optimizers_that_name_the_argument(rng):
    x, y = _data(rng)
    parallel = _committee(2)
    parallel.compile("adafactor", "mse")
    parallel.fit(x, y, verbose=0)
    assert all(np.isfinite(weight).all() for weight in parallel.get_weights())


def test_constraints_of_independent_replicas(rng):
    x, y = _data(rng)
    parallel = _committee(2, _regressor(None, kernel_constraint="non_neg"), loss_of="mix")
    reference, members = _by_hand(parallel, layers.Average())
    for model in (reference, parallel):
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, 32, shuffle=False, verbose=0)
    for member, replica in zip(members, parallel.replicas):
        assert difference(member.get_weights(), replica.get_weights()) < 1e-5
        assert replica.get_weights()[0].min() == 0


@pytest.mark.parametrize("replicas", ["shared", "independent"])
def test_as_a_layer_of_another_model(replicas, rng):
    x, _ = _data(rng, 4)
    parallel = make_parallel(_regressor(), 2, mode="tower", replicas=replicas)
    inputs = keras.Input((6,))
    outer = keras.Model(inputs, layers.Rescaling(2.0)(parallel(inputs)))
    assert difference(np.asarray(outer(x)), 2 * parallel.predict(x, verbose=0)) < 1e-6


def test_what_is_excluded_from_weight_decay(rng):
    x, _ = _data(rng)
    template = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    parallel = _committee(2, template, loss_of="mix")
    optimizer = keras.optimizers.SGD(0.01, weight_decay=1.0)
    kernels = [model.layers[0].kernel for model in parallel.replicas]
    optimizer.exclude_from_weight_decay(var_list=kernels)
    parallel.compile(optimizer, "mse")
    before = [np.array(kernel) for kernel in kernels]
    parallel.fit(x, parallel.predict(x, verbose=0), verbose=0)  # the gradient is zero
    assert difference([np.array(kernel) for kernel in kernels], before) < 1e-5


@pytest.mark.slow
def test_an_interrupted_committee_is_resumed(rng, tmp_path):
    x, y = _data(rng)

    def fit(model, *callbacks):
        model.fit(x, y, 32, 4, shuffle=False, verbose=0, callbacks=list(callbacks))

    def stop(epoch, logs):
        if epoch == 2:
            raise KeyboardInterrupt

    models = [_committee(2, mix="weighted") for _ in range(3)]
    undisturbed, interrupted, resumed = models
    interrupted.set_weights(undisturbed.get_weights())
    for model in models:
        model.compile("adam", "mse")
    backups = [keras.callbacks.BackupAndRestore(tmp_path / "backup") for _ in range(2)]
    fit(undisturbed)
    with pytest.raises(KeyboardInterrupt):
        fit(interrupted, backups[0], keras.callbacks.LambdaCallback(on_epoch_begin=stop))
    fit(resumed, backups[1])
    assert difference(variables(undisturbed), variables(resumed)) < 1e-5


def test_the_best_weights_of_a_committee(rng, tmp_path):
    x, y = _data(rng)
    parallel = _committee(2)
    parallel.compile(keras.optimizers.SGD(0.5), "mse")
    path = tmp_path / "best.weights.h5"
    callbacks = [
        keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_best_only=True),
        keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True),
    ]
    parallel.fit(x, y, 8, 12, verbose=0, validation_split=0.3, callbacks=callbacks)
    restored = parallel.get_weights()
    parallel.load_weights(path)
    assert difference(parallel.get_weights(), restored) == 0


class Outer(keras.Model):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.last = inner, layers.Dense(1)

    def call(self, x, training=None):
        return self.last(self.inner(x, training=training))


def _functional(inner):
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(1)(inner(inputs)))


OUTER = {
    "functional": _functional,
    "sequential": lambda inner: keras.Sequential([inner, layers.Dense(1)]),
    "subclassed": Outer,
}


@pytest.mark.parametrize("kind", OUTER)
def test_a_committee_is_trained_in_another_model(kind, rng):
    x, y = _data(rng)
    found = []
    for n in (1, 2):
        keras.utils.set_random_seed(4)
        committee = _committee(n, num_replicas=4)
        members = committee.get_weights()
        outer = OUTER[kind](committee)
        outer.compile("adam", "mse")
        outer.fit(x, y[:, :1], 16, 2, shuffle=False, verbose=0)
        after = committee.get_weights()
        assert min(np.abs(a - b).max() for a, b in zip(members, after)) > 0  # all have learned
        committee.compile("sgd", "mse")
        committee.fit(x, y, 16, 1, shuffle=False, verbose=0)
        outer.fit(x, y[:, :1], 16, 1, shuffle=False, verbose=0)
        found.append([*outer.get_weights(), outer.predict(x, verbose=0)])
    assert difference(*found) < 1e-5


@pytest.mark.parametrize(
    ("mix", "shape"),
    [
        (lambda outputs: ops.mean(outputs), r"\(\)"),
        (lambda outputs: ops.concatenate(outputs, axis=0), r"\(12, 2\)"),
        (lambda outputs: ops.stack(outputs), r"\(3, 4, 2\)"),
    ],
    ids=["scalar", "more rows", "replicas first"],
)
def test_a_mix_that_loses_the_rows_is_refused(mix, shape):
    with pytest.raises(ValueError, match=rf"`mix` must return .* rows .*which makes {shape}"):
        _committee(mix=mix)


def test_replicas_may_return_a_number(rng):
    inputs = keras.Input((6,))
    template = keras.Model(inputs, ops.mean(layers.Dense(2)(inputs)))
    x, _ = _data(rng)
    parallel = make_parallel(template, 2, mode="tower")
    assert difference(parallel(x), template(x)) < 1e-6


def test_gaussian_losses_of_raw_columns_are_told():
    committee = _committee()
    with pytest.warns(
        UserWarning, match="`GaussianNLL` reads means and variances, and this mix av"
    ):
        committee.compile("adam", keras_multigpu.layers.GaussianNLL())
