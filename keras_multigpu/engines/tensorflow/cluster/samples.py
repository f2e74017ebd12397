"""Samples of a model's state, by which joined processes notice that one has set something alone.

A callback in one process may set the learning rate or a weight; its state would then go another way
until the end of `fit`. So each step's exchange takes along a few numbers of each process: settings
of the optimizer, the states of random numbers, and sums over some elements of each moving statistic
in every step, and of each other weight in every eighth training step of a loop and in each single
one. Floats may differ in rounding, because some of TensorFlow's sums add in any order.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.engines.runners import TrainedModel
from keras_multigpu.engines.templates import all_layers
from keras_multigpu.engines.tensorflow.cluster.peers import rounding_of
from keras_multigpu.engines.values import Tensor

EVERY = 8
"""In each of so many training steps of a loop, weights are sampled."""
_TAKEN = 256  # elements of a weight at a time, or one row of a table; each time others
_NOT_FINITE = [1e30, 0.0]


class Samples:
    """The samples of a model.

    Args:
        model: the model.
    """

    def __init__(self, model: TrainedModel):
        self._model = model

    def take(self, come: Tensor, every: Tensor | int) -> Tensor:
        """In a step: numbers and by how much each may be off, of shape `(several, 2)`.

        `come` counts the steps, alike in all processes; in each of `every` it takes samples of all
        weights.
        """
        seldom, always = ([one._value for one in some] for some in self._weights())
        settings = [tf.cast(value, tf.float64) for _, value in self._settings()]
        some = tf.cond(
            tf.equal(come % every, 0),
            lambda: _sample(seldom, come // every),
            lambda: tf.zeros([len(seldom), 2], tf.float64),
        )
        alone = [tf.stack([value, 1e-6 * tf.abs(value)]) for value in settings]
        alone += [tf.stack([value, 0.0 * value]) for value in map(_sum_of_state, self._states())]
        parts = [some, _sample(always, come), *([tf.stack(alone)] if alone else [])]
        every = tf.concat(parts, axis=0)
        return tf.where(tf.math.is_finite(every), every, tf.constant(_NOT_FINITE, tf.float64))

    def describe(self, place: int) -> str:
        """What a number of a sample stands for, with its value now."""
        weights = [one for some in self._weights() for one in some]
        if place < len(weights):
            value = np.asarray(weights[place], "float64")
            return f"{weights[place].path} with a sum of {value.sum():.6g}"
        settings = self._settings()
        if place < len(weights) + len(settings):
            name, value = settings[place - len(weights)]
            return f"{name}={float(value):.6g}"
        state = self._states()[place - len(weights) - len(settings)]
        return f"{state.path}={np.asarray(state._value).tolist()}"

    def _weights(self) -> tuple[list[keras.Variable], list[keras.Variable]]:
        """The weights to sample in some steps, and those to sample in each.

        A state that a layer assigns (moving statistics) is merged over the processes in each step,
        and so would no longer differ some steps later.
        """
        seldom: list[keras.Variable] = []
        always: list[keras.Variable] = []
        for one in self._model.weights:
            is_merged = not one.trainable and keras.backend.is_float_dtype(one.dtype)
            (always if is_merged else seldom).append(one)
        # Those of stateful recurrent layers are none of a model's variables.
        states = [getattr(layer, "states", None) for layer in all_layers(self._model)]
        always += [one for one in keras.tree.flatten(states) if isinstance(one, keras.Variable)]
        return seldom, always

    def _states(self) -> list[keras.Variable]:
        """Those of random numbers, which are no weights."""
        known = set(map(id, self._model.weights))
        states = [one for one in self._model.variables if id(one) not in known]
        return [one for one in states if not keras.backend.is_float_dtype(one.dtype)]

    def _settings(self) -> list[tuple[str, Any]]:
        """The learning rate now, and counters."""
        optimizer = getattr(self._model, "optimizer", None)
        if not isinstance(optimizer, keras.Optimizer):
            return []
        variables = [one for one in optimizer.variables if not len(one.shape)]
        counters = [one for one in variables if not keras.backend.is_float_dtype(one.dtype)]
        rate = ("learning_rate", keras.ops.convert_to_tensor(optimizer.learning_rate))
        return [rate, *((one.path, one._value) for one in counters)]


def alike(bits: Tensor) -> Tensor:
    """For each process, 0 if its samples are those of process 0; else 1 more than the first other.

    `bits` are the samples of all processes, row by row, as integers.
    """
    values = tf.reshape(tf.bitcast(bits, tf.float64), [bits.shape[0], -1, 2])
    number, slack = values[:, :, 0], values[:, :, 1]
    is_off = tf.cast(tf.abs(number - number[0]) > slack + slack[0], tf.int64)
    is_off = tf.pad(is_off, [[0, 0], [0, 1]])  # there may be no samples
    return tf.reduce_max(is_off, axis=1) * (tf.argmax(is_off, axis=1) + 1)


def _sample(weights: list[tf.Variable], turn: Tensor) -> Tensor:
    """For each weight, a sum of a sample with signs, and what rounding may do to it."""
    by_device: dict[str, list[int]] = {}
    for place, one in enumerate(weights):
        by_device.setdefault(one.device, []).append(place)
    sums = []
    for device, places in by_device.items():
        with tf.device(device):
            pieces = [tf.cast(_some(weights[place], turn), tf.float64) for place in places]
            sizes = [piece.shape[0] for piece in pieces]
            signs = np.concatenate([np.cos(np.arange(1, size + 1)) for size in sizes])
            terms, owners = tf.concat(pieces, axis=0) * signs, np.repeat(range(len(sizes)), sizes)
            off = np.repeat([rounding_of(weights[place].dtype) for place in places], sizes)
            both = tf.stack([terms, off * tf.abs(terms)], axis=1)
            sums.append(tf.math.unsorted_segment_sum(both, owners, len(sizes)))
    if not sums:
        return tf.zeros([0, 2], tf.float64)
    order = [place for places in by_device.values() for place in places]
    return tf.gather(tf.concat(sums, axis=0), np.argsort(order))


def _sum_of_state(state: keras.Variable) -> Tensor:
    """A sum of whole numbers, each times its place."""
    flat = tf.reshape(tf.cast(state._value, tf.float64), [-1])
    return tf.reduce_sum(flat * np.arange(1, flat.shape[0] + 1))


def _some(weight: tf.Variable, turn: Tensor) -> Tensor:
    """Some elements of a weight, in each turn others."""
    size = weight.shape.num_elements()
    if weight.shape.rank > 1 and weight.shape[0] >= _TAKEN:
        # A table after a sparse update would be copied if it were read as a whole.
        count = weight.shape[0]
        taken = max(1, _TAKEN * count // max(1, size))
        rows = (turn + tf.range(taken, dtype=tf.int64) * -(-count // taken)) % count
        return tf.reshape(tf.gather(weight, rows), [taken * size // count])
    step = max(1, size // _TAKEN)
    start, count = turn % step, size // step
    some = tf.reshape(weight, [-1])[start : start + count * step : step]
    return tf.ensure_shape(some, [count])
