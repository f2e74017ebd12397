"""The end of the data is found where one device finds it: before a compiled step, or within one."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_multigpu import make_parallel

pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")
ROWS = 20
X, Y = np.arange(3.0 * ROWS).reshape(ROWS, 3) / ROWS, np.ones((ROWS, 1))


def _batches():
    """Three, the last one incomplete; Keras can't know how many."""

    def batches():
        for start in range(0, ROWS, 8):
            yield X[start : start + 8], Y[start : start + 8]

    signature = (tf.TensorSpec((None, 3)), tf.TensorSpec((None, 1)))
    return tf.data.Dataset.from_generator(batches, output_signature=signature)


@pytest.mark.parametrize("options", [{}, {"mode": "tower"}, {"mode": "model"}], ids=str)
def test_no_device_waits_for_a_batch_after_the_last(options, capfd):
    template = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dense(1)])
    parallel = make_parallel(template, 2, **options)
    parallel.compile("sgd", "mse", jit_compile=True)
    parallel.fit(_batches(), shuffle=False, verbose=0)
    assert "recv item cancelled" not in capfd.readouterr().err
    assert parallel.optimizer.iterations == 3


@pytest.mark.parametrize("compiled", [True, False])
def test_steps_are_counted_as_on_one_device(compiled):
    found = []
    for n in (1, 2):
        keras.utils.set_random_seed(1)
        net = [keras.Input((3,)), layers.Dense(4), layers.Dropout(0.3), layers.Dense(1)]
        model = make_parallel(keras.Sequential(net), n)
        model.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=compiled)
        model.fit(_batches(), epochs=2, shuffle=False, verbose=0)
        found.append([int(model.optimizer.iterations.numpy()), *model.get_weights()])
    assert found[0][0] == (6 if compiled else 8)
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_a_train_function_of_the_user_takes_as_many_batches_as_it_likes():
    class Twice(keras.Sequential):
        def make_train_function(self, force=False):
            def twice(batches):
                return [self.train_step(next(batches)) for _ in range(2)][-1]

            self.train_function = tf.function(twice, autograph=False)

    parallel = make_parallel(Twice([keras.Input((3,)), layers.Dense(1)]), 2)
    parallel.compile("sgd", "mse")
    parallel.fit(_batches().repeat(), steps_per_epoch=3, shuffle=False, verbose=0)
    assert parallel.optimizer.iterations == 6
