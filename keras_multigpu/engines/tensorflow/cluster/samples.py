"""Samples of a model's state, by which joined processes notice that one has set something alone.

A callback in one process may set the learning rate or a weight; its state would then go another way
until the end of `fit`. So each step's exchange takes along a few numbers of each process: settings
of the optimizer, the states of random numbers, and sums over some elements of each moving statistic
in every step, and of each other weight in every eighth training step of a loop and in each single
one. Floats may differ in rounding, because some of TensorFlow's sums add in any order.
"""

from __future__ import annotations

from collections.abc import Callable
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
_NUMBERS = 2  # of each weight
_NOT_FINITE = [1e30, 0.0]
_GOLDEN = 0x9E3779B97F4A7C15  # an odd number of 64 bits; any would do


class Samples:
    """The samples of a model.

    Args:
        model: the model.
        is_here: whether a process has all of a variable.
    """

    def __init__(
        self, model: TrainedModel, is_here: Callable[[keras.Variable], bool] = lambda variable: True
    ):
        self._model, self._is_here = model, is_here

    def take(self, come: Tensor, every: Tensor | int) -> Tensor:
        """In a step: numbers and by how much each may be off, of shape `(several, 2)`.

        `come` counts the steps, alike in all processes; in each of `every` it takes samples of all
        weights.
        """
        seldom, always = ([part for _, part in some] for some in self._weights())
        settings = [tf.cast(value, tf.float64) for _, value in self._settings()]
        some = tf.cond(
            tf.equal(come % every, 0),
            lambda: _sample(seldom, come // every),
            lambda: tf.zeros([_NUMBERS * len(seldom), 2], tf.float64),
        )
        alone = [tf.stack([value, 1e-6 * tf.abs(value)]) for value in settings]
        alone += [tf.stack([value, 0.0 * value]) for value in map(_sum_of_state, self._states())]
        parts = [some, _sample(always, come), *([tf.stack(alone)] if alone else [])]
        every = tf.concat(parts, axis=0)
        return tf.where(tf.math.is_finite(every), every, tf.constant(_NOT_FINITE, tf.float64))

    def describe(self, place: int) -> str:
        """What a number of a sample stands for, with its value now."""
        weights = [one for some in self._weights() for one in some]
        if place < _NUMBERS * len(weights):
            weight, _ = weights[place // _NUMBERS]
            return f"{weight.path} with a sum of {np.asarray(weight, 'float64').sum():.6g}"
        place, settings = place - _NUMBERS * len(weights), self._settings()
        if place < len(settings):
            name, value = settings[place]
            return f"{name}={float(value):.6g}"
        state = self._states()[place - len(settings)]
        return f"{state.path}={np.asarray(state._value).tolist()}"

    def _weights(self) -> list[list[tuple[keras.Variable, tf.Variable]]]:
        """The weights to sample in some steps, and those to sample in each, with their parts.

        A state that a layer assigns (moving statistics) is merged over the processes in each step,
        and so would no longer differ some steps later.
        """
        # Of a weight in parts of several processes, none has what another one has.
        seldom: list[keras.Variable] = []
        always: list[keras.Variable] = []
        for one in self._model.weights:
            if self._is_here(one):
                (seldom if one.trainable else always).append(one)
        # Those of stateful recurrent layers are none of a model's variables.
        states = [getattr(layer, "states", None) for layer in all_layers(self._model)]
        always += [one for one in keras.tree.flatten(states) if isinstance(one, keras.Variable)]
        return [
            [(one, part) for one in some for part in getattr(one._value, "parts", [one._value])]
            for some in (seldom, always)
        ]

    def _states(self) -> list[keras.Variable]:
        """Those of random numbers, which are no weights."""
        known = set(map(id, self._model.weights))
        states = [one for one in self._model.variables if id(one) not in known]
        return [one for one in states if not keras.backend.is_float_dtype(one.dtype)]

    def _settings(self) -> list[tuple[str, Any]]:
        """The learning rates now, and counters."""
        optimizer = getattr(self._model, "optimizer", None)
        if not isinstance(optimizer, keras.Optimizer):
            return []
        variables = [one for one in optimizer.variables if not len(one.shape)]
        counters = [one for one in variables if not keras.backend.is_float_dtype(one.dtype)]
        several = getattr(optimizer, "optimizers", [optimizer])  # of a `MultiOptimizer`
        rates = [keras.ops.convert_to_tensor(one.learning_rate) for one in several]
        found = [("learning_rate", one) for one in rates]
        return [*found, *((one.path, one._value) for one in counters)]


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
    """For each weight `_NUMBERS` numbers of a sample, each with what rounding may do to it.

    Of floats, a sum with signs that no large element hides, and where there is no number.
    """
    by_device: dict[tuple[str, bool], list[int]] = {}
    for place, one in enumerate(weights):
        is_whole = one.dtype.is_integer or one.dtype.is_bool
        by_device.setdefault((one.device, is_whole), []).append(place)
    numbers = []
    for (device, is_whole), places in by_device.items():
        with tf.device(device):
            pieces = [_some(weights[place], turn) for place in places]
            sizes = [piece.shape[0] for piece in pieces]
            kind = tf.int64 if is_whole else tf.float64
            values = tf.concat([tf.cast(piece, kind) for piece in pieces], axis=0)
            order = np.concatenate([np.arange(1, size + 1) for size in sizes])
            off = np.repeat([rounding_of(weights[place].dtype) for place in places], sizes)
            owners = np.repeat(range(len(sizes)), sizes)
            terms = _of_integers(values, order) if is_whole else _of_floats(values, order, off)
            numbers.append(tf.math.unsorted_segment_sum(terms, owners, len(sizes)))
    if not numbers:
        return tf.zeros([0, 2], tf.float64)
    order = np.argsort([place for places in by_device.values() for place in places])
    return tf.reshape(tf.gather(tf.concat(numbers, axis=0), order), [-1, 2])


def _of_floats(values: Tensor, order: np.ndarray, off: np.ndarray) -> Tensor:
    """Terms of the sums of a sample, of shape `(elements, _NUMBERS, 2)`."""
    is_number = tf.math.is_finite(values)
    known = tf.where(is_number, values, 0.0)
    slack = off * tf.minimum(tf.abs(known), 1.0)  # what rounding makes of a logarithm
    kind = 1.0 + tf.cast(values > 0, tf.float64) + 2.0 * tf.cast(values < 0, tf.float64)
    gap = tf.where(is_number, tf.zeros_like(values), order * (4.0 + kind))
    terms = tf.sign(known) * tf.math.log1p(tf.abs(known)) * np.cos(order)
    sums = tf.stack([terms, slack], axis=1)
    return tf.stack([sums, tf.stack([gap, 0.0 * gap], axis=1)], axis=1)


def _of_integers(values: Tensor, order: np.ndarray) -> Tensor:
    """As above; exact."""
    factors = ((2 * order.astype("uint64") + 1) * np.uint64(_GOLDEN)).astype("int64")
    bits = 52 - int(order.max(initial=1)).bit_length()  # a double has their sum
    terms = tf.cast(tf.math.floormod(values * factors, 2**bits), tf.float64)
    none = tf.zeros_like(terms)
    return tf.stack([tf.stack([none, none], axis=1), tf.stack([terms, none], axis=1)], axis=1)


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
