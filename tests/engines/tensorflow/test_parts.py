"""Parts of a template that its steps call directly: how they are sliced, and when they are not."""

import collections
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from support.loops import VariationalAutoencoder
from support.parity import difference

from keras_multigpu import make_parallel
from keras_multigpu.engines.tensorflow.replicas import Replicas

pytestmark = pytest.mark.usefixtures("sliced")


class Steps(keras.Model):
    """A `train_step` around `compute`, which calls the parts that `make` makes."""

    def __init__(self, make, compute):
        super().__init__()
        self.built = True
        self.part = make()
        self.compute = compute

    def train_step(self, data):
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        with tf.GradientTape() as tape:
            loss = self.compute(self, x)
        weights = self.part.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


def _train(make, compute, rows=9, n=2, kind=Steps, is_sliced=None, **options):
    """The parallel model; checks losses and weights against one device."""
    x = np.random.default_rng(5).normal(size=(rows, 4)).astype("float32")
    models, histories = [], []
    for count in (None, n):
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        model = kind(make, compute)
        model = make_parallel(model, count) if count else model
        model.compile(keras.optimizers.SGD(0.1), **options)
        history = model.fit(x, batch_size=6, epochs=2, shuffle=False, verbose=0)
        models.append(model)
        histories.append(history.history)
    assert difference(*histories) < 1e-6
    assert difference(*(model.part.get_weights() for model in models)) < 1e-6
    paths = [[variable.path for variable in model.part.variables] for model in models]
    assert paths[0] == paths[1]
    known = models[1]._parallel_parts._known.values()
    assert is_sliced is None or is_sliced == any(calls is not None for _, calls in known)
    return models[1]


def _mlp():
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(3, activation="tanh"), layers.Dense(1)]
    )


def _square(self, x):
    return tf.reduce_mean(self.part(x, training=True) ** 2)


def test_replicas_of_each_part_on_every_device(rng):
    model = VariationalAutoencoder()
    model.compile(keras.optimizers.Adam)
    parallel = make_parallel(model, 4)
    x = {name: tf.constant(one, "float32") for name, one in model.data(rng, 8).items()}
    step = tf.function(lambda data: parallel.train_step((data,))).get_concrete_function(x)
    calls = [node for node in step.graph.as_graph_def().node if "PartitionedCall" in node.op]
    counts = collections.Counter(node.device[-5:] for node in calls)
    # The encoder and the decoder, forwards and backwards.
    assert counts == {f"CPU:{index}": 4 for index in range(4)}


class Product(layers.Layer):
    """The inputs times a matrix, and a number."""

    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs):
        x, matrix, *rest = inputs
        return self.scale * x @ matrix if not rest else self.scale * x * rest[0]


@pytest.mark.parametrize("rows", [9, 12], ids=["incomplete", "complete"])
def test_arguments_without_common_rows(rows):
    """The matrix has no rows of the batch: that part runs on one device, and a warning says so."""
    matrix = tf.ones((4, 3)) / 2

    def compute(self, x):
        return tf.reduce_mean(self.part([x, matrix]) ** 2)

    with pytest.warns(
        UserWarning,
        match=r"'product.*', which a step of 'steps.*' calls, runs on 'cpu:0' alone.*rows",
    ) as told:
        _train(Product, compute, rows)
    assert len(told) == 1


def test_numbers_of_rows_that_differ_at_run_time():
    """One row for all: the first device computes the whole call."""

    def compute(self, x):
        row = tf.boolean_mask(tf.constant([[1.0, 2.0, 3.0, 4.0]] * 2), [True, False])
        assert row.shape[0] is None
        alike = self.part([x, x, tf.square(x)])
        return tf.reduce_mean(self.part([x, x, row]) ** 2 + alike)

    _train(Product, compute)


def test_numbers_beside_the_rows():
    """They go to all devices, and a part that gets numbers only has nothing to slice."""

    def compute(self, x):
        number = self.part([tf.constant(1.0), tf.constant(2.0), tf.constant(0.5)])
        return tf.reduce_mean(self.part([x, x, tf.constant(2.0)]) ** 2) + number

    _train(Product, compute)


class Centred(layers.Dense):
    """Rows that see each other."""

    def call(self, inputs):
        return super().call(inputs - ops.mean(inputs, axis=0))


@pytest.mark.parametrize("rows", [8, 35])
def test_a_part_that_gets_scores_of_all_pairs_of_rows(rows):
    """Beside a value for each row: no number of made-up rows suits both, so nothing is sliced."""

    class Corrected(layers.Layer):
        def call(self, scores, probabilities):
            return scores - ops.log(probabilities)

    def compute(model, x):
        found = model.part(x)
        scores = model.correct(ops.matmul(found, ops.transpose(found)), ops.sigmoid(x[:, 0]))
        targets = ops.arange(ops.shape(x)[0])
        return ops.mean(keras.losses.sparse_categorical_crossentropy(targets, scores, True))

    class Pairs(Steps):
        def __init__(self, make, compute):
            super().__init__(make, compute)
            self.correct = Corrected()

    with pytest.warns(UserWarning, match="alone, and not on 2 devices"):
        _train(lambda: layers.Dense(3), compute, rows=rows, kind=Pairs)


def test_a_part_whose_rows_see_each_other():
    with pytest.warns(
        UserWarning, match="'centred.*', which a step of 'steps.*rows of a batch"
    ) as told:
        _train(lambda: Centred(2), _square)
    assert len(told) == 1


def _noted(uses_it):
    inputs = keras.Input(batch_shape=(6, 4), name="six")
    rows = ops.reshape(inputs, (6, 2, 2)) if uses_it else inputs
    return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(rows)))


def test_a_part_that_contains_a_batch_size():
    with pytest.warns(UserWarning, match=r"input 'six' has the fixed batch_shape=\(6, 4\), and a"):
        _train(lambda: _noted(uses_it=True), _square, rows=12)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_part_that_was_built_on_a_batch(run_eagerly):
    _train(lambda: _noted(uses_it=False), _square, is_sliced=True, run_eagerly=run_eagerly)


def test_losses_of_parts():
    """Those of activity regularizers, within the part and of its own, count once."""

    def make():
        return keras.Sequential(
            [layers.Dense(3, activity_regularizer="l2", kernel_regularizer="l1"), layers.Dense(1)]
        )

    def compute(self, x):
        return _square(self, x) + tf.add_n(self.part.losses)

    _train(make, compute)
    _train(lambda: layers.Dense(2, activity_regularizer="l2"), compute)


class Halved(layers.Layer):
    """Is built by Keras through a call: it does not know its output's shape."""

    def call(self, inputs):
        return inputs / 2


class Late(keras.Model):
    """Is built by its first call."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.Sequential([layers.Dense(3, "tanh"), Halved()])
        self.out = layers.Dense(1)

    def call(self, inputs):
        return self.out(self.hidden(inputs))


@pytest.mark.parametrize("eager", [False, True])
def test_parts_that_are_built_in_the_step(eager):
    parallel = _train(Late, _square, run_eagerly=eager)
    assert len(parallel.part.weights) == 4


def test_a_part_of_a_part_and_methods_of_parts():
    class Pair(Late):
        def halves(self, inputs):
            return self.hidden(inputs), self.hidden.layers[0](2 * inputs)

    def compute(self, x):
        first, second = self.part.halves(x)
        return tf.reduce_mean(self.part.out(first) * second)

    _train(Pair, compute)


def test_second_derivatives_by_weights():
    """The slope's own slope, through a part that is called twice with different inputs."""

    def compute(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = self.part(x) + self.part(tf.square(x))
        return tf.reduce_mean(tf.square(tape.gradient(y, x))) + tf.reduce_mean(y)

    _train(_mlp, compute)


class Decorated(Steps):
    """As in TensorFlow's tutorials."""

    @tf.function
    def train_step(self, data):
        return super().train_step(data)


def test_a_step_that_is_a_traced_function(monkeypatch):
    """TensorFlow keeps its trace, also that of a first step."""
    plans, plan = [], Replicas.plan

    def noted(self, call, *, compiled):
        plans.append(plan(self, call, compiled=compiled))
        return plans[-1]

    monkeypatch.setattr(Replicas, "plan", noted)
    _train(_mlp, _square, kind=Decorated)
    assert plans
    assert not any(one.is_whole for one in plans)


def test_given_weights():
    """`stateless_call` computes with the values that it gets."""

    def compute(self, x):
        doubled = [2 * variable.value for variable in self.part.trainable_variables]
        return tf.reduce_mean(self.part.stateless_call(doubled, [], x)[0] ** 2)

    _train(_mlp, compute)


def test_parts_called_by_a_loss():
    class Perceptual(keras.Model):
        def __init__(self):
            super().__init__()
            self.net, self.features = layers.Dense(4), _mlp()
            self.features.trainable = False

        def call(self, inputs):
            return self.net(inputs)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            seen.append(threading.get_ident())
            return ops.mean(ops.square(self.features(y_pred) - self.features(y)))

    x, results, seen = np.random.default_rng(5).normal(size=(9, 4)), [], []
    for n in (None, 2):
        keras.utils.set_random_seed(3)
        model = make_parallel(Perceptual(), n) if n else Perceptual()
        model.compile("sgd")
        results.append([model.fit(x, x, verbose=0).history, model.get_weights()])
    assert difference(*results) < 1e-6
    assert seen


def test_a_step_that_fails_leaves_the_layers_as_they_were():
    def compute(self, x):
        assert "call" in vars(self.part)
        raise ArithmeticError("enough")

    parallel = make_parallel(Steps(_mlp, compute), 2)
    parallel.compile("sgd")
    with pytest.raises(ArithmeticError):
        parallel.train_on_batch(np.ones((4, 4), "float32"))
    for layer in [parallel.template, parallel.part, *parallel.part.layers]:
        assert not {"call", "stateless_call"} & vars(layer).keys()


def test_other_threads_call_the_layers_themselves():
    """And have the results of one device."""

    def compute(self, x):
        made = []
        if tf.executing_eagerly():
            thread = threading.Thread(target=lambda: made.append(self.part(x)))
            thread.start()
            thread.join()
            assert difference(made[0].numpy(), self.part(x).numpy()) < 1e-6
        return _square(self, x)

    _train(_mlp, compute, run_eagerly=True)


def test_one_device_is_left_alone():
    def compute(self, x):
        return _square(self, x)

    parallel = make_parallel(Steps(_mlp, compute), 1)
    parallel.compile("sgd")
    step = tf.function(lambda data: parallel.train_step((data,)))
    graph = step.get_concrete_function(tf.zeros((4, 4))).graph.as_graph_def()
    assert not [node for node in graph.node if "PartitionedCall" in node.op]


class Block(layers.Layer):
    """Has no argument `training`, and a layer that needs it."""

    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization()
        self.dense = layers.Dense(2)

    def build(self, shape):
        self.norm.build(shape)
        self.dense.build(shape)

    def call(self, inputs):
        return self.dense(self.norm(inputs))


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"jit_compile": True}], ids=str)
def test_a_part_that_takes_training_from_the_call_around(options):
    model = _train(Block, _square, is_sliced=True, **options)
    assert np.abs(model.part.norm.moving_mean.numpy()).min() > 0


class Doubling(layers.Dense):
    """Has a `__call__` of its own."""

    def __call__(self, inputs, **kwargs):
        return super().__call__(2 * inputs, **kwargs)


def test_a_part_that_is_called_otherwise():
    with pytest.warns(UserWarning, match="because Doubling overrides `__call__`") as told:
        _train(lambda: Doubling(2), _square, is_sliced=False)
    assert len(told) == 1


class Regularized(layers.Layer):
    """Builds the layer in it by its first call."""

    def build(self, shape):
        self.dense = layers.Dense(3, activity_regularizer="l2")

    def call(self, inputs):
        return self.dense(inputs)


def test_the_call_that_builds_a_part_leaves_no_losses():
    def compute(self, x):
        return tf.reduce_mean(self.part(x) ** 2) + tf.add_n(self.part.losses)

    _train(Regularized, compute, is_sliced=True)
