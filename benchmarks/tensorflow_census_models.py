"""Small models and their batches, for the census of training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

L = keras.layers
FLAT, SEQUENCE, IMAGE, VOLUME = (6,), (5, 6), (8, 8, 3), (6, 6, 6, 3)
WORDS, PAIR, MERGED = "words", "pair", "merged"


COMPOSED: dict[str, tuple[Callable[[], Any], Any]] = {
    "Bidirectional LSTM": (lambda: L.Bidirectional(L.LSTM(3)), SEQUENCE),
    "Bidirectional GRU, sequences": (
        lambda: L.Bidirectional(L.GRU(3, return_sequences=True)),
        SEQUENCE,
    ),
    "TimeDistributed": (lambda: L.TimeDistributed(L.Dense(3)), SEQUENCE),
    "TimeDistributed convolution": (lambda: L.TimeDistributed(L.Conv1D(3, 2)), (4, 5, 6)),
    "SpectralNormalization": (lambda: L.SpectralNormalization(L.Dense(4)), FLAT),
    "RNN of two cells": (lambda: L.RNN([L.LSTMCell(3), L.GRUCell(4)]), SEQUENCE),
    "LSTM with a mask and dropouts": (
        lambda: keras.Sequential([L.Masking(), L.LSTM(3, recurrent_dropout=0.2, dropout=0.2)]),
        SEQUENCE,
    ),
    "Embedding with a mask": (
        lambda: keras.Sequential([L.Embedding(9, 4, mask_zero=True), L.GRU(3)]),
        WORDS,
    ),
    "LSTM unrolled": (lambda: L.LSTM(3, unroll=True), SEQUENCE),
    "LSTM backwards": (lambda: L.LSTM(3, go_backwards=True, return_sequences=True), SEQUENCE),
    "Convolution, dilated": (lambda: L.Conv2D(4, 3, dilation_rate=2), IMAGE),
    "Convolution in groups": (lambda: L.Conv2D(6, 3, groups=3), IMAGE),
    "Convolution, causal": (lambda: L.Conv1D(4, 3, padding="causal"), SEQUENCE),
    "Transposed convolution 1D": (lambda: L.Conv1DTranspose(4, 3), SEQUENCE),
    "Transposed convolution 2D": (lambda: L.Conv2DTranspose(4, 3, 2), IMAGE),
    "Transposed convolution 3D": (lambda: L.Conv3DTranspose(4, 3), VOLUME),
    "UpSampling, bilinear": (lambda: L.UpSampling2D(2, interpolation="bilinear"), IMAGE),
    "Attention with itself, causal": (lambda: _Causal(), SEQUENCE),
    "Sorted": (lambda: L.Lambda(lambda x: keras.ops.sort(x, axis=-1)), FLAT),
}


class _Causal(L.Layer):
    """Attention of a sequence to itself."""

    def build(self, shape: Any) -> None:
        self.inner = L.MultiHeadAttention(2, 3, dropout=0.1)
        self.inner.build(shape, shape)

    def call(self, x: Any, training: Any = None) -> Any:
        return self.inner(x, x, use_causal_mask=True, training=training)


def model(make: Any, shape: Any) -> Any:
    """A small model around a layer."""
    keras.utils.set_random_seed(0)
    if shape == WORDS:
        given = L.Input((5,), dtype="int32")
        result = keras.ops.cast(make()(given), "float64")
    elif shape in (PAIR, MERGED):
        given = L.Input(SEQUENCE if shape == PAIR else FLAT)
        pair = [L.Dense(4)(given), L.Dense(4)(given)]
        layer = make()
        result = (
            layer(*pair)
            if "Query" in type(layer).__name__ or "MultiHead" in type(layer).__name__
            else layer(pair)
        )
    else:
        given = L.Input(shape)
        result = make()(L.Dense(shape[-1])(given) if len(shape) > 1 or shape == FLAT else given)
    made = keras.Model(given, L.Dense(3)(L.Flatten()(result)))
    made.compile("adam", "mse")
    return made


def rows(shape: Any, batch: int) -> Any:
    """A batch for such a model."""
    rng = np.random.default_rng(batch)
    if shape == WORDS:
        x = rng.integers(0, 9, (batch, 5)).astype("int32")
    else:
        sample = (
            {PAIR: SEQUENCE, MERGED: FLAT}.get(shape, shape) if isinstance(shape, str) else shape
        )
        x = rng.normal(size=(batch, *sample))
    return x, rng.normal(size=(batch, 3))


def head(loss: Any, metric: Any, optimizer: Any, target: str) -> Any:
    """A small model with a loss, a metric and an optimizer."""
    keras.utils.set_random_seed(0)
    last = (
        L.Dense(4) if target == "ctc" else L.Dense(3, "sigmoid" if target == "bits" else "softmax")
    )
    shape = SEQUENCE if target == "ctc" else FLAT
    made = keras.Sequential([L.Input(shape), L.Dense(8, "tanh"), L.BatchNormalization(), last])
    made.compile(optimizer, loss, metrics=[metric] if metric is not None else None)
    return made


def head_rows(target: str, batch: int) -> Any:
    """A batch for such a model."""
    rng = np.random.default_rng(batch)
    x = rng.normal(size=(batch, *(SEQUENCE if target == "ctc" else FLAT)))
    number = rng.integers(0, 3, batch)
    targets = {
        "class": number,
        "one of many": np.eye(3)[number],
        "bits": rng.integers(0, 2, (batch, 3)).astype("float64"),
        "ctc": rng.integers(1, 4, (batch, 2)),
    }
    return x, targets[target]
