"""BatchNormalization over the whole batch: forwards, backwards, and in its moving statistics."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support.parity import difference, variables

from keras_multigpu import make_parallel


def _conv(synchronized=False, **options):
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((6, 6, 2))
    x = layers.Conv2D(4, 3)(x)
    x = layers.BatchNormalization(synchronized=synchronized, momentum=0.7, **options)(x)
    x = layers.Conv2D(4, 3, activation="tanh")(x)
    x = layers.BatchNormalization(synchronized=synchronized)(x)
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))


def _masked(synchronized=False):
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(20, 4, mask_zero=True)(x)
    x = layers.BatchNormalization(synchronized=synchronized)(x)
    return keras.Model(inputs, layers.Dense(2)(layers.LSTM(3)(x)))


def _data(build, rows, rng):
    if build is _conv:
        return rng.normal(size=(rows, 6, 6, 2)), rng.normal(size=(rows, 2))
    return rng.integers(0, 20, (rows, 7)), rng.normal(size=(rows, 2))


def test_otherwise_slices_are_normalized_by_themselves(rng):
    x, y = _data(_conv, 32, rng)
    gaps = []
    for option in (False, True):
        plain, parallel = _conv(), make_parallel(_conv(), 4, sync_batch_norm=option)
        for model in (plain, parallel):
            model.compile(keras.optimizers.SGD(0.05), "mse")
            model.fit(x, y, verbose=0)
        gaps.append(difference(variables(plain), variables(parallel)))
    assert gaps[1] < 2e-5 < 1e-3 < gaps[0]


def test_the_template_is_not_changed(rng):
    x, y = _data(_conv, 8, rng)
    template = _conv()
    parallel = make_parallel(template, 4, sync_batch_norm=True)
    parallel.compile("sgd", "mse", jit_compile=True)  # the replicas are not compiled then
    parallel.fit(x, y, verbose=0)
    norms = [one for one in template.layers if isinstance(one, layers.BatchNormalization)]
    assert all("call" not in vars(norm) for norm in norms)
    assert not any(norm.synchronized for norm in norms)
    template.compile("sgd", "mse")
    assert np.isfinite(template.fit(x, y, verbose=0).history["loss"]).all()


def test_what_cannot_be_exact_is_refused():
    with pytest.raises(ValueError, match="with renorm=True, and synchronized=False, sync_b.*True"):
        make_parallel(_conv(renorm=True), 2, sync_batch_norm=True)

    class Own(layers.BatchNormalization):
        def call(self, inputs, training=None, mask=None):
            return super().call(inputs, training=training, mask=mask)

    model = keras.Sequential([keras.Input((3,)), Own(synchronized=True)])
    with pytest.raises(ValueError, match=r"with a `call` of its own, and synchronized=True"):
        make_parallel(model, 2)
    with pytest.raises(ValueError, match="must be True or False. Received: sync_batch_norm=1"):
        make_parallel(_conv(), 2, sync_batch_norm=1)


def test_not_eagerly(rng):
    x, y = _data(_conv, 8, rng)
    parallel = make_parallel(_conv(), 2, sync_batch_norm=True)
    parallel.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(RuntimeError, match=r"'batch_normalization'.*run_eagerly=False"):
        parallel.fit(x, y, verbose=0)
    assert np.isfinite(parallel.evaluate(x, y, verbose=0))


class Twice(keras.Model):
    """Calls itself twice in a step."""

    def __init__(self, synchronized):
        super().__init__()
        self.norm = layers.BatchNormalization(synchronized=synchronized)
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
    for synchronized in (False, True):
        keras.utils.set_random_seed(3)
        model = Twice(synchronized)
        model.build((None, 6))
        models.append(make_parallel(model, 4) if synchronized else model)
    for model in models:
        model.compile(keras.optimizers.SGD(0.05))
        model.fit(x, x, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert difference(*(model.get_weights() for model in models)) < 2e-5
