"""Committees with what only TensorFlow has: text, metrics in layers, exports for serving."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from support.parity import difference

from keras_multigpu import make_parallel
from keras_multigpu.layers import mixing
from keras_multigpu.layers.outputs import hand_on_logits


def test_vocabularies_and_statistics_that_were_adapted(rng):
    words = layers.TextVectorization(output_sequence_length=3)
    words.adapt(["red green", "blue red"])
    scale = layers.Normalization()
    scale.adapt(rng.normal(5.0, 3.0, size=(50, 2)))
    text, numbers = keras.Input((), dtype="string"), keras.Input((2,))
    x = layers.Flatten()(layers.Embedding(10, 2)(words(text)))
    template = keras.Model([text, numbers], layers.Concatenate()([x, scale(numbers)]))
    parallel = make_parallel(template, 2, mode="tower", replicas="independent")
    inputs = [np.array(["red", "blue"], dtype=object), np.array([[5.0, 5.0], [8.0, 8.0]])]
    data = [keras.ops.convert_to_tensor(inputs[0], "string"), inputs[1]]
    first, second = parallel.predict_replicas(data, verbose=0)
    assert difference(first[:, 6:], second[:, 6:]) == 0
    assert parallel.replicas[1].layers[1].get_vocabulary() == words.get_vocabulary()


def test_what_is_adapted_later_is_followed(rng):
    words, scale = layers.StringLookup(vocabulary=["one"]), layers.Normalization()
    text, numbers = keras.Input((1,), dtype="string"), keras.Input((2,))
    found = layers.Rescaling(1.0)(keras.ops.cast(words(text), "float32"))
    template = keras.Model([text, numbers], layers.Concatenate()([found, scale(numbers)]))
    parallel = make_parallel(template, 2, mode="tower", replicas="independent")
    data = [tf.constant([["red"], ["blue"]]), np.array([[5.0, 5.0], [8.0, 8.0]])]
    parallel.predict_replicas(data, verbose=0)
    words.set_vocabulary(["red", "blue"])
    scale.adapt(rng.normal(5.0, 3.0, size=(50, 2)))
    parallel.compile()
    first, second = parallel.predict_replicas(data, verbose=0)
    assert first[:, 0].tolist() == [1, 2]
    assert abs(first[0, 1]) < 1
    assert difference(first, second) == 0


def test_exported_for_serving(rng, tmp_path):
    x = rng.normal(size=(5, 6)).astype("float32")
    template = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    parallel = make_parallel(template, 2, mode="tower", replicas="independent", mix="gated")
    parallel.export(tmp_path / "serving", verbose=False)
    layer = keras.layers.TFSMLayer(tmp_path / "serving", call_endpoint="serve")
    assert difference(np.asarray(layer(x)), parallel.predict(x, verbose=0)) < 1e-6


class Logged(layers.Layer):
    """Keeps a metric of its inputs."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mean = keras.metrics.Mean(name="input")

    def call(self, inputs):
        self.mean.update_state(ops.mean(inputs))
        return inputs


def test_a_metric_in_a_layer_is_reported_once(rng):
    x, y = rng.normal(size=(70, 6)).astype("float32"), rng.normal(size=(70, 2))
    template = keras.Sequential([keras.Input((6,)), Logged(), layers.Dense(2)])
    parallel = make_parallel(template, 2, mode="tower", replicas="independent")
    parallel.compile("sgd", "mse")
    logs = parallel.evaluate(x + 5, y, batch_size=70, verbose=0, return_dict=True)
    assert abs(logs["input"] - (x + 5).mean()) < 1e-4


def test_a_checkpoint_of_tensorflows(rng, tmp_path):
    models = []
    for _ in range(2):
        template = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
        options = {"replicas": "independent", "mix": "weighted"}
        models.append(make_parallel(template, 2, mode="tower", **options))
    first, second = models
    first.set_weights([rng.normal(size=weight.shape) for weight in first.get_weights()])
    path = tf.train.Checkpoint(model=first).write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(model=second).read(path).assert_consumed()
    assert difference(first.get_weights(), second.get_weights()) == 0
    assert len(first.get_weights()) > 4  # of two replicas and the mix


def test_the_mean_of_equal_probabilities_keeps_their_logits(rng):
    logits = tf.constant(rng.normal(size=(5, 3)) * 100)
    parts = [{"classes": keras.activations.softmax(logits), "other": logits} for _ in range(3)]
    mixed = mixing.mean_mix()(parts)
    assert not hasattr(mixed["classes"], "_keras_logits")
    hand_on_logits(parts, mixed)
    assert difference(np.array(mixed["classes"]._keras_logits), np.array(logits)) < 1e-12
    assert not hasattr(mixed["other"], "_keras_logits")
    for mix in (mixing.mean_mix(), mixing.WeightedMix(), mixing.GatedMix()):
        assert mixing.is_average(mix)
    for mix in (mixing.GaussianMix(), mixing.get_mix(sum), keras.layers.Average()):
        assert not mixing.is_average(mix)


class Shifted(layers.Layer):
    """Gives each replica other rows of a table, by random numbers."""

    def __init__(self, is_random):
        super().__init__()
        self.is_random = is_random
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, tokens):
        length = keras.ops.shape(tokens)[1]
        shift = keras.random.randint((), 0, length, seed=self.seeds) if self.is_random else 1
        return tokens[:, shift:]


@pytest.mark.parametrize("is_random", [False, True])
def test_rows_of_a_table_that_all_replicas_name(is_random, rng):
    """Adam squares what each row gets: as on one device, unless the replicas take other rows."""
    tokens, y = rng.integers(1, 9, (8, 5)), rng.normal(size=(8, 2)).astype("float32")

    def build():
        keras.utils.set_random_seed(3)
        pooled = layers.GlobalAveragePooling1D(keepdims=True)
        parts = [Shifted(is_random), layers.Embedding(9, 4), pooled, layers.Flatten()]
        return keras.Sequential([keras.Input((5,), dtype="int32"), *parts, layers.Dense(2)])

    plain, parallel = build(), make_parallel(build(), 3, mode="tower")
    for model in (plain, parallel):
        model.compile("adam", "mse")
        model.fit(tokens, y, batch_size=4, epochs=3, shuffle=False, verbose=0)
    found = difference(plain.get_weights(), parallel.get_weights())
    assert found > 1e-3 if is_random else found < 1e-6


class Watches(layers.Layer):
    """Has a metric, of the same name in every layer."""

    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, inputs):
        self.mean.update_state(inputs)
        return inputs


@pytest.mark.parametrize("mode", ["data", "tower", "model"])
def test_metrics_of_one_name_are_told_as_by_the_template(mode, rng):
    x, y = rng.normal(size=(8, 3)), rng.normal(size=(8, 300))
    logs = []
    for is_parallel in (False, True):
        keras.utils.set_random_seed(2)
        parts = [Watches(), layers.Dense(300), Watches()]
        model = keras.Sequential([keras.Input((3,)), *parts])
        model = make_parallel(model, 2, mode=mode) if is_parallel else model
        model.compile("sgd", "mse")
        logs.append(model.fit(x, y, verbose=0).history)
    assert difference(*logs) < 1e-4


@pytest.mark.parametrize("options", [{"mode": "tower"}, {"mode": "model"}], ids=str)
def test_a_loop_that_xla_compiles_around(options, rng):
    """The loop hands on the weights that it reads; some of them are on another device."""
    x, y = rng.normal(size=(12, 5, 4)).astype("float32"), rng.normal(size=(12, 2))
    results = []
    for is_parallel in (False, True):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((5, 4))
        hidden = layers.LSTM(6, return_sequences=True)(inputs)
        model = keras.Model(inputs, layers.Dense(2)(layers.LSTM(6)(hidden)))
        model = make_parallel(model, 2, **options) if is_parallel else model
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
        history = model.fit(x, y, 12, epochs=2, shuffle=False, verbose=0).history
        results.append([history["loss"], model.get_weights(), model.predict(x, verbose=0)])
    assert difference(*results) < 1e-5


def test_a_recurrent_layer_that_is_called_twice_is_compiled(rng):
    """Its masked loops hand on their weights: XLA takes no variable twice."""
    x, y = rng.integers(0, 9, (6, 4)), rng.normal(size=(6, 2))
    results = []
    for is_parallel in (False, True):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((4,), dtype="int32")
        embedded = layers.Embedding(9, 4, mask_zero=True)(inputs)
        layer = layers.GRU(6)
        model = keras.Model(inputs, layers.Dense(2)(layer(embedded) + layer(2 * embedded)))
        model = make_parallel(model, 3, mode="tower") if is_parallel else model
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
        history = model.fit(x, y, 3, epochs=2, shuffle=False, verbose=0).history
        results.append([history["loss"], model.get_weights()])
    assert difference(*results) < 1e-5


@pytest.mark.parametrize("options", [{"mode": "tower"}, {"mode": "model"}], ids=str)
def test_convolutions_that_keras_compiles_with_xla(options, rng):
    """In groups: Keras calls a compiled function, which reads the kernel."""
    x, y = rng.normal(size=(12, 5, 5, 4)).astype("float32"), rng.normal(size=(12, 2))
    results = []
    for is_parallel in (False, True):
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((5, 5, 4)),
                layers.Conv2D(4, 3, groups=2),
                layers.Conv2D(4, 3, groups=2),
                layers.Flatten(),
                layers.Dense(2),
            ]
        )
        model = make_parallel(model, 2, **options) if is_parallel else model
        model.compile(keras.optimizers.SGD(0.1), "mse")
        history = model.fit(x, y, 12, epochs=2, shuffle=False, verbose=0).history
        results.append([history["loss"], model.get_weights(), model.predict(x, verbose=0)])
    assert difference(*results) < 1e-5


@pytest.mark.parametrize("mode", ["tower", "model"])
def test_what_keras_lets_xla_compile_stays_compiled(mode, rng):
    """On processors only XLA has convolutions of volumes in groups."""
    x, y = rng.normal(size=(9, 3, 3, 3, 2)), rng.normal(size=(9, 2))
    found = []
    for devices in (1, 3):
        keras.utils.set_random_seed(3)
        grouped = layers.Conv3D(2, 2, groups=2)
        model = keras.Sequential(
            [keras.Input((3, 3, 3, 2)), grouped, layers.GlobalMaxPooling3D(), layers.Dense(2)]
        )
        model = (
            model if devices == 1 else make_parallel(model, devices - (mode == "model"), mode=mode)
        )
        model.compile("sgd", "mse", jit_compile=True)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        found.append([np.array(one) for one in model.get_weights()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
