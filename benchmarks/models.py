"""The models whose steps are timed, each with one batch of random data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
from keras import layers

from keras_multigpu.layers import MultiHotDense
from keras_multigpu.zoo import deepconn

_CLASSES = 10
_VOCABULARY = 20_000
_WIDTH = 200_000


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A model and the batch on which it is trained.

    Attributes:
        build: makes the model; its outputs are logits, or probabilities if `is_softmax`.
        batch_size: rows of a batch.
        row_shape: the shape of one row of the inputs.
        vocabulary: the inputs are integers below this number; 0 for floats.
        is_softmax: whether the outputs are probabilities.
    """

    build: Callable[[], keras.Model]
    batch_size: int
    row_shape: tuple[int, ...]
    vocabulary: int = 0
    is_softmax: bool = False

    def make_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs of shape `(batch_size, *row_shape)` and labels of shape `(batch_size,)`."""
        random = np.random.default_rng(0)
        shape = (self.batch_size, *self.row_shape)
        if self.vocabulary:
            inputs = random.integers(self.vocabulary, size=shape, dtype="int32")
        else:
            inputs = random.normal(size=shape).astype("float32")
        return inputs, random.integers(_CLASSES, size=self.batch_size, dtype="int32")

    def compile(self, model: keras.Model, *, jit_compile: bool) -> None:
        """Compiles a model of this kind for training, with Adam."""
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=not self.is_softmax)
        model.compile("adam", loss, metrics=["accuracy"], jit_compile=jit_compile)


def _resnet50(side: int = 64) -> keras.Model:
    shape = (side, side, 3)
    return keras.applications.ResNet50(weights=None, input_shape=shape, classes=_CLASSES)


def _convnet() -> keras.Model:
    stages = []
    for filters in (32, 64, 128):
        stages += [
            layers.Conv2D(filters, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
        ]
    head = [layers.GlobalAveragePooling2D(), layers.Dense(_CLASSES)]
    return keras.Sequential([keras.Input((32, 32, 3)), *stages, *head])


def _mlp() -> keras.Model:
    hidden = [layers.Dense(1024, activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input((1024,)), *hidden, layers.Dense(_CLASSES)])


def _text() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((64,), dtype="int32"),
            layers.Embedding(_VOCABULARY, 128),
            layers.LSTM(128),
            layers.Dense(_CLASSES),
        ]
    )


def _transformer(blocks: int = 2, heads: int = 4, width: int = 128, words: int = 64) -> keras.Model:
    inputs = keras.Input((words,), dtype="int32")
    x = layers.Embedding(_VOCABULARY, width)(inputs)
    for _ in range(blocks):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(heads, width // heads)(x, x))
        hidden = layers.Dense(2 * width, activation="gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(width)(hidden))
    return keras.Model(inputs, layers.Dense(_CLASSES)(layers.GlobalAveragePooling1D()(x)))


def _wide() -> keras.Model:
    """Hashed features as `HashEncoder` makes them, 40 in a row."""
    inputs = keras.Input((40,), dtype="int32")
    x = MultiHotDense(32, _WIDTH, activation="relu")(inputs)
    return keras.Model(inputs, layers.Dense(_CLASSES)(x))


def _recommender() -> keras.Model:
    """A user's and an item's number, each with a table."""
    inputs = keras.Input((2,), dtype="int32")
    known = [layers.Embedding(_WIDTH, 32)(inputs[:, column]) for column in range(2)]
    x = layers.Concatenate()(known)
    for _ in range(2):
        x = layers.Dense(256, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(_CLASSES)(x))


def _deepconn() -> keras.Model:
    """The smaller variant of a published experiment on two GPUs."""
    return deepconn(
        _VOCABULARY,
        embedding=50,
        filters=10,
        units=64,
        activation="tanh",
        unit_activation=None,
        head="dot",
    )


@dataclasses.dataclass(frozen=True)
class Pairs(Benchmark):
    """A model with two inputs and one number as output."""

    def make_batch(self) -> tuple[dict[str, np.ndarray], np.ndarray]:  # type: ignore[override]
        """Two inputs of shape `(batch_size, *row_shape)`, and ratings `(batch_size, 1)`."""
        random = np.random.default_rng(0)
        shape = (self.batch_size, *self.row_shape)
        texts = (random.integers(self.vocabulary, size=shape, dtype="int32") for _ in range(2))
        return dict(zip(("user", "item"), texts)), random.normal(size=(self.batch_size, 1)).astype(
            "float32"
        )

    def compile(self, model: keras.Model, *, jit_compile: bool) -> None:
        """Compiles a model for training by squared errors, with RMSprop."""
        model.compile("rmsprop", "mse", jit_compile=jit_compile)


DEEPCONN = Pairs(_deepconn, 100, (800,), vocabulary=_VOCABULARY)
MODELS = {
    "resnet50": Benchmark(_resnet50, 64, (64, 64, 3), is_softmax=True),
    "convnet": Benchmark(_convnet, 256, (32, 32, 3)),
    "mlp": Benchmark(_mlp, 256, (1024,)),
    "text": Benchmark(_text, 128, (64,), vocabulary=_VOCABULARY),
    "transformer": Benchmark(_transformer, 64, (64,), vocabulary=_VOCABULARY),
    "wide": Benchmark(_wide, 1024, (40,), vocabulary=_WIDTH),
}
# Timed only if named; the large ones are for machines with GPUs.
NAMED = {
    "recommender": Benchmark(_recommender, 1024, (2,), vocabulary=_WIDTH),
    "resnet50_224": Benchmark(lambda: _resnet50(224), 128, (224, 224, 3), is_softmax=True),
    "transformer_768": Benchmark(
        lambda: _transformer(12, 12, 768, 128), 64, (128,), vocabulary=_VOCABULARY
    ),
}
TIMED = {**MODELS, **NAMED}
