"""Gradients that are not there, and training loops with a tape."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support.models import mlp
from support.parity import difference, variables

from keras_multigpu import make_parallel

pytestmark = pytest.mark.thin(3)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("option", [{}, {"run_eagerly": True}, {"jit_compile": True}], ids=str)
def test_weights_without_a_part_in_the_loss_have_no_gradient(option, rng):
    """Weight decay would change them if they had a gradient of zeros."""

    def build():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((6,))
        return keras.Model(inputs, [layers.Dense(2, name=name)(inputs) for name in "ab"])

    x, y = rng.normal(size=(70, 6)), rng.normal(size=(70, 2))
    plain, parallel = build(), make_parallel(build(), 4)
    for model in (plain, parallel):
        optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
        model.compile(optimizer, ["mse", None], **option)
        with pytest.warns(UserWarning, match="Gradients do not exist for variables.*b/kernel"):
            model.fit(x, [y, y], batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert difference(variables(plain), variables(parallel)) < 2e-5
    (untouched,) = (build(),)
    assert difference(untouched.get_weights()[2:], parallel.get_weights()[2:]) == 0


def test_a_training_loop_of_ones_own(rng):
    x, y = rng.normal(size=(22, 6)).astype("float32"), rng.normal(size=(22, 2)).astype("float32")
    plain, parallel = mlp(), make_parallel(mlp(), 4)
    for model in (plain, parallel):
        optimizer = keras.optimizers.Adam(0.05)
        optimizer.build(model.trainable_variables)

        @tf.function(input_signature=[tf.TensorSpec([None, 6]), tf.TensorSpec([None, 2])])
        def step(a, b, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(a, training=True) - b) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        for begin, end in [(0, 8), (8, 16), (16, 22)]:
            step(x[begin:end], y[begin:end])
    assert difference(plain.get_weights(), parallel.get_weights()) < 2e-5


class Hue(layers.Layer):
    """An augmentation by an operation that has no gradient."""

    def call(self, inputs):
        return tf.image.adjust_hue(inputs, 0.1)


class Scaled(Hue):
    """The same after a weight, which then can't be trained."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(1,), initializer="ones")

    def call(self, inputs):
        return super().call(inputs * self.scale)


def _of_images(layer):
    keras.utils.set_random_seed(3)
    tokens = layers.Lambda(lambda x: tf.cast(x[:, 0, :, 0] > 0.5, "int32"), output_shape=(6,))
    images = keras.Input((6, 6, 3))
    embedded = layers.GlobalAveragePooling1D()(layers.Embedding(2, 3)(tokens(images)))
    found = layers.Flatten()(layers.BatchNormalization()(layers.Conv2D(3, 3)(layer(images))))
    return keras.Model(images, layers.Dense(2, name="two")(layers.Concatenate()([found, embedded])))


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize(
    ("options", "compiled_with"),
    [
        ({}, {}),
        ({"mode": "tower"}, {}),
        pytest.param({}, {"jit_compile": True}, marks=pytest.mark.slow),
        pytest.param({"mode": "tower"}, {"run_eagerly": True}, marks=pytest.mark.slow),
        pytest.param({"mode": "model", "placement": {"two": 1}}, {}, marks=pytest.mark.slow),
    ],
)
def test_operations_without_a_gradient_before_all_weights(options, compiled_with, rng):
    x, y = rng.uniform(size=(9, 6, 6, 3)).astype("float32"), rng.normal(size=(9, 2))
    plain = _of_images(Hue())
    parallel = make_parallel(_of_images(Hue()), 2, **options)
    for model in (plain, parallel):
        model.compile(keras.optimizers.SGD(0.1), "mse", **{"jit_compile": False, **compiled_with})
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert difference(plain.get_weights(), parallel.get_weights()) < 1e-5


def test_operations_without_a_gradient_after_a_weight(rng):
    x = rng.uniform(size=(4, 6, 6, 3)).astype("float32")
    parallel = make_parallel(_of_images(Scaled()), 2)
    parallel.compile("sgd", "mse")
    with pytest.raises(LookupError, match="AdjustHue"):
        parallel.fit(x, np.zeros((4, 2)), verbose=0)
    parallel, x = make_parallel(_of_images(Hue()), 2), tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with pytest.warns(UserWarning, match="eagerly under a tape"):
            outputs = parallel(x)
    with pytest.raises(LookupError, match="AdjustHue"):
        tape.gradient(outputs, x)


class Chained(keras.Model):
    """Returns what its last layer takes, and what it gives."""

    def __init__(self, stops=False):
        super().__init__()
        self.stops = stops
        self.hidden = layers.Dense(4, "tanh", name="hidden")
        self.head = layers.Dense(2)

    def call(self, inputs):
        hidden = self.hidden(inputs)
        return hidden, self.head(tf.stop_gradient(hidden) if self.stops else hidden)


def _chained(**options):
    keras.utils.set_random_seed(3)
    model = Chained(**options)
    model(tf.zeros((2, 6)))
    return model


def _of_one_output_by_another(model, x):
    with tf.GradientTape() as tape:
        hidden, result = model(x)
        total = tf.reduce_sum(result**2)
    return tape.gradient(total, hidden)


def _of_a_penalty(model, x):
    """The penalty is on a gradient of one output by another."""
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            hidden, result = model(x)
            total = tf.reduce_sum(result**2)
        penalty = tf.reduce_sum(tape.gradient(total, hidden) ** 2)
    return outer.gradient(penalty, model.trainable_weights)


@pytest.mark.parametrize(
    ("gradient", "wrap"),
    [
        (_of_one_output_by_another, lambda function: function),
        (_of_a_penalty, tf.function),
        pytest.param(_of_a_penalty, lambda function: function, marks=pytest.mark.slow),
    ],
    ids=["eager", "penalty", "eager-penalty"],
)
def test_the_gradient_of_one_output_by_another(gradient, wrap, rng):
    x = tf.constant(rng.normal(size=(7, 6)), tf.float32)
    expected = gradient(_chained(), x)
    parallel = make_parallel(_chained(), 3)
    told = "an output is computed from another one|eagerly under a tape"
    with pytest.warns(UserWarning, match=f"'cpu:0' alone.*{told}|{told}.*'cpu:0' alone"):
        found = wrap(gradient)(parallel, x)
    assert difference(tf.nest.flatten(expected), tf.nest.flatten(found)) < 1e-5


def test_outputs_without_gradients_by_others_are_spread(rng):
    """Warnings are errors here."""
    x = tf.constant(rng.normal(size=(7, 6)), tf.float32)
    for plain in (_chained(stops=True), _chained()):
        parallel = make_parallel(plain, 3)
        parallel(x)  # no tape
    parallel = make_parallel(_chained(stops=True), 3)
    function = tf.function(lambda x: _of_one_output_by_another(parallel, x), autograph=False)
    assert function(x) is None


@pytest.mark.parametrize("shard", [None, "weights"])
@pytest.mark.parametrize("make", [tf.Variable, keras.Variable])
@pytest.mark.filterwarnings("ignore:.*called eagerly under a tape", "ignore:.*spreads nothing")
def test_a_variable_as_the_input_has_a_gradient(make, shard, rng):
    """As in style transfer, or where an input is looked for."""
    sought = make(rng.normal(size=(7, 6)).astype("float32"))
    plain, parallel = mlp(), make_parallel(mlp(), 4, shard=shard)

    def step(model):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(sought) ** 2)
        return tape.gradient(loss, [getattr(sought, "_value", sought), *model.trainable_variables])

    expected = step(plain)
    assert difference(expected, step(parallel)) < 1e-5
    assert difference(expected, tf.function(lambda: step(parallel))()) < 1e-5
