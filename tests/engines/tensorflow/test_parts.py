"""Steps that call parts of their model directly: each against one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from support.exactness import assert_equal

pytestmark = pytest.mark.usefixtures("in_float64")


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


@pytest.fixture(name="compare")
def fixture_compare(both):
    def compare(make, compute, rows=9, kind=Steps, match=None, **options):
        """Trains a model; `match` is in the warning of what one device computes alone."""
        x = np.random.default_rng(5).normal(size=(rows, 4))

        def use(model):
            model.compile(keras.optimizers.SGD(0.1), **options)
            history = model.fit(x, batch_size=6, epochs=2, shuffle=False, verbose=0).history
            variables = [variable.numpy() for variable in model.part.variables]
            return history["loss"], variables

        keras.utils.clear_session()
        assert_equal(both(lambda: kind(make, compute), use, match, n=2))

    return compare


def _mlp():
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(3, activation="tanh"), layers.Dense(1)]
    )


def _square(self, x):
    return tf.reduce_mean(self.part(x, training=True) ** 2)


class Product(layers.Layer):
    """The inputs times a matrix, and a number."""

    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs):
        x, matrix, *rest = inputs
        return self.scale * x @ matrix if not rest else self.scale * x * rest[0]


@pytest.mark.parametrize("rows", [9, 12], ids=["incomplete", "complete"])
def test_arguments_without_common_rows(compare, rows):
    """The matrix has no rows of the batch."""

    def compute(self, x):
        return tf.reduce_mean(self.part([x, tf.ones((4, 3), x.dtype) / 2]) ** 2)

    compare(Product, compute, rows)


def test_numbers_of_rows_that_are_not_known_before(compare):
    """One row for all."""

    def compute(self, x):
        two = tf.constant([[1.0, 2.0, 3.0, 4.0]] * 2, x.dtype)
        row = tf.boolean_mask(two, [True, False])
        assert row.shape[0] is None
        alike = self.part([x, x, tf.square(x)])
        return tf.reduce_mean(self.part([x, x, row]) ** 2 + alike)

    compare(Product, compute)


def test_numbers_beside_the_rows(compare):
    def compute(self, x):
        one, two, half = (tf.constant(value, x.dtype) for value in (1.0, 2.0, 0.5))
        number = self.part([one, two, half])
        return tf.reduce_mean(self.part([x, x, two]) ** 2) + number

    compare(Product, compute)


class Corrected(layers.Layer):
    def call(self, scores, probabilities):
        return scores - ops.log(probabilities)


class Pairs(Steps):
    def __init__(self, make, compute):
        super().__init__(make, compute)
        self.correct = Corrected()


@pytest.mark.parametrize("rows", [8, 35])
def test_a_part_that_gets_scores_of_all_pairs_of_rows(compare, rows):
    """Beside a value for each row."""

    def compute(model, x):
        found = model.part(x)
        scores = model.correct(ops.matmul(found, ops.transpose(found)), ops.sigmoid(x[:, 0]))
        targets = ops.arange(ops.shape(x)[0])
        return ops.mean(keras.losses.sparse_categorical_crossentropy(targets, scores, True))

    compare(lambda: layers.Dense(3), compute, rows, Pairs)


class Centred(layers.Dense):
    """Rows that see each other."""

    def call(self, inputs):
        return super().call(inputs - ops.mean(inputs, axis=0))


def test_a_part_whose_rows_see_each_other(compare):
    compare(lambda: Centred(2), _square)


@pytest.mark.parametrize("uses_it", [False, True])
def test_a_part_that_was_built_on_a_batch(compare, uses_it):
    def make():
        inputs = keras.Input(batch_shape=(6, 4), name="six")
        rows = ops.reshape(inputs, (6, 2, 2)) if uses_it else inputs
        return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(rows)))

    compare(make, _square, rows=12)


def test_losses_of_parts(compare):
    """Those of activity regularizers, within the part and of its own, count once."""

    def make():
        return keras.Sequential(
            [layers.Dense(3, activity_regularizer="l2", kernel_regularizer="l1"), layers.Dense(1)]
        )

    def compute(self, x):
        return _square(self, x) + tf.add_n(self.part.losses)

    compare(make, compute)
    compare(lambda: layers.Dense(2, activity_regularizer="l2"), compute)


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


class Regularized(layers.Layer):
    """Builds the layer in it by its first call."""

    def build(self, shape):
        self.dense = layers.Dense(3, activity_regularizer="l2")

    def call(self, inputs):
        return self.dense(inputs)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_parts_that_are_built_in_the_step(compare, run_eagerly):
    match = "runs eagerly" if run_eagerly else None
    compare(Late, _square, match=match, run_eagerly=run_eagerly)


def test_the_call_that_builds_a_part_leaves_no_losses(compare):
    def compute(self, x):
        return tf.reduce_mean(self.part(x) ** 2) + tf.add_n(self.part.losses)

    compare(Regularized, compute)


class Pair(Late):
    def halves(self, inputs):
        return self.hidden(inputs), self.hidden.layers[0](2 * inputs)


def test_a_part_of_a_part_and_methods_of_parts(compare):
    def compute(self, x):
        first, second = self.part.halves(x)
        return tf.reduce_mean(self.part.out(first) * second)

    compare(Pair, compute)


def test_second_derivatives_by_weights(compare):
    """The slope's own slope, through a part that is called twice with different inputs."""

    def compute(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = self.part(x) + self.part(tf.square(x))
        return tf.reduce_mean(tf.square(tape.gradient(y, x))) + tf.reduce_mean(y)

    compare(_mlp, compute)


class Decorated(Steps):
    """As in TensorFlow's tutorials."""

    @tf.function
    def train_step(self, data):
        return super().train_step(data)


def test_a_step_that_is_a_traced_function(compare):
    compare(_mlp, _square, kind=Decorated)


def test_given_weights(compare):
    """`stateless_call` computes with the values that it gets."""

    def compute(self, x):
        doubled = [2 * variable.value for variable in self.part.trainable_variables]
        return tf.reduce_mean(self.part.stateless_call(doubled, [], x)[0] ** 2)

    compare(_mlp, compute)


class Perceptual(keras.Model):
    """Its loss calls a part of it."""

    def __init__(self):
        super().__init__()
        self.part, self.features = layers.Dense(4), _mlp()
        self.features.trainable = False

    def call(self, inputs):
        return self.part(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(self.features(y_pred) - self.features(x)))


def test_parts_called_by_a_loss(compare):
    compare(None, None, kind=lambda *_: Perceptual())


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
def test_a_part_that_takes_training_from_the_call_around(compare, options):
    compare(Block, _square, match="runs eagerly" if "run_eagerly" in options else None, **options)


class Doubling(layers.Dense):
    """Has a `__call__` of its own."""

    def __call__(self, inputs, **kwargs):
        return super().__call__(2 * inputs, **kwargs)


def test_a_part_that_is_called_otherwise(compare):
    compare(lambda: Doubling(2), _square)
