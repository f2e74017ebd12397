"""BatchNormalization by the fused kernel: the results of Keras's own, and where it is used."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from parity import difference, variables

from keras_multigpu import make_parallel


class OwnNormalization(layers.BatchNormalization):
    """A user's own: what it computes is not known."""


def _model(shape, layer, **options):
    keras.utils.set_random_seed(1)
    inputs = keras.Input(shape)
    x = layers.Conv2D(4, 3)(inputs) if len(shape) == 3 else layers.Dense(4)(inputs)
    x = layer(momentum=0.7, **options)(x)
    x = layers.Dense(3)(layers.Flatten()(layers.Activation("relu")(x)))
    return keras.Model(inputs, x)


def _is_fused(model, x):
    """Whether a traced step has the kernel."""

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True))
        return tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    graph = step.get_concrete_function(tf.constant(x)).graph.as_graph_def()
    nodes = [*graph.node, *(node for body in graph.library.function for node in body.node_def)]
    return any(node.op == "FusedBatchNormV3" for node in nodes)


CASES = {
    "image": ((6, 6, 2), layers.BatchNormalization, {}, True),
    "rows": ((5,), layers.BatchNormalization, {}, True),
    "sequence": ((4, 5), layers.BatchNormalization, {"center": False}, True),
    "unscaled": ((6, 6, 2), layers.BatchNormalization, {"scale": False, "epsilon": 0.1}, True),
    "frozen": ((6, 6, 2), layers.BatchNormalization, {"trainable": False}, False),
    "other_axis": ((6, 6, 2), layers.BatchNormalization, {"axis": 1}, False),
    "small_epsilon": ((6, 6, 2), layers.BatchNormalization, {"epsilon": 1e-6}, False),
    "double": ((6, 6, 2), layers.BatchNormalization, {"dtype": "float64"}, False),
    "half": ((6, 6, 2), layers.BatchNormalization, {"dtype": "mixed_bfloat16"}, True),
    "own": ((6, 6, 2), OwnNormalization, {}, False),
}


@pytest.mark.parametrize("case", CASES)
def test_as_keras_has_it(case, rng):
    shape, layer, options, is_fused = CASES[case]
    x, y = rng.normal(3.0, 2.0, size=(9, *shape)).astype("float32"), rng.normal(size=(9, 3))
    plain, template = _model(shape, layer, **options), _model(shape, layer, **options)
    parallel = make_parallel(template, 1)
    for model in (plain, parallel):
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    losses = [
        model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0).history["loss"]
        for model in (plain, parallel)
    ]
    close = 2e-2 if case == "half" else 3e-5  # values in bfloat16 are rounded to 3 digits
    assert difference(*losses) < close
    assert difference(variables(plain), variables(parallel)) < close
    assert difference(plain.predict(x, verbose=0), parallel.predict(x, verbose=0)) < close
    assert _is_fused(parallel, x) is is_fused
    assert not _is_fused(plain, x)


def test_a_batch_of_one_value(rng):
    """The variance of a sample is not defined; that of the batch is 0."""
    plain, template = (_model((5,), layers.BatchNormalization) for _ in range(2))
    parallel = make_parallel(template, 1)
    for model in (plain, parallel):
        model.compile("sgd", "mse")
        model.train_on_batch(np.ones((1, 5)), np.ones((1, 3)))
    assert difference(variables(plain), variables(parallel)) < 1e-6


def test_masked_and_compiled(rng):
    """Of what is masked Keras takes the statistics; what is compiled XLA fuses."""
    masked = keras.Sequential(
        [
            keras.Input((4, 2)),
            layers.Masking(),
            layers.BatchNormalization(),
            layers.GlobalAveragePooling1D(),
        ]
    )
    x = rng.normal(size=(6, 4, 2)).astype("float32")
    assert not _is_fused(make_parallel(masked, 2), x)
    parallel = make_parallel(_model((5,), layers.BatchNormalization), 2)
    assert _is_fused(parallel, np.ones((4, 5), "float32"))
    parallel.compile("sgd", "mse", jit_compile=True)
    assert not _is_fused(parallel, np.ones((4, 5), "float32"))


def test_the_layer_is_left_as_it_was():
    template = _model((5,), layers.BatchNormalization)
    parallel = make_parallel(template, 2)
    parallel.compile("sgd", "mse")
    parallel.train_on_batch(np.ones((4, 5)), np.ones((4, 3)))
    assert not any("call" in vars(layer) for layer in template.layers)


def _energy():
    keras.utils.set_random_seed(1)
    hidden = [layers.Dense(5, activation="tanh"), layers.BatchNormalization()]
    return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(1, activation="tanh")])


class TapeInStep(keras.Model):
    """Trained by the gradient of its output."""

    def __init__(self):
        super().__init__()
        self.inner = _energy()

    def call(self, x, training=None):
        return self.inner(x, training=training)

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = self(x, training=True)
            loss = tf.reduce_mean((inner.gradient(outputs, x) - 1.0) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


class TapeInCall(keras.Model):
    """Its output is a gradient."""

    def __init__(self):
        super().__init__()
        self.inner = _energy()

    def build(self, input_shape):
        pass

    def call(self, x, training=None):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = self.inner(x, training=training)
        return tape.gradient(outputs, x)


@pytest.mark.parametrize("cls", [TapeInStep, TapeInCall])
@pytest.mark.parametrize("device", ["cpu:0", "cpu:1"])
def test_second_derivatives_are_keras_own(cls, device, rng):
    """Of a variance they are not those of the kernel, which would be the true ones."""
    x = rng.normal(size=(8, 6)).astype("float32")
    plain, template = cls(), cls()
    plain(x), template(x)
    parallel = make_parallel(template, devices=[device])
    for model in (plain, parallel):
        model.compile(keras.optimizers.SGD(1.0), "mse")
        model.fit(x, np.ones_like(x), epochs=3, shuffle=False, verbose=0)
    assert difference(variables(plain), variables(parallel)) < 2e-5


def test_second_derivatives_of_a_function(rng):
    x = tf.constant(rng.normal(size=(8, 6)), "float32")
    found = []
    for devices in ([], ["cpu:0"], ["cpu:1"]):
        model = make_parallel(_energy(), devices=devices) if devices else _energy()
        function = tf.function(lambda x, model=model: model(x, training=True))
        with tf.GradientTape() as tape:
            tape.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = function(x)
            loss = tf.reduce_mean((inner.gradient(outputs, x) - 1.0) ** 2)
        found.append(tape.gradient(loss, x))
    assert difference(found[0], found[1]) < 1e-6
    assert difference(found[0], found[2]) < 1e-6
