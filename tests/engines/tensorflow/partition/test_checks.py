"""Checks of a user's fail as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support.rule_cases.check import DEVICES

from keras_multigpu import make_parallel
from keras_multigpu.engines.tensorflow.partition.step import spread

_SPEC = tf.TensorSpec((None, None, 3), tf.float32)


def _ensured(*shape):
    """A step that promises a shape of what the trace knows little of, and reads a length."""
    return lambda x: tf.reduce_sum(tf.ensure_shape(x, shape)) / tf.ensure_shape(x, shape).shape[1]


@pytest.mark.parametrize(
    ("shape", "wrong", "right"),
    [
        ((None, 4, 3), (8, 5, 3), (8, 4, 3)),
        ((8, 4, 3), (6, 4, 3), (8, 4, 3)),  # of rows
        ((8, 4, None), (8, 3, 3), (8, 4, 3)),
    ],
)
def test_shapes(shape, wrong, right):
    step = tf.function(lambda x: spread(_ensured(*shape), (x,), DEVICES), input_signature=[_SPEC])
    np.testing.assert_allclose(step(tf.ones(right)), np.prod(right) / 4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not compatible with expected"):
        step(tf.ones(wrong))


class _Checked(layers.Layer):
    def call(self, inputs):
        tf.debugging.check_numerics(inputs, "bad")
        return inputs


def test_numbers():
    """The error names the layer, and what was found."""
    model = keras.Sequential([keras.Input((3,)), _Checked(name="checked"), layers.Dense(1)])
    parallel = make_parallel(model, 3)
    x = np.ones((7, 3), "float32")
    parallel.predict(x, verbose=0)
    x[5, 1] = np.inf
    with pytest.raises(tf.errors.InvalidArgumentError, match="(?s)checked.*bad : Tensor had Inf"):
        parallel.predict(x, verbose=0)
