"""Reads variables in a step: each on its own device, and in its own type."""

from __future__ import annotations

import keras
import tensorflow as tf

from keras_multigpu.engines.shared import given_value
from keras_multigpu.engines.tensorflow.tensors import is_watched
from keras_multigpu.engines.tensorflow.weights.divided import DividedVariable
from keras_multigpu.engines.values import Tensor


def read(variable: keras.Variable) -> Tensor:
    """A variable's value, or the one that `stateless_call` was given, on the variable's device.

    In the variable's own type: `Variable.value` casts to that of the calling layer.
    """
    given = given_value(variable)
    with tf.device(home_of(variable)):
        return stored(variable) if given is None else tf.cast(given, dtype_of(variable))


def source(variable: keras.Variable) -> Tensor:
    """What tapes watch of a variable: its value, or the link of a divided one."""
    if not has_link(variable):
        return read(variable)
    with tf.device(home_of(variable)):
        return tf.identity(variable._value.link)


def has_link(variable: keras.Variable) -> bool:
    """Whether tapes watch a variable's link in place of its value."""
    return isinstance(variable._value, DividedVariable) and given_value(variable) is None


def stored(variable: keras.Variable) -> Tensor:
    """The value that is stored in a variable, in its own type, on its own device."""
    with tf.device(home_of(variable)):
        return tf.identity(variable._value)


def dtype_of(variable: keras.Variable) -> str:
    """A variable's own type; under mixed precision `Variable.dtype` is the calling layer's."""
    return variable._value.dtype.name


def home_of(variable: keras.Variable) -> str:
    """The device where a variable is stored, or joined if it is divided."""
    return variable._value.device


def may_train(variable: keras.Variable) -> bool:
    """Whether a tape may differentiate by a variable."""
    is_float = tf.as_dtype(dtype_of(variable)).is_floating
    return is_float and (variable.trainable or is_watched(source(variable)))
