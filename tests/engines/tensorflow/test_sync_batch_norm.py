"""BatchNormalization over the whole batch, by segments between which the replicas exchange."""

import collections
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support.parity import difference, variables

from keras_multigpu import make_parallel

pytestmark = pytest.mark.usefixtures("sliced")


def _conv(synchronized=False):
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((6, 6, 2))
    x = layers.Conv2D(4, 3)(x)
    x = layers.BatchNormalization(synchronized=synchronized, momentum=0.7)(x)
    x = layers.Conv2D(4, 3, activation="tanh")(x)
    x = layers.BatchNormalization(synchronized=synchronized)(x)
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))


def _data(rows, rng):
    return rng.normal(size=(rows, 6, 6, 2)).astype("float32"), rng.normal(size=(rows, 2))


def _gap(parallel, x, y):
    models = [_conv(), parallel]
    for model in models:
        model.compile(keras.optimizers.SGD(0.05), "mse")
        model.fit(x, y, verbose=0)
    return difference(*map(variables, models))


@pytest.mark.slow
def test_without_it_slices_are_normalized_apart(rng):
    x, y = _data(30, rng)
    assert _gap(make_parallel(_conv(), 4, sync_batch_norm=False), x, y) > 1e-3
    assert _gap(make_parallel(_conv(synchronized=True), 4, sync_batch_norm=False), x, y) < 2e-5
    assert _gap(make_parallel(_conv(), 4), x, y) < 2e-5


def _step(parallel, x, y):
    """A training step's graph."""
    parallel.make_train_function()
    step = tf.function(lambda a, b: parallel.train_step((a, b))).get_concrete_function(x, y)
    return step.graph.as_graph_def()


@pytest.mark.thin(2)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_every_segment_runs_on_every_device(jit_compile, rng):
    x, y = map(tf.constant, _data(8, rng))
    parallel = make_parallel(_conv(), 4)
    parallel.compile("sgd", "mse", jit_compile=jit_compile)
    graph = _step(parallel, x, y)
    calls = [node for node in graph.node if "PartitionedCall" in node.op]
    bodies = {function.signature.name: function for function in graph.library.function}
    assert {bodies[one.attr["f"].func.name].attr["_XlaMustCompile"].b for one in calls} == {
        jit_compile
    }
    counts = collections.Counter(one.device for one in calls)
    segments = 3
    assert sorted(counts.values()) == [2 * segments] * 4
    assert not any("Collective" in node.op for node in graph.node)


def test_inference_and_frozen_layers_need_no_exchange(rng):
    x, y = map(tf.constant, _data(8, rng))
    model = _conv()
    for layer in model.layers:
        if isinstance(layer, layers.BatchNormalization):
            layer.trainable = False
    parallel = make_parallel(model, 4)
    parallel.compile("sgd", "mse", jit_compile=False)
    calls = [node for node in _step(parallel, x, y).node if "PartitionedCall" in node.op]
    assert len(calls) == 2 * 4


def test_an_error_in_a_step_leaves_a_process_that_works(rng):
    x = rng.normal(size=(12, 3)).astype("float32")
    inputs = keras.Input((3,))
    y = layers.BatchNormalization()(layers.Dense(3)(inputs))
    y = layers.Lambda(lambda z: tf.debugging.assert_all_finite(z, "not finite") * 1.0)(y)
    model = keras.Model(inputs, layers.BatchNormalization()(y))
    parallel = make_parallel(model, 2)
    parallel.compile("sgd", "mse", jit_compile=False)
    before = parallel.get_weights()
    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        parallel.train_on_batch(np.full_like(x, np.nan), x)
    parallel.set_weights(before)
    assert np.isfinite(parallel.train_on_batch(x, x))


@pytest.mark.parametrize("watches_weights", [True, False])
def test_second_derivatives(watches_weights, rng):
    """As on one device, through the statistics too."""
    keras.utils.set_random_seed(3)
    template = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dense(1, activation="tanh"),
        ]
    )
    parallel = make_parallel(template, 3)

    @tf.function
    def penalty(model, x):
        with tf.GradientTape() as outer:
            with tf.GradientTape(watch_accessed_variables=watches_weights) as inner:
                inner.watch(x)
                y = model(x, training=True)
            slope = inner.gradient(y, x)
            loss = tf.reduce_mean(tf.reduce_sum(slope**2, axis=1))
        weights = [variable.value for variable in template.trainable_variables]
        return slope, outer.gradient(loss, weights)[:-1]

    x = tf.constant(rng.normal(size=(7, 3)), tf.float32)
    assert difference(penalty(template, x), penalty(parallel, x)) < 1e-5
    eager = penalty.python_function
    assert difference(eager(template, x), eager(parallel, x)) < 1e-5


class InALoop(layers.Layer):
    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization(center=False, scale=False)

    def build(self, shape):
        self.norm.build(shape)

    def call(self, x, training=False):
        if training:
            return tf.while_loop(lambda i, x: i < 2, self._step, (0, x))[1]
        return x

    def _step(self, i, x):
        mean, _ = self.norm._moments(x, None)
        return i + 1, x - mean


class OwnStatistics(layers.BatchNormalization):
    def _moments(self, inputs, mask):
        mean, variance = super()._moments(inputs, mask)
        return mean, 2 * variance


class HasNorm(layers.Layer):
    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization()

    def build(self, shape):
        self.norm.build(shape)


class Differentiates(HasNorm):
    def call(self, x, training=False):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = self.norm(x, training=training) ** 2
        return tape.gradient(y, x)


class CustomGradient(HasNorm):
    """TensorFlow's own gradient of silu refers to its argument."""

    def call(self, x, training=False):
        return self.norm(x, training=training) + tf.nn.silu(x)


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (InALoop, "within a loop, a branch or a `tf.function`"),
        (Differentiates, "a tape within the model differentiates"),
        (CustomGradient, "has a custom gradient and uses a tensor from before"),
        (OwnStatistics, "the rows of a batch depend on each other"),
    ],
)
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_what_cannot_be_exchanged_runs_whole(layer, reason, run_eagerly, rng):
    x = rng.normal(size=(9, 3)).astype("float32")
    models = []
    for n in (1, 2):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((3,)), layers.Dense(3), layer(), layers.Dense(3)])
        models.append(make_parallel(model, n) if n > 1 else model)
    for model in models:
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model.fit(x, x, batch_size=4, shuffle=False, verbose=0)
    texts = [str(one.message) for one in told if "alone" in str(one.message)]
    assert texts
    assert all(reason in text for text in texts)
    assert difference(*map(variables, models)) < 1e-6


class Twice(keras.Model):
    """Calls itself twice in a step."""

    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization()
        self.out = layers.Dense(2)

    def build(self, shape):
        self.norm.build(shape)
        self.out.build(shape)

    def call(self, inputs, training=False):
        return self.out(self.norm(inputs, training=training))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            first, second = self(data[0], training=True), self(-2 * data[0], training=True)
            loss = tf.reduce_mean((first - second) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


def test_two_calls_in_a_step(rng):
    x = rng.normal(size=(19, 6))
    models = []
    for n in (1, 4):
        keras.utils.set_random_seed(3)
        model = Twice()
        model.build((None, 6))
        models.append(make_parallel(model, n) if n > 1 else model)
    for model in models:
        model.compile(keras.optimizers.SGD(0.05))
        model.fit(x, x, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert difference(*(model.get_weights() for model in models)) < 2e-5


@pytest.mark.slow
def test_a_deep_net_can_be_tried_on_made_up_rows(rng):
    """Its numbers stay finite; else a warning, which is an error here, says that rows may mix."""
    model = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10)
    parallel = make_parallel(model, 2)
    x = tf.constant(rng.normal(size=(5, 32, 32, 3)), "float32")
    tf.function(lambda: parallel(x, training=True)).get_concrete_function()


def test_a_function_that_is_differentiated_from_outside(rng):
    """TensorFlow builds its gradient when asked, in another graph."""
    template = keras.Sequential(
        [keras.Input((3,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(2)]
    )
    x, found = tf.constant(rng.normal(size=(6, 3)), "float32"), []
    weights = [variable.value for variable in template.trainable_variables]
    for model in (template, make_parallel(template, 2)):
        function = tf.function(lambda x, model=model: model(x, training=True))
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(function(x) ** 2)
            found.append(tape.gradient(loss, weights))
    assert difference(found[:2], found[2:]) < 1e-3
