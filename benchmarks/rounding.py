"""How far rounding alone moves the weights: reversed rows on one device, and four devices.

Two conv nets are trained on scikit-learn's digits for five epochs, three times each: on one device,
on one device with the rows of every batch reversed, and on four virtual devices. All three compute
the same; only the order of floating-point sums differs.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

from keras_multigpu import make_parallel, use_virtual_devices


def build(activation: str, pooling: type[keras.Layer]) -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation=activation),
            layers.Conv2D(64, 3, padding="same", activation=activation),
            pooling(2),
            layers.Flatten(),
            layers.Dense(64, activation=activation),
            layers.Dense(10),
        ]
    )


def train(model: keras.Model, images: np.ndarray, labels: np.ndarray, step: int) -> keras.Model:
    """Trains for five epochs; `step` is 1, or -1 to reverse the rows of each batch."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    rng = np.random.default_rng(0)
    for _ in range(5):
        order = rng.permutation(len(images))
        for begin in range(0, len(images), 64):
            rows = order[begin : begin + 64][::step]
            model.train_on_batch(images[rows], labels[rows])
    return model


def main() -> None:
    use_virtual_devices(4)
    digits = load_digits()
    images, labels = digits.images[..., None] / 16, digits.target
    print("| model | rows reversed, one device | four devices |\n|---|---|---|")
    for activation, pooling in [("relu", layers.MaxPooling2D), ("tanh", layers.AveragePooling2D)]:
        one, reverse, four = (build(activation, pooling) for _ in range(3))
        train(one, images, labels, 1)
        train(reverse, images, labels, -1)
        train(make_parallel(four, 4), images, labels, 1)
        gaps = [
            max(np.abs(a - b).max() for a, b in zip(one.get_weights(), other.get_weights()))
            for other in (reverse, four)
        ]
        print(f"| {activation}, {pooling.__name__} | {gaps[0]:.1e} | {gaps[1]:.1e} |")


if __name__ == "__main__":
    main()
