"""Functions that compute something else, and functions that compute the same."""

import keras
import numpy as np
from keras import ops

ARRAYS = [np.ones((4, 3, 3), "float32"), np.ones((3, 3), "float32"), np.ones((3, 3), "float32")]


def _in_turn(*layers):
    def function(x, a, b):
        for name in layers:
            x = ops.tanh(ops.matmul(x, {"a": a, "b": b}[name]))
        return x

    return function


def _looped(body):
    return lambda x, a, b: ops.while_loop(lambda i, x: i < 3, body, (0, x))


def _branched(one):
    return lambda x, a, b: ops.cond(ops.sum(a) > 0, lambda: one(x), lambda: x)


def _pooled(strides):
    return lambda x, a, b: ops.max_pool(x, 2, strides)


def _shifted(by):
    return lambda x, a, b: x + by


OTHERS = {
    "as it is": lambda x, a, b: x,
    "number": lambda x, a, b: 2.0 * x,
    "other number": lambda x, a, b: 3.0 * x,
    "whole number": lambda x, a, b: ops.repeat(x, 2, axis=1),
    "other whole number": lambda x, a, b: ops.repeat(x, 2, axis=2),
    "sum": lambda x, a, b: ops.sum(x, axis=1),
    "other sum": lambda x, a, b: ops.sum(x, axis=2),
    "array": _shifted(np.arange(3.0, dtype="float32")),
    "other array": _shifted(np.arange(1.0, 4.0, dtype="float32")),
    "in turn": _in_turn("a", "b"),
    "in another turn": _in_turn("b", "a"),
    "constant gradient": lambda x, a, b: ops.matmul(keras.ops.stop_gradient(x), a) + x,
    "gradient": lambda x, a, b: ops.matmul(x, a) + x,
    "loop": _looped(lambda i, x: (i + 1, ops.tanh(x))),
    "other loop": _looped(lambda i, x: (i + 1, ops.sin(x))),
    "branch": _branched(ops.tanh),
    "other branch": _branched(ops.sin),
    "strides": _pooled(1),
    "other strides": _pooled(2),
    "outputs": lambda x, a, b: (a, b, x),
    "other outputs": lambda x, a, b: (b, a, x),
}


def _after(effect):
    def function(x, a, b):
        effect(x)
        layer = keras.layers.Activation("tanh")  # its name counts layers
        return layer(x) * ops.sum(a)

    return function


ALIKE = [
    _after(effect) for effect in (ops.shape, ops.tanh, lambda x: keras.layers.Activation("relu")(x))
]
