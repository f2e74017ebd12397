"""Functions with gradients of their own: `keras.remat`, and custom gradients that use weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support.parity import difference, plainly, variables

from keras_multigpu import make_parallel

MODES = {
    "data": {"mode": "data"},
    "tower": {"mode": "tower"},
    "committee": {"mode": "tower", "replicas": "independent"},
    "model": {"mode": "model"},
}
OPTIONS = [{"jit_compile": False}, {"run_eagerly": True}, {"jit_compile": True}]
pytestmark = pytest.mark.filterwarnings("ignore:.*runs eagerly")


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


class MadeBefore(Remat):
    """Calls `keras.remat` before there is a replica."""

    def __init__(self, inner):
        super().__init__(inner)
        self.again = keras.remat(inner)

    def call(self, inputs):
        return self.again(inputs)


class Masked(keras.Model):
    """A recurrent layer that gets its mask with its inputs."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(9, 4, mask_zero=True)
        self.sequence, self.out = layers.LSTM(3), layers.Dense(2)

    def build(self, shape):
        self.table.build(shape)
        self.sequence.build((None, 6, 4))
        self.out.build((None, 3))

    def call(self, inputs):
        tokens = keras.ops.cast(keras.ops.relu(inputs) * 4, "int32")
        return self.out(keras.remat(self.sequence)(self.table(tokens)))


def dense():
    return layers.Dense(6, activation="tanh")


def shared():
    layer = Remat(dense())
    return chained(layer, layer, layer.inner)


BUILDERS = {
    "one": lambda: chained(Remat(dense())),
    "nested": lambda: chained(Remat(Remat(dense()))),
    "shared": shared,
    "made before": lambda: chained(MadeBefore(dense())),
    "masked": Masked,
    "with a penalty": lambda: chained(Remat(layers.Dense(6, activity_regularizer="l2"))),
    "with frozen weights": lambda: chained(Remat(layers.Dense(6, trainable=False)), dense()),
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
    options = options if way else plainly()
    x, y = rng.normal(size=(11, 6)), rng.normal(size=(11, 2))
    model.compile(keras.optimizers.AdamW(0.05, weight_decay=0.1), "mse", **options)
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return variables(model), model.predict(x, verbose=0)


# Each pair of a model, a mode and an option.
CASES = [
    (name, way, OPTIONS[(number + place) % 3])
    for number, name in enumerate(BUILDERS)
    for place, way in enumerate(["data", "tower", "model"])
    if name != "masked"
]
# Model mode takes graphs, and plain Keras can't compile the loop.
CASES += [("masked", "data", OPTIONS[0]), ("masked", "tower", OPTIONS[1])]


@pytest.mark.thin(4)
@pytest.mark.parametrize(("name", "way", "options"), CASES, ids=str)
def test_recomputed_layers_train_like_one_device(name, way, options):
    results = [
        trained(BUILDERS[name], one, options, np.random.default_rng(0))
        for one in (None, MODES[way])
    ]
    assert difference(*results) < 1e-12


@pytest.mark.slow
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


def test_recomputed_states():
    results = [
        trained(
            lambda: chained(Remat(layers.BatchNormalization())),
            way,
            {"jit_compile": False},
            np.random.default_rng(0),
        )
        for way in (None, MODES["data"], MODES["tower"], MODES["model"])
    ]
    for one in results[1:]:
        assert difference(results[0], one) < 1e-12


class InAFunction(OwnGradient):
    """Calls it in a function of TensorFlow's."""

    def call(self, inputs):
        return tf.function(super().call, autograph=False)(inputs)


class RematInAFunction(RematDense):
    """Calls it in a function of TensorFlow's."""

    def call(self, inputs):
        return tf.function(super().call, autograph=False)(inputs)


class OfAConstant(OwnGradient):
    """Uses a value that has no gradient on one device either."""

    def call(self, inputs):
        factor = tf.stop_gradient(tf.convert_to_tensor(self.kernel)[0, 0])
        return tf.custom_gradient(lambda x: (x * factor, lambda by: by * factor))(inputs)


@pytest.mark.thin(4)
@pytest.mark.parametrize("layer", [OwnGradient, InAFunction])
@pytest.mark.parametrize("way", ["data", "tower", "model"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_custom_gradients_that_find_their_weights_outside(layer, way, options):
    results = [
        trained(lambda: chained(layer()), one, options, np.random.default_rng(0))
        for one in (None, MODES[way])
    ]
    assert difference(*results) < 1e-12


class LateReading(layers.Layer):
    """Reads its weight when the gradient is computed."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="normal", name="scale")

    def call(self, inputs):
        @tf.custom_gradient
        def bent(x):
            return tf.sign(x) + x, lambda by: by * tf.tanh(tf.convert_to_tensor(self.scale))

        return bent(inputs) * self.scale


class LateReadingRecomputed(LateReading):
    """Is computed again for its gradient."""

    def call(self, inputs):
        return keras.remat(super().call)(inputs)


class Traced(layers.Layer):
    """A function of TensorFlow's, which keeps what it was traced with."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    @tf.function(autograph=False)
    def call(self, inputs):
        return inputs @ tf.convert_to_tensor(self.kernel)


class Counting(layers.Layer):
    """Keeps a variable of TensorFlow's, and a state that a function assigns."""

    def build(self, shape):
        self.seen = tf.Variable(tf.ones(shape[-1]), trainable=False)
        self.total = self.add_weight(shape=(), initializer="zeros", trainable=False, name="total")

    def call(self, inputs):
        self.seen.assign(0.5 * self.seen + tf.reduce_mean(inputs, 0))

        @tf.function(autograph=False)
        def add():
            self.total.assign(self.total + 1.0)

        add()
        return inputs * self.seen


OF_MEMBERS = [RematDense, RematInAFunction, OwnGradient, InAFunction]
OF_MEMBERS += [LateReading, LateReadingRecomputed, Traced, Counting]


@pytest.mark.thin(3)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layer", OF_MEMBERS)
def test_a_committees_members_train_like_single_models(layer, options, rng):
    """Whatever finds its weights outside of its arguments finds the member's own."""
    x, y = rng.normal(size=(4, 6)), rng.normal(size=(4, 2))
    committee = make_parallel(chained(dense(), layer()), 2, mode="tower", replicas="independent")
    singles = [chained(dense(), layer()) for _ in committee.replicas]
    for member, single in zip(committee.replicas, singles):
        single.set_weights(member.get_weights())
    for model in (committee, *singles):
        model.compile("sgd", "mse", **(options if model is committee else plainly()))
        model.fit(x, y, epochs=2, verbose=0)
    for member, single in zip(committee.replicas, singles):
        assert difference(member.get_weights(), single.get_weights()) < 1e-6
        assert difference(member.predict(x, verbose=0), single.predict(x, verbose=0)) < 1e-6


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("way", ["data", "tower", "model"])
def test_custom_gradients_that_use_constants(way):
    results = [
        trained(lambda: chained(OfAConstant()), one, OPTIONS[0], np.random.default_rng(0))
        for one in (None, MODES[way])
    ]
    assert difference(*results) < 1e-12


def test_predictions_of_layers_that_assign_a_state(rng):
    """Without a gradient nothing is recomputed."""

    class Counts(layers.Layer):
        def build(self, shape):
            self.count = self.add_weight(name="count", initializer="zeros", trainable=False)

        def call(self, inputs):
            self.count.assign(self.count + 1)
            return inputs

        def compute_output_shape(self, shape):
            return shape

    x = rng.normal(size=(4, 6))
    for way in ("tower", "model"):
        model = make_parallel(chained(Remat(Counts())), 2, **MODES[way])
        assert model.predict(x, verbose=0).shape == (4, 2)


@pytest.mark.parametrize("mode", ["data", "tower", "model"])
@pytest.mark.filterwarnings("ignore:.*destroy the mask information")
def test_a_mask_after_a_recomputed_function(mode, rng):
    """TensorFlow's `recompute_grad` drops it, also where no gradient is taken."""

    class Recomputes(layers.Layer):
        def build(self, shape):
            self.inner = layers.Dense(3)
            self.inner.build(shape)

        def call(self, x):
            return keras.remat(lambda given: self.inner(given))(x)

    def build():
        keras.utils.set_random_seed(3)
        tokens = keras.Input((5,), dtype="int32")
        x = Recomputes()(layers.Embedding(12, 4, mask_zero=True)(tokens))
        return keras.Model(tokens, layers.Dense(1)(x))

    x, y = rng.integers(0, 2, (7, 5)), rng.normal(size=(7, 5, 1))
    losses = []
    for is_parallel in (False, True):
        model = make_parallel(build(), 2, mode=mode) if is_parallel else build()
        model.compile("sgd", "mse", run_eagerly=True)
        losses.append(model.evaluate(x, y, verbose=0))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
