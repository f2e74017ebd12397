"""Functions with gradients of their own: `keras.remat`, and custom gradients that use weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support.parity import difference, variables

from keras_multigpu import make_parallel

MODES = {
    "data": {"mode": "data"},
    "tower": {"mode": "tower"},
    "committee": {"mode": "tower", "replicas": "independent", "loss_of": "mix"},
    "model": {"mode": "model"},
}
OPTIONS = [{"jit_compile": False}, {"run_eagerly": True}, {"jit_compile": True}]


class Remat(layers.Layer):
    """Calls a layer by `keras.remat`."""

    def __init__(self, inner, **kwargs):
        super().__init__(**kwargs)
        self.inner = inner

    def build(self, shape):
        self.inner.build(shape)

    def compute_output_shape(self, shape):
        return self.inner.compute_output_shape(shape)

    def call(self, inputs):
        return keras.remat(self.inner)(inputs)


class RematDense(Remat):
    """Has no arguments, so that committees can make it again."""

    def __init__(self, **kwargs):
        super().__init__(dense(), **kwargs)


class OwnGradient(layers.Layer):
    """A product whose own gradient finds the weight outside of its arguments."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, inputs):
        @tf.custom_gradient
        def product(x):
            kernel = tf.convert_to_tensor(self.kernel)

            def backward(upstream, variables=None):
                by_x = upstream @ tf.transpose(kernel)
                return (by_x, [tf.transpose(x) @ upstream]) if variables else by_x

            return x @ kernel, backward

        return product(inputs)


def chained(*parts):
    inputs = keras.Input((6,))
    x = inputs
    for part in parts:
        x = part(x)
    return keras.Model(inputs, layers.Dense(2)(x))


def dense():
    return layers.Dense(6, activation="tanh")


def shared():
    layer = Remat(dense())
    return chained(layer, layer, layer.inner)


BUILDERS = {
    "one": lambda: chained(Remat(dense())),
    "nested": lambda: chained(Remat(Remat(dense()))),
    "shared": shared,
    "beside BatchNormalization": lambda: chained(
        Remat(dense()), layers.BatchNormalization(), Remat(dense())
    ),
}


def trained(build, way, options, rng):
    """The variables after some training, of one device if `way` is `None`."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(3)
    model = build()
    model = make_parallel(model, 3, **way) if way else model
    x, y = rng.normal(size=(11, 6)), rng.normal(size=(11, 2))
    model.compile(keras.optimizers.AdamW(0.05, weight_decay=0.1), "mse", **options)
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return variables(model)


@pytest.mark.thin(4)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("way", ["data", "tower", "model"])
@pytest.mark.parametrize("name", BUILDERS)
def test_recomputed_layers_train_like_one_device(name, way, options):
    results = [
        trained(BUILDERS[name], one, options, np.random.default_rng(0))
        for one in (None, MODES[way])
    ]
    assert difference(*results) < 1e-12


def test_recomputed_tables_train_like_one_device():
    def build():
        inputs = keras.Input((6,))
        tokens = layers.Lambda(lambda x: keras.ops.cast(keras.ops.abs(x) * 3, "int32"))(inputs)
        x = Remat(dense())(layers.Embedding(12, 4)(tokens))
        return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))

    options = {"jit_compile": False}
    plain = trained(build, None, options, np.random.default_rng(0))
    for way in ("data", "tower", "model"):
        parallel = trained(build, MODES[way], options, np.random.default_rng(0))
        assert difference(plain, parallel) < 1e-12


def test_a_committees_members_train_with_recomputed_layers(rng):
    model = make_parallel(chained(RematDense()), 2, **MODES["committee"])
    model.compile("sgd", "mse", jit_compile=False)
    before = [layer.inner.kernel.numpy() for layer in _remats(model)]
    model.fit(rng.normal(size=(4, 6)), rng.normal(size=(4, 2)), verbose=0)
    assert len(before) == 2
    for old, layer in zip(before, _remats(model)):
        assert np.abs(layer.inner.kernel.numpy() - old).max() > 0


def _remats(model):
    return [layer for one in model.replicas for layer in one.layers if isinstance(layer, Remat)]


def test_recomputed_states(rng):
    """Keras assigns them twice on one device: data mode does too, the others refuse."""

    def build():
        return chained(Remat(layers.BatchNormalization()))

    x, y = rng.normal(size=(4, 6)), rng.normal(size=(4, 2))
    for way, told in (
        ("data", pytest.warns(UserWarning, match="BatchNormalization.*within a loop")),
        ("tower", pytest.raises(NotImplementedError, match="in a function that is recomputed")),
        ("model", pytest.raises(NotImplementedError, match="in a function that is recomputed")),
    ):
        model = make_parallel(build(), 2, **MODES[way])
        model.compile("sgd", "mse", jit_compile=False)
        with told:
            model.fit(x, y, verbose=0)


@pytest.mark.parametrize("way", MODES)
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_custom_gradients_that_find_their_weights_outside(way, options):
    """Their weights would get no gradient in a replica, without a word."""
    refuses = pytest.raises(ValueError, match="a custom gradient .* with weights that are not")
    warns = pytest.warns(UserWarning, match="runs on 'cpu:0' alone")
    with warns if way == "data" else refuses:
        found = trained(
            lambda: chained(OwnGradient()), MODES[way], options, np.random.default_rng(0)
        )
    if way == "data":
        plain = trained(lambda: chained(OwnGradient()), None, options, np.random.default_rng(0))
        assert difference(plain, found) < 1e-12


def test_outside_of_replicas_nothing_changes():
    """Keras's own models use TensorFlow's function, beside parallel models."""
    double = tf.recompute_grad(lambda x: x * 2)
    x = tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = double(x)
    assert (float(y), float(tape.gradient(y, x))) == (6, 2)
