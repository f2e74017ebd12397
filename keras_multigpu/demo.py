"""The demo: trains a small conv net on real images, on one device and then on several."""

from __future__ import annotations

import pathlib
import tempfile
import time

import keras
import numpy as np

from keras_multigpu.arguments import number_of
from keras_multigpu.devices import take_several
from keras_multigpu.extras import how_to_install
from keras_multigpu.parallel import make_parallel

_SEED = 20
_BATCH_SIZE = 64


def run_demo(n_gpus: int | None = None, epochs: int = 5) -> None:
    """Trains on one device and on several, and prints a comparison.

    The images are the handwritten digits of scikit-learn (1,797 of 8 x 8 pixels). If there are
    fewer than two GPUs, virtual devices stand in.

    Args:
        n_gpus: how many devices; `None` for all GPUs, or four virtual devices.
        epochs: how many epochs to train.

    Raises:
        ImportError: if scikit-learn is not installed.
        RuntimeError: if the plain model, loaded from the parallel model's weights file, predicts
            something else.
    """
    images, labels = _load_digits()
    devices, which = take_several(n_gpus)
    print(which)
    n_gpus = len(devices)

    plain, template = _build_model(), _build_model()
    template.set_weights(plain.get_weights())
    parallel = make_parallel(template, devices=devices)

    print(f"\nOn one device, {devices[0]}:")
    rows = max(_BATCH_SIZE // n_gpus, 2) * n_gpus  # which the devices share, on each backend
    one = _train(make_parallel(plain, devices=devices[:1]), images, labels, rows, epochs)
    print(f"\nOn {number_of(n_gpus, 'device')}, the same model:")
    several = _train(parallel, images, labels, rows, epochs)
    pairs = zip(plain.get_weights(), parallel.get_weights())
    difference = max(float(np.abs(first - second).max()) for first, second in pairs)

    _check_file(parallel, images)
    print(f"\n{'devices':>7}  {'time':>7}  {'loss':>8}  {'accuracy':>8}  largest weight difference")
    for count, (seconds, loss, accuracy), gap in ((1, one, 0.0), (n_gpus, several, difference)):
        print(f"{count:>7}  {seconds:>6.1f}s  {loss:>8.5f}  {accuracy:>8.4f}  {gap:.1e}")
    if parallel.devices[0].startswith("cpu"):
        print("\nVirtual devices share one processor: their times say nothing about GPUs.")


def _load_digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ImportError(
            "The demo trains on scikit-learn's digits, but scikit-learn is not installed. "
            f"Install the extra `demo`: {how_to_install('demo')}."
        ) from error
    digits = load_digits()
    return digits.images[..., None].astype("float32") / 16, digits.target


def _build_model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="tanh"),
            layers.Conv2D(64, 3, padding="same", activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(64, activation="tanh"),
            layers.Dense(10),
        ]
    )


def _train(
    model: keras.Model, images: np.ndarray, labels: np.ndarray, batch_size: int, epochs: int
) -> tuple[float, float, float]:
    """Trains a model on the images in the same order as every other model."""
    model.compile(
        optimizer=keras.optimizers.SGD(0.02, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    keras.utils.set_random_seed(_SEED)
    begin = time.perf_counter()
    model.fit(images, labels, batch_size=batch_size, epochs=epochs)
    seconds = time.perf_counter() - begin
    loss, accuracy = model.evaluate(images, labels, batch_size=batch_size, verbose=0)
    return seconds, loss, accuracy


def _check_file(parallel: keras.Model, images: np.ndarray) -> None:
    """Saves the weights of the parallel model and loads them into a plain one."""
    fresh = _build_model()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "digits.weights.h5"
        parallel.save_weights(path)
        fresh.load_weights(path)
        size = path.stat().st_size
    there = parallel.predict(images, verbose=0)
    here = fresh.predict(images, verbose=0)
    if not np.allclose(there, here, atol=1e-4):
        raise RuntimeError(f"The predictions differ by up to {np.abs(there - here).max()}.")
    print(
        f"\nSaved the weights from {number_of(len(parallel.devices), 'device')} ({size:,} bytes) "
        "and loaded them into the plain model: its predictions differ by "
        f"{np.abs(there - here).max():.1e}."
    )
