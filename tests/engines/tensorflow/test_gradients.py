"""Gradients that are not there, and training loops with a tape."""

import keras
import pytest
import tensorflow as tf
from keras import layers
from support.models import mlp
from support.parity import difference, variables

from keras_multigpu import make_parallel

pytestmark = pytest.mark.thin(3)


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
