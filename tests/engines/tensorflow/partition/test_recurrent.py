"""Layers that cuDNN computes on GPUs: their operations are spread, with the numbers of one device.

No kernel of cuDNN runs on a processor, so one written here stands in. What it notes for its
gradient depends on the rows that it got, as cuDNN's notes do.
"""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_multigpu import make_parallel
from keras_multigpu.engines.tensorflow.partition import operations

_UNITS = 3


@pytest.fixture
def cudnn(monkeypatch):
    """Puts our kernels in cuDNN's place; when called, lets Keras find a GPU."""
    create = operations.create

    def created(kind, inputs, attributes, name=None):
        if kind not in ("CudnnRNNV3", "CudnnRNNBackpropV3"):
            return create(kind, inputs, attributes, name)
        mode = attributes["rnn_mode"].s.decode()
        return (_forward if kind == "CudnnRNNV3" else _backward)(mode, *inputs)

    monkeypatch.setattr(operations, "create", created)
    keras_rnn = sys.modules["keras.src.backend.tensorflow.rnn"]
    return lambda: monkeypatch.setattr(keras_rnn, "_is_gpu_available", lambda: True)


def _forward(mode, x, h, c, params, lengths):
    sequence, h, c = _run(mode, x, h, c, params, lengths)
    return [sequence, h, c, _notes(x), tf.cast(tf.shape(x)[:1], tf.int8)]


def _backward(mode, x, h, c, params, lengths, *rest):
    of_outputs, notes, rows = rest[3:6], *rest[6:]
    with tf.control_dependencies(
        [
            tf.debugging.assert_equal(notes, _notes(x)),
            tf.debugging.assert_equal(tf.cast(rows, tf.int32), tf.shape(x)[:1]),
        ]
    ):
        given = [tf.identity(one) for one in (x, h, c, params)]
    with tf.GradientTape() as tape:
        tape.watch(given)
        made = _run(mode, *given, lengths)
    return tape.gradient(made, given, list(of_outputs), unconnected_gradients="zero")


def _notes(x):
    return tf.reshape(tf.cumsum(x, 0), [-1])


def _run(mode, x, h, c, params, lengths):
    """The gates' kernels, for inputs and for states, and the biases of both, one after another."""
    gates, features = (4 if mode == "lstm" else 3), x.shape[-1]
    sizes = [features * _UNITS] * gates + [_UNITS * _UNITS] * gates + [_UNITS] * 2 * gates
    parts = tf.split(params, sizes)
    kernels = [tf.reshape(one, [_UNITS, -1]) for one in parts[: 2 * gates]]
    biases, state, cell, sequence = parts[2 * gates :], h[:, 0], c, []
    if mode == "lstm":
        cell = c[:, 0]
    for step in range(x.shape[1]):
        of_inputs = [
            tf.matmul(x[:, step], kernels[n], transpose_b=True) + biases[n] for n in range(gates)
        ]
        of_states = [
            tf.matmul(state, kernels[gates + n], transpose_b=True) + biases[gates + n]
            for n in range(gates)
        ]
        if mode == "lstm":
            i, f, g, o = (one + two for one, two in zip(of_inputs, of_states))
            new_cell = tf.sigmoid(f) * cell + tf.sigmoid(i) * tf.tanh(g)
            new = tf.sigmoid(o) * tf.tanh(new_cell)
        else:
            z, r = (tf.sigmoid(of_inputs[n] + of_states[n]) for n in (0, 1))
            new_cell, new = cell, z * state + (1 - z) * tf.tanh(of_inputs[2] + r * of_states[2])
        is_there = (step < lengths)[:, None]
        state = tf.where(is_there, new, state)
        cell = tf.where(is_there, new_cell, cell) if mode == "lstm" else cell
        sequence.append(tf.where(is_there, new, tf.zeros_like(new)))
    return tf.stack(sequence, 1), state[:, None], cell[:, None] if mode == "lstm" else cell


def _sequences(layer, **options):
    return keras.Sequential([keras.Input((5, 4)), layer(_UNITS, **options), layers.Dense(4)])


def _words():
    return keras.Sequential(
        [
            keras.Input((5,)),
            layers.Embedding(9, 4, mask_zero=True),
            layers.LSTM(_UNITS),
            layers.Dense(4),
        ]
    )


def _two_ways():
    return keras.Sequential(
        [
            keras.Input((5, 4)),
            layers.Bidirectional(layers.GRU(_UNITS, return_sequences=True)),
            layers.LSTM(_UNITS, return_sequences=True),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )


def _padded(rng, rows):
    words = rng.integers(1, 9, (rows, 5))
    return words * (np.arange(5) < rng.integers(1, 6, (rows, 1)))


@tf.custom_gradient
def _counted_on_host(x):
    def gradient(upstream):
        return tf.numpy_function(lambda one: 2 * one, [upstream], upstream.dtype)

    return x, gradient


def _whole_gradient():
    """One device computes the gradient, and needs what the kernel notes of the whole batch."""
    return keras.Sequential(
        [keras.Input((5, 4)), layers.LSTM(_UNITS), layers.Lambda(_counted_on_host), layers.Dense(4)]
    )


MODELS = {
    "lstm": lambda: _sequences(layers.LSTM),
    "gru": lambda: _sequences(layers.GRU),
    "masked": _words,
    "two ways": _two_ways,
    "whole gradient": _whole_gradient,
}
_QUICK = [("lstm", None), ("gru", None)]
_MORE = [(name, None) for name in MODELS if (name, None) not in _QUICK] + [("lstm", "weights")]
_SLOW = [pytest.param(*one, marks=pytest.mark.slow) for one in _MORE]


@pytest.mark.parametrize(("name", "shard"), [*_QUICK, *_SLOW])
def test_the_numbers_of_one_device(name, shard, cudnn, in_float64):
    rng = np.random.default_rng(4)
    batches = [
        (
            _padded(rng, rows) if name == "masked" else rng.normal(size=(rows, 5, 4)),
            rng.normal(size=(rows, 4)),
        )
        for rows in (9, 2)
    ]

    def trained(parallel):
        keras.utils.set_random_seed(5)
        model = MODELS[name]()
        if parallel:
            model = make_parallel(model, 4, shard=shard)
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
        for x, y in batches:
            model.train_on_batch(x, y)
        return [*model.get_weights(), model.predict(batches[0][0], verbose=0)], model

    wanted, _ = trained(parallel=False)
    cudnn()
    made, model = trained(parallel=True)
    for one, two in zip(made, wanted):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-12)
    assert ("Cudnn" in model.explain()) == (name == "whole gradient")
