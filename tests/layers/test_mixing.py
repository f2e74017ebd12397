"""Mixing layers, alone: their formulas, structures, masks, files, training, errors."""

import keras
import numpy as np
import pytest
import scipy.special
import scipy.stats
from support.parity import difference
from support.versions import NONE

from keras_multigpu import make_parallel
from keras_multigpu.layers import (
    GatedMix,
    GaussianMix,
    GaussianNLL,
    GaussianRMSE,
    WeightedMix,
    mean_mix,
)
from keras_multigpu.layers.mixing import get_mix, mean_of_replicas

# Where all columns are means, a variance is fixed.
pytestmark = [pytest.mark.thin(5), pytest.mark.filterwarnings("ignore:A `GaussianMix` takes")]

tensorflow_only = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="a kind of tensor that only TensorFlow has"
)


@keras.saving.register_keras_serializable(package="tests")
def largest(outputs):
    return keras.ops.max(keras.ops.stack(outputs), axis=0)


MIXES = {
    "mean": mean_mix,
    "weighted": WeightedMix,
    "gaussian": GaussianMix,
    "gated": lambda: GatedMix(balance=0.5),
    "own gate": lambda: GatedMix(gate=keras.Sequential([keras.layers.Dense(3)])),
    "function": lambda: get_mix(largest),
    "layer": lambda: get_mix(keras.layers.Average()),
}
NAMES = ["mean", "weighted", "gaussian", "gated"]


def make(name):
    """A mix, and the arguments that go with it in a call on some rows of features."""
    mix = MIXES[name]()
    return mix, (lambda x: {"features": x}) if isinstance(mix, GatedMix) else (lambda x: {})


def array(tensor):
    return keras.ops.convert_to_numpy(tensor)


def softplus(x):
    return np.log1p(np.exp(x))


def parts_of(rng, *shape, replicas=3):
    return [rng.normal(size=shape).astype("float32") for _ in range(replicas)]


def committee(name, outputs=lambda x, i: keras.layers.Dense(3, name=f"head_{i}")(x)):
    """A Functional model of three replicas and a mix, with every weight drawn at random."""
    x = keras.Input((4,))
    mix, more = make(name)
    model = keras.Model(x, mix([outputs(x, i) for i in range(3)], **more(x)))
    draw = np.random.default_rng(3)
    model.set_weights([draw.normal(size=w.shape) for w in model.get_weights()])
    return model


# Formulas.


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 3), (5, 2, 3), (0, 3)], ids=str)
def test_the_mean(rng, shape, replicas):
    parts = parts_of(rng, *shape, replicas=replicas)
    assert difference(array(mean_mix()(parts)), np.mean(parts, axis=0)) < 1e-6
    same = array(mean_mix()([parts[0]] * replicas))
    np.testing.assert_allclose(same, parts[0], rtol=2e-7, atol=0)
    assert isinstance(mean_mix(name="committee"), keras.layers.Lambda)
    assert mean_mix(name="committee").name == "committee"


@pytest.mark.parametrize("replicas", [1, 3])
def test_weighted_begins_as_the_mean_and_is_a_convex_combination(rng, replicas):
    parts = parts_of(rng, 5, 2, replicas=replicas)
    mix = WeightedMix()
    assert difference(array(mix(parts)), np.mean(parts, axis=0)) < 1e-6
    logits = rng.normal(size=replicas)
    mix.set_weights([logits])
    expected = np.tensordot(scipy.special.softmax(logits), parts, axes=1)
    assert difference(array(mix(parts)), expected) < 1e-6


@pytest.mark.parametrize("replicas", [1, 4])
def test_gaussian_of_assumed_variance(rng, replicas):
    parts = parts_of(rng, 5, 3, replicas=replicas)
    expected = np.concatenate([np.mean(parts, axis=0), 0.3 + np.var(parts, axis=0)], axis=-1)
    assert difference(array(GaussianMix(variance=0.3)(parts)), expected) < 1e-6
    columns = [part[:, 0] for part in parts]
    expected = np.stack([np.mean(columns, axis=0), 1 + np.var(columns, axis=0)], axis=-1)
    assert difference(array(GaussianMix()(columns)), expected) < 1e-6


@pytest.mark.filterwarnings("error:A `GaussianMix` takes")
def test_a_variance_that_nothing_learns(rng):
    mix = GaussianMix()
    with pytest.warns(UserWarning, match=r"outputs of 1 column\..*own_variance=True"):
        mix(parts_of(rng, 5, 1))
    mix(parts_of(rng, 5, 1))  # once
    for chosen in ({"variance": 0.5}, {"own_variance": False}):
        GaussianMix(**chosen)(parts_of(rng, 5, 1))
    GaussianMix()(parts_of(rng, 5, 2))


@pytest.mark.parametrize(("own_variance", "d"), [(None, 1), (True, 1), (True, 3)])
@pytest.mark.parametrize("axes", [(5,), (5, 2)], ids=str)
def test_gaussian_of_own_variances_is_the_mixture_of_samples(rng, axes, own_variance, d):
    parts = parts_of(rng, *axes, 2 * d)
    mixed = array(GaussianMix(own_variance=own_variance)(parts))
    means = np.stack([part[..., :d] for part in parts])
    variances = np.stack([softplus(part[..., d:]) for part in parts]) + 1e-6
    assert mixed.shape == (*axes, 2 * d)
    assert difference(mixed[..., :d], means.mean(axis=0)) < 1e-6
    second = (variances + means**2).mean(axis=0)
    assert difference(mixed[..., d:], second - means.mean(axis=0) ** 2) < 1e-5
    samples = rng.normal(means, np.sqrt(variances), size=(20000, *means.shape)).astype("float32")
    samples = samples.reshape(-1, *means.shape[1:])
    assert difference(mixed[..., :d], samples.mean(axis=0)) < 0.05
    assert difference(mixed[..., d:] / samples.var(axis=0), np.ones((*axes, d))) < 0.05


def test_two_columns_of_means_and_rows_that_are_no_columns(rng):
    parts = parts_of(rng, 5, 2)
    assert GaussianMix(own_variance=False)(parts).shape == (5, 4)
    rows = [part[:2, 0] for part in parts]
    expected = np.stack([np.mean(rows, axis=0), 1 + np.var(rows, axis=0)], axis=-1)
    assert difference(array(GaussianMix()(rows)), expected) < 1e-6


def test_the_variance_of_large_means_is_not_cancelled():
    parts = [np.full((1, 1), value, "float32") for value in (10000.0, 10001.0)]
    assert difference(array(GaussianMix(variance=0.5)(parts)), np.array([[10000.5, 0.75]])) < 1e-6


@pytest.mark.parametrize("replicas", [1, 3])
def test_gated_begins_as_the_mean_and_weights_every_row(rng, replicas):
    parts, x = parts_of(rng, 5, 2, 3, replicas=replicas), rng.normal(size=(5, 2, 2))
    features = {"a": x, "b": [np.arange(5), np.ones(5, "float32")], **NONE}
    mix = GatedMix(hidden=4)
    assert difference(array(mix(parts, features=features)), np.mean(parts, axis=0)) < 1e-6
    weights = [rng.normal(size=w.shape) for w in mix.get_weights()]
    assert [w.shape for w in weights] == [(5, 4), (4,), (4, replicas), (replicas,)]
    mix.set_weights(weights)
    flat = np.concatenate([x.reshape(5, 4), np.ones((5, 1))], axis=1)
    hidden = np.tanh(flat @ weights[0] + weights[1])
    shares = scipy.special.softmax(hidden @ weights[2] + weights[3], axis=1)
    expected = np.einsum("rn,nrij->rij", shares, parts)
    assert difference(array(mix(parts, features=features)), expected) < 1e-5


def test_a_gate_of_ones_own(rng):
    parts, ids = parts_of(rng, 3, 2, replicas=2), np.array([0, 1, 2])
    gate = keras.layers.Embedding(3, 2)
    gate.build(())
    gate.set_weights([np.array([[50.0, -50], [-50, 50], [0, 0]])])
    mixed = array(GatedMix(gate=gate)(parts, features=ids))
    expected = np.stack([parts[0][0], parts[1][1], (parts[0][2] + parts[1][2]) / 2])
    assert difference(mixed, expected) < 1e-6


def test_the_balance_loss_is_there_in_training_only(rng):
    parts, x = parts_of(rng, 5, 2), rng.normal(size=(5, 3)).astype("float32")
    mix = GatedMix(gate=keras.layers.Dense(3), balance=0.5)
    mix(parts, features=x)
    assert mix.losses == []
    mix(parts, features=x, training=True)
    importance = scipy.special.softmax(array(mix.gate(x)), axis=1).sum(axis=0)
    expected = 0.5 * importance.var() / importance.mean() ** 2
    assert float(mix.losses[0]) == pytest.approx(expected, rel=1e-5)
    mix([part[:0] for part in parts], features=x[:0], training=True)
    assert float(mix.losses[0]) == 0.0
    even = GatedMix(balance=0.5)
    even(parts, features=x, training=True)
    assert float(even.losses[0]) == pytest.approx(0, abs=1e-12)
    none = GatedMix(gate=keras.layers.Dense(3))
    none(parts, features=x, training=True)
    assert none.losses == []


# Structures, masks, dtypes.


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("name", NAMES)
def test_nested_outputs(rng, name, rows):
    def outputs():
        floats = parts_of(rng, rows, 3, replicas=2)
        ids = rng.integers(9, size=(rows, 2))
        return {"a": floats[0], "b": [floats[1], (ids, ids > 4)], **NONE}

    parts = [outputs() for _ in range(3)]
    mix, more = make(name)
    x = rng.normal(size=(rows, 4)).astype("float32")
    mixed = mix(parts, **more(x))
    keras.tree.assert_same_structure(mixed, parts[0])
    for path in (lambda s: s["a"], lambda s: s["b"][0]):
        alone = array(mix([path(part) for part in parts], **more(x)))
        assert difference(array(path(mixed)), alone) == 0
    assert difference(keras.tree.map_structure(array, mixed["b"][1]), parts[0]["b"][1]) == 0

    def symbolic(leaf):
        return leaf if leaf is None else keras.KerasTensor((None, *leaf.shape[1:]), leaf.dtype)

    parts = keras.tree.map_structure(symbolic, parts)
    spec = mix.compute_output_spec(parts, **more(keras.KerasTensor((None, 4))))
    keras.tree.assert_same_structure(spec, mixed)
    for tensor, described in zip(keras.tree.flatten(mixed), keras.tree.flatten(spec)):
        if tensor is not None:
            assert described.shape == (None, *tensor.shape[1:])
            assert described.dtype == keras.backend.standardize_dtype(tensor.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_scaled_outputs_in_a_functional_model(rng, name):
    """Keras takes what is scaled by a number to be sparse, and traces the layer so."""
    x = keras.Input((3,))
    mix, more = make(name)
    model = keras.Model(x, mix([x * 2.0, x * 4.0], **more(x)))
    mean = model.predict(np.ones((2, 3)), verbose=0)[:, :3]
    assert difference(mean, np.full((2, 3), 3.0)) < 1e-6


@tensorflow_only
def test_strings_are_the_first_replicas():
    parts = [{"x": np.ones((2, 1)), "name": np.array(["a", text])} for text in "bc"]
    assert mean_mix()(parts)["name"].numpy().tolist() == [b"a", b"b"]


@pytest.mark.parametrize("name", ["weighted", "gaussian", "gated"])
def test_output_shapes(name):
    mix, _ = make(name)
    shapes = {"a": (None, 3), "b": [(7, 2, 5), None]}
    factor = 2 if name == "gaussian" else 1
    expected = {"a": (None, 3 * factor), "b": [(7, 2, 5 * factor), None]}
    assert mix.compute_output_shape([shapes, shapes]) == expected
    assert mix.compute_output_shape([(None, 3)] * 2) == (None, 3 * factor)


def test_the_output_shape_of_a_mean():
    shapes = {"a": (None, 3), "b": [(7, 2, 5)]}
    assert mean_mix().compute_output_shape([shapes, shapes]) == shapes


@pytest.mark.parametrize("name", NAMES)
def test_the_first_replicas_mask(name):
    ids = np.array([[1, 2, 0], [3, 0, 0]])

    def outputs(x):
        return {"a": keras.layers.Embedding(5, 3, mask_zero=True)(x), "b": keras.ops.ones((2, 1))}

    mix, more = make(name)
    mixed = mix([outputs(i * (ids > limit)) for limit, i in ((0, 1), (1, 1))], **more(ids * 1.0))
    assert array(mixed["a"]._keras_mask).tolist() == (ids > 0).tolist()
    assert getattr(mixed["b"], "_keras_mask", None) is None

    x = keras.Input((3,), dtype="int32")
    embedded = keras.layers.Embedding(5, 3, mask_zero=True)(x)
    heads = [keras.layers.Dense(3)(embedded) for _ in range(2)]
    mix, more = make(name)
    spec = mix(heads, **more(keras.ops.cast(x, "float32")))
    assert spec._keras_mask is not None
    model = keras.Model(x, keras.layers.GlobalAveragePooling1D()(spec))
    padded = model.predict(np.array([[1, 2, 0]]), verbose=0)
    plain = keras.Model(x, spec).predict(np.array([[1, 2, 0]]), verbose=0)
    assert difference(padded, plain[:, :2].mean(axis=1)) < 1e-6


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_the_dtype_of_the_outputs_is_kept(rng, name, dtype):
    if dtype == "float64" and keras.backend.backend() == "jax":
        pytest.skip("JAX computes in float32")
    keras.config.set_dtype_policy({"float32": "mixed_float16"}.get(dtype, "float32"))
    exact = parts_of(rng, 5, 3)
    mix, more = make(name)
    x = rng.normal(size=(5, 4)).astype("float32")
    parts = [keras.ops.cast(part, dtype) for part in exact]
    mixed = mix(parts, **more(x))
    assert keras.backend.standardize_dtype(mixed.dtype) == dtype
    limit = {"float16": 5e-3, "bfloat16": 5e-2}.get(dtype, 1e-6)
    reference = array(MIXES[name]()(exact, **more(x)))
    assert difference(array(keras.ops.cast(mixed, "float32")), reference) < limit


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_under_a_precision_policy(rng, name, policy):
    keras.config.set_dtype_policy(policy)
    model = committee(name)
    x = rng.normal(size=(5, 4)).astype("float32")
    kind = keras.DTypePolicy(policy).compute_dtype
    assert keras.backend.standardize_dtype(model(x).dtype) == kind
    assert model.outputs[0].dtype == kind
    model.compile("sgd", GaussianNLL() if name == "gaussian" else "mse")
    history = model.fit(x, x[:, :3], verbose=0)
    assert np.isfinite(history.history["loss"]).all()


def test_halves_are_summed_in_float32():
    part = np.array([[60000.0]], "float16")
    for mix in (mean_mix(), WeightedMix()):
        assert array(mix([part] * 4)).tolist() == [[60000.0]]


# Models, files, training.


def test_a_subclassed_model_of_any_rows(rng):
    class Committee(keras.Model):
        def __init__(self):
            super().__init__()
            self.heads = [keras.layers.Dense(1) for _ in range(2)]
            self.mix = GatedMix(balance=0.1)

        def call(self, x):
            return self.mix([{"y": head(x)} for head in self.heads], features={"x": x})

    model = Committee()
    model.compile("adam", {"y": "mse"})
    x = rng.normal(size=(37, 4)).astype("float32")
    model.mix(parts_of(rng, 2, 1, replicas=2), features={"x": x[:2]})  # builds it before
    model.fit(x, {"y": x[:, :1]}, batch_size=8, epochs=2, verbose=0)
    assert model.predict(x, batch_size=8, verbose=0)["y"].shape == (37, 1)
    assert all(np.abs(w).max() > 0 for w in model.mix.get_weights())


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("name", ["weighted", "gated", "own gate", "gaussian"])
@pytest.mark.slow_on_jax
def test_training(rng, name, jit_compile):
    """The first replica is right, the others noise: the mix learns to hear the first."""
    x = rng.normal(size=(256, 4)).astype("float32")
    head = keras.layers.Dense(1, trainable=False)
    wrong = [keras.layers.Dense(1, trainable=name == "gaussian") for _ in range(2)]
    inputs = keras.Input((4,))
    mix, more = make(name)
    outputs = mix([layer(inputs) for layer in (head, *wrong)], **more(inputs))
    model = keras.Model(inputs, outputs)
    loss = GaussianNLL() if name == "gaussian" else "mse"
    metrics = [GaussianRMSE()] if name == "gaussian" else ["mae"]
    model.compile(keras.optimizers.Adam(0.1), loss, metrics=metrics, jit_compile=jit_compile)
    history = model.fit(x, array(head(x)), epochs=12, batch_size=50, verbose=0).history
    assert history["loss"][-1] < 0.5 * history["loss"][0] or name == "gaussian"
    if name == "gaussian":
        assert history["gaussian_rmse"][-1] < 0.3 * history["gaussian_rmse"][0]
        assert history["loss"][-1] == pytest.approx(0.5 * np.log(2 * np.pi), abs=0.1)
    if name == "weighted":
        assert int(np.argmax(mix.logits)) == 0
        assert mix.get_weights()[0].max() > 0.5


@pytest.mark.parametrize("name", [*NAMES, "own gate", "function", "layer"])
def test_a_file_is_loaded_in_safe_mode(rng, tmp_path, name):
    model = committee(name)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x = rng.normal(size=(5, 4)).astype("float32")
    assert difference(loaded.predict(x, verbose=0), model.predict(x, verbose=0)) == 0
    model.save_weights(tmp_path / "model.weights.h5")
    again = keras.Model.from_config(model.get_config())
    again.load_weights(tmp_path / "model.weights.h5")
    assert difference(again.predict(x, verbose=0), model.predict(x, verbose=0)) == 0


@pytest.mark.parametrize("name", [*NAMES, "own gate"])
def test_a_built_mix_alone_is_serialized(rng, name):
    mix, more = make(name)
    x, parts = rng.normal(size=(5, 4)).astype("float32"), parts_of(rng, 5, 3)
    mix(parts, **more(x))
    mix.set_weights([rng.normal(size=w.shape) for w in mix.get_weights()])
    config = keras.saving.serialize_keras_object(mix)
    for _ in range(2):
        copy = keras.saving.deserialize_keras_object(config)
        assert copy.get_config() == mix.get_config()
        copy.set_weights(mix.get_weights())
        assert difference(array(copy(parts, **more(x))), array(mix(parts, **more(x)))) == 0


def test_configs():
    mix = GaussianMix(variance=0.2, own_variance=False, name="g", dtype="float64")
    copy = GaussianMix.from_config(mix.get_config())
    assert (copy.variance, copy.own_variance, copy.name) == (0.2, False, "g")
    assert copy.dtype_policy == mix.dtype_policy
    mix = GatedMix(hidden=3, balance=0.4)
    config = mix.get_config()
    copy = GatedMix.from_config(config)
    assert (copy.gate, copy.hidden, copy.balance) == (None, 3, 0.4)
    mix = GatedMix(gate=keras.layers.Dense(2))
    config = mix.get_config()
    assert all(GatedMix.from_config(config).gate.units == 2 for _ in range(2))
    unbuilt = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(GatedMix()))
    assert not unbuilt.built
    loss = GaussianNLL(reduction="sum", name="n", dtype="float64")
    copy = keras.losses.deserialize(keras.losses.serialize(loss))
    assert isinstance(copy, GaussianNLL)
    assert (copy.reduction, copy.name, copy.dtype) == ("sum", "n", "float64")
    metric = keras.metrics.deserialize(keras.metrics.serialize(GaussianRMSE(name="r")))
    assert isinstance(metric, GaussianRMSE)
    assert metric.name == "r"


def test_a_compiled_gaussian_committee_in_a_file(rng, tmp_path):
    model = committee("gaussian")
    model.compile("sgd", GaussianNLL(), metrics=[GaussianRMSE()])
    x = rng.normal(size=(5, 4)).astype("float32")
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    before = model.evaluate(x, x[:, :3], verbose=0)
    assert loaded.evaluate(x, x[:, :3], verbose=0) == pytest.approx(before)


# The loss and the metric.


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("axes", [(6,), (6, 2)], ids=str)
def test_the_likelihood(rng, axes, d):
    y, mean = rng.normal(size=(*axes, d)), rng.normal(size=(*axes, d))
    variance = rng.uniform(0.1, 3, size=(*axes, d))
    prediction = np.concatenate([mean, variance], axis=-1)
    rows = -scipy.stats.norm.logpdf(y, mean, np.sqrt(variance)).mean(axis=-1)
    assert difference(array(GaussianNLL(reduction=None)(y, prediction)), rows) < 1e-5
    assert float(GaussianNLL()(y, prediction)) == pytest.approx(rows.mean(), rel=1e-5)
    weights = rng.uniform(size=axes)
    weighted = GaussianNLL(reduction="sum")(y, prediction, weights)
    assert float(weighted) == pytest.approx((rows * weights).sum(), rel=1e-5)
    metric = GaussianRMSE()
    metric.update_state(y[:4], prediction[:4])
    metric.update_state(y[4:], prediction[4:])
    assert float(metric.result()) == pytest.approx(np.sqrt(((y - mean) ** 2).mean()), rel=1e-5)
    metric.reset_state()
    metric.update_state(y, prediction, weights)
    expected = np.sqrt(np.average(((y - mean) ** 2).mean(axis=-1), weights=weights))
    assert float(metric.result()) == pytest.approx(expected, rel=1e-5)
    if d == 1:
        flat = y[..., 0]
        assert difference(array(GaussianNLL(reduction=None)(flat, prediction)), rows) < 1e-5
        metric.reset_state()
        metric.update_state(flat, prediction)
        assert float(metric.result()) == pytest.approx(np.sqrt(((y - mean) ** 2).mean()), rel=1e-5)


def test_masked_steps_do_not_count(rng):
    y = rng.normal(size=(2, 3, 1)).astype("float32")
    prediction = keras.ops.convert_to_tensor(np.abs(rng.normal(size=(2, 3, 2))) + 0.1)
    rows = array(GaussianNLL(reduction=None)(y, prediction))
    mask = np.array([[True, True, False], [True, False, False]])
    prediction._keras_mask = keras.ops.convert_to_tensor(mask)
    assert float(GaussianNLL()(y, prediction)) == pytest.approx(rows[mask].mean(), rel=1e-5)


@pytest.mark.parametrize("use", [GaussianNLL(), GaussianRMSE().update_state])
def test_targets_that_do_not_fit(use):
    with pytest.raises(ValueError, match=r"even number of columns.*y_pred of shape \(4, 3\)"):
        use(np.zeros((4, 1)), np.ones((4, 3)))
    with pytest.raises(ValueError, match=r"\(4, 2\).*y_true of shape \(4, 1\) and y_pred"):
        use(np.zeros((4, 1)), np.ones((4, 4)))
    with pytest.raises(ValueError, match=r"Received: y_true of shape \(4,\) and y_pred of shape"):
        use(np.zeros(4), np.ones((4, 4)))
    with pytest.raises(ValueError, match=r"Received: y_true of shape \(3, 1\)"):
        use(np.zeros((3, 1)), np.ones((4, 2)))


# What a mix can be, and errors.


def test_a_mix_that_returns_nothing_is_named():
    with pytest.raises(ValueError, match="which returns None"):
        get_mix(lambda outputs: None)([keras.ops.ones((2, 1))] * 2)


def test_get_mix():
    classes = {"weighted": WeightedMix, "gaussian": GaussianMix, "gated": GatedMix}
    assert all(type(get_mix(name)) is cls for name, cls in classes.items())
    assert get_mix("mean").function is mean_of_replicas
    layer = keras.layers.Average()
    assert get_mix(layer) is layer
    product = get_mix(lambda outputs: outputs[0] * outputs[1])
    assert isinstance(product, keras.layers.Lambda)
    assert array(product([np.full((1, 1), 2.0), np.full((1, 1), 3.0)])).tolist() == [[6.0]]


def test_a_python_lambda_is_not_loaded_in_safe_mode(tmp_path):
    x = keras.Input((2,))
    model = keras.Model(x, get_mix(lambda outputs: outputs[0])([x, 2 * x]))
    model.save(tmp_path / "model.keras")
    with pytest.raises((TypeError, ValueError), match="Python lambda"):
        keras.saving.load_model(tmp_path / "model.keras")


@pytest.mark.parametrize("mix", ["median", None, 3, ["mean"]], ids=str)
def test_no_mix(mix):
    with pytest.raises(ValueError, match=r"must be one of 'mean'.*Received: mix=.*Choose") as error:
        get_mix(mix)
    assert f"Received: mix={mix!r}." in str(error.value)


def test_what_others_call_a_mean():
    with pytest.raises(ValueError, match=r"Received: mix='average'\. Write `mix='mean'`"):
        get_mix("average")


def test_functions_of_numpy():
    with pytest.raises(ValueError, match=r"Received: mix=<.*use those of `keras.ops`"):
        get_mix(np.mean)


def test_functions_of_unknown_arguments():
    with pytest.raises(ValueError, match=r"Received: mix=<built-in function max>\. .*wrap it"):
        get_mix(max)


def test_what_does_not_take_a_list():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    for mix in (lambda first, second: first + second, keras.layers.Dense(1)):
        with pytest.raises(ValueError, match=r"must take one list.*the 2 replicas.*which fails: "):
            make_parallel(model, 2, "tower", mix=mix)


def test_a_class_instead_of_a_layer():
    with pytest.raises(ValueError, match=r"not the class: `mix=WeightedMix\(\.\.\.\)`"):
        get_mix(WeightedMix)
    with pytest.raises(ValueError, match=r"(?s)Received: gate=<class.*create a layer from its"):
        GatedMix(gate=keras.layers.Dense)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("built", [False, True])
def test_outputs_that_are_no_list_of_replicas(name, built):
    mix, more = make(name)
    x = np.ones((2, 4), "float32")
    if built:
        mix([x, x], **more(x))
    with pytest.raises(ValueError, match=r"needs a list.*outputs=\(2, 4\)\. Put"):
        mix(x, **more(x))
    with pytest.raises(ValueError, match=r"needs a list.*outputs=\(\(2, 4\), \(2, 4\)\)\. Put"):
        mix((x, x), **more(x))
    with pytest.raises(ValueError, match=r"needs a list.*outputs=\[\]"):
        mix([], **more(x))
    with pytest.raises(ValueError, match=r"outputs\[1\]=\(2, 1\)\. Mix the outputs of"):
        mix([x, x[:, :1]], **more(x))
    with pytest.raises(ValueError, match=r"\(as shapes\): outputs\[0\]=\[\(2, 4\)\], outputs\[1\]"):
        mix([[x], (x,)], **more(x))
    with pytest.raises(ValueError, match=r"outputs\[1\]=\{'a': None\}"):
        mix([{"a": x}, {"a": None}], **more(x))


def test_another_number_of_replicas(rng):
    parts, x = parts_of(rng, 2, 3), np.ones((2, 4))
    mix = WeightedMix()
    mix(parts)
    with pytest.raises(
        ValueError, match=r"weights for the outputs of 3 replicas\. Received: .* 2 "
    ):
        mix(parts[:2])
    mix = GatedMix()
    mix(parts, features=x)
    with pytest.raises(ValueError, match=r"\(rows, 2\).*Received: logits of shape \(2, 3\)"):
        mix(parts[:2], features=x)


@pytest.mark.parametrize("variance", [0, -1.0, float("nan"), float("inf"), "1", True, None])
def test_a_variance_that_is_none(variance):
    with pytest.raises(ValueError, match=f"positive number.*Received: variance={variance!r}"):
        GaussianMix(variance)


def test_columns_that_do_not_fit(rng):
    with pytest.raises(ValueError, match=r"`own_variance` must be.*own_variance='yes'"):
        GaussianMix(own_variance="yes")
    with pytest.raises(ValueError, match=r"even one.*shape \(5, 3\), with own_variance=True"):
        GaussianMix(own_variance=True)(parts_of(rng, 5, 3))
    with pytest.raises(ValueError, match=r"shape \(\), with own_variance=None"):
        GaussianMix()([np.float32(1), np.float32(2)])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("gate", 3), ("gate", "dense"), ("hidden", 0), ("hidden", 2.0), ("hidden", True)),
        *(("balance", value) for value in (-0.1, "x", True, float("nan"))),
    ],
)
def test_bad_arguments_of_a_gate(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be .*Received: {name}={value!r}"):
        GatedMix(**{name: value})


def test_features_that_a_gate_cannot_read(rng):
    parts = parts_of(rng, 2, 3)
    with pytest.raises(ValueError, match=r"Received: features=None.*features=inputs"):
        GatedMix()(parts)
    ids = {"ids": np.ones((2, 4), "int32")}
    with pytest.raises(
        ValueError, match=r"features=\{'ids': \(2, 4\)\}, of dtypes \{'ids': 'int32"
    ):
        GatedMix()(parts, features=ids)
    with pytest.raises(ValueError, match=r"\(rows, 3\).*Received: logits of shape \(2, 4\)"):
        GatedMix(gate=keras.layers.Dense(4))(parts, features=np.ones((2, 5)))
    with pytest.raises(ValueError, match=r"an output of shape \(2, 3\) and features of 1 row\."):
        GatedMix()(parts, features=np.ones((1, 5)))
    with pytest.raises(ValueError, match=r"an output of shape \(\) and features of 2 rows"):
        GatedMix()([np.float32(1), np.float32(2)], features=np.ones((2, 5)))


@tensorflow_only
def test_axes_of_unknown_length():
    with pytest.raises(ValueError, match=r"known number of columns.*shape \(None, None\)"):
        GaussianMix()([keras.KerasTensor((None, None))] * 2)
    with pytest.raises(ValueError, match=r"features=\(None, None, 2\), of.* Pass `gate=`"):
        GatedMix()([keras.KerasTensor((None, 1))], features=keras.KerasTensor((None, None, 2)))


@tensorflow_only
def test_a_gate_leaves_out_what_is_not_dense(rng):
    import tensorflow as tf

    sparse = tf.sparse.from_dense(np.eye(2, dtype="float32"))
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    parts = parts_of(rng, 2, 3)
    kinds = ["float32, not dense", "float32, not dense", "string"]
    for features, kind in zip((sparse, ragged, tf.constant(["a", "b"])), kinds):
        with pytest.raises(ValueError, match=f"of dtypes {{'x': '{kind}'}}.* Pass `gate=`"):
            GatedMix()(parts, features={"x": features})
    mix = GatedMix()
    mix(parts, features=[sparse, ragged, tf.constant(["a", "b"]), np.ones((2, 3))])
    assert mix.get_weights()[0].shape == (3, 16)
