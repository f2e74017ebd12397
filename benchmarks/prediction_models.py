"""The models for testing predictions: chosen ones, and ones drawn at random."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
from keras import layers

from benchmarks.models import MODELS, Benchmark
from keras_multigpu.layers import MultiHotDense

_CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Reconstruction(Benchmark):
    """A model whose targets are its inputs."""

    def make_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows, as inputs and as targets."""
        inputs, _ = super().make_batch()
        return inputs, inputs

    def compile(self, model: keras.Model, *, jit_compile: bool) -> None:
        """Compiles a model for training by squared errors, with Adam."""
        model.compile("adam", "mse", jit_compile=jit_compile)


def _text_cnn() -> keras.Model:
    words = keras.Input((100,), dtype="int32")
    x = layers.Embedding(20_000, 64)(words)
    ends = [layers.GlobalMaxPooling1D()(layers.Conv1D(64, n, activation="relu")(x)) for n in (3, 5)]
    return keras.Model(words, layers.Dense(_CLASSES)(layers.Concatenate()(ends)))


def _autoencoder() -> keras.Model:
    sizes = [layers.Dense(size, "relu") for size in (256, 64, 256)]
    return keras.Sequential([keras.Input((2000,)), *sizes, layers.Dense(2000)])


def _narrow() -> keras.Model:
    hidden = [layers.Dense(64, "relu") for _ in range(30)]
    return keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(_CLASSES)])


CHOSEN = {
    **{name: MODELS[name] for name in ("mlp", "convnet", "transformer", "wide")},
    "text_cnn": Benchmark(_text_cnn, 128, (100,), vocabulary=20_000),
    "autoencoder": Reconstruction(_autoencoder, 256, (2000,)),
    "narrow": Benchmark(_narrow, 128, (64,)),
}


def find(name: str) -> Benchmark:
    """A chosen model by its name, or one drawn at random: `"random-7"` from the seed 7."""
    kind, _, seed = name.partition("-")
    return draw(int(seed)) if kind == "random" else CHOSEN[name]


def draw(seed: int) -> Benchmark:
    """A model drawn at random: its kind, its layers and their sizes, and its batch."""
    random = np.random.default_rng(seed)
    kind = random.choice([_draw_dense, _draw_images, _draw_words, _draw_multi_hot])
    return kind(random)


def _size(random: Any, least: int, most: int) -> int:
    """A size with a uniformly drawn logarithm."""
    return round(float(np.exp(random.uniform(np.log(least), np.log(most)))))


def _draw_dense(random: Any) -> Benchmark:
    sizes = [_size(random, 16, 1024) for _ in range(_size(random, 1, 24))]
    width = _size(random, 8, 2048)
    activation = random.choice(["relu", "tanh", "gelu"])
    norm = random.random() < 0.3

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((width,))])
        for size in sizes:
            model.add(layers.Dense(size, str(activation)))
            if norm:
                model.add(layers.LayerNormalization())
        model.add(layers.Dense(_CLASSES))
        return model

    return Benchmark(build, _size(random, 32, 1024), (width,))


def _draw_images(random: Any) -> Benchmark:
    side, depth = int(random.choice([8, 16, 32])), int(random.integers(1, 5))
    filters = [_size(random, 8, 96) for _ in range(depth)]
    kernel, norm = int(random.choice([1, 3, 5])), random.random() < 0.5

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((side, side, 3))])
        for place, count in enumerate(filters):
            model.add(layers.Conv2D(count, kernel, padding="same", activation="relu"))
            if norm:
                model.add(layers.BatchNormalization())
            if place < 2:
                model.add(layers.MaxPooling2D())
        model.add(layers.GlobalAveragePooling2D())
        model.add(layers.Dense(_CLASSES))
        return model

    return Benchmark(build, _size(random, 32, 256), (side, side, 3))


def _draw_words(random: Any) -> Benchmark:
    length, vocabulary = _size(random, 16, 128), _size(random, 1000, 50_000)
    width, blocks = 4 * _size(random, 4, 32), int(random.integers(0, 3))
    ending = random.choice(["mean", "max", "convolution"])

    def build() -> keras.Model:
        words = keras.Input((length,), dtype="int32")
        x = layers.Embedding(vocabulary, width)(words)
        for _ in range(blocks):
            x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, width // 4)(x, x))
        if ending == "convolution":
            x = layers.Conv1D(64, 3, activation="relu")(x)
        pool = layers.GlobalMaxPooling1D if ending == "max" else layers.GlobalAveragePooling1D
        return keras.Model(words, layers.Dense(_CLASSES)(pool()(x)))

    return Benchmark(build, _size(random, 32, 256), (length,), vocabulary=vocabulary)


def _draw_multi_hot(random: Any) -> Benchmark:
    width, ones = _size(random, 5000, 300_000), _size(random, 8, 64)
    units, depth = _size(random, 8, 64), int(random.integers(0, 4))

    def build() -> keras.Model:
        indices = keras.Input((ones,), dtype="int32")
        x = MultiHotDense(units, width, activation="relu")(indices)
        for _ in range(depth):
            x = layers.Dense(64, "relu")(x)
        return keras.Model(indices, layers.Dense(_CLASSES)(x))

    return Benchmark(build, _size(random, 128, 2048), (ones,), vocabulary=width)
