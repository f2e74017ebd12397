"""What tapes watch of a variable."""

from __future__ import annotations

import keras
import tensorflow as tf

from keras_multigpu.engines.shared import given_value
from keras_multigpu.engines.tensorflow.weights.divided import DividedVariable
from keras_multigpu.engines.values import Tensor


def source(variable: keras.Variable) -> Tensor:
    """The value of a variable, or the one that `stateless_call` was given.

    In its own type: `Variable.value` casts to that of the calling layer. Of a divided variable it
    is the link.
    """
    given, stored = given_value(variable), variable._value
    if given is not None:
        return tf.cast(given, stored.dtype)
    with tf.device(stored.device):
        return tf.identity(stored.link if isinstance(stored, DividedVariable) else stored)
