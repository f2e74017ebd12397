"""Trains a single model and committees on two data sets, for one seed: see `committee`.

    python -m benchmarks.committee_worker '{"seed": 0}'

The last line on stdout is a JSON object: for each data set the scores of every side (`scores`),
the seconds that it took (`seconds`), and the versions.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import scipy.stats
from keras import layers
from sklearn import metrics
from sklearn.datasets import load_diabetes, load_digits
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import keras_multigpu
from benchmarks.processes import answer
from keras_multigpu.layers import GaussianMix, GaussianNLL, mean_mix

_MEMBERS = 4
_BINS = 15


@dataclasses.dataclass(frozen=True)
class Split:
    """A data set, split and scaled.

    Attributes:
        x: training inputs, of shape `(rows, columns)`.
        y: training targets.
        x_test: test inputs.
        y_test: test targets.
        unit: what 1 in the targets is in the data set's own unit.
    """

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    unit: float = 1.0


@dataclasses.dataclass(frozen=True)
class Task:
    """A data set, and the common model and training of all sides.

    Attributes:
        split: gives the data of a seed.
        build: makes a model.
        mix: makes the layer that mixes the models' outputs into a prediction.
        loss: the loss of a prediction.
        score: rates predictions by the targets; the split gives their unit.
        epochs: the numbers of epochs, in batches of 32 rows, after which to score.
    """

    split: Callable[[int], Split]
    build: Callable[[], keras.Model]
    mix: Callable[[], keras.Layer]
    loss: keras.losses.Loss
    score: Callable[[Split, np.ndarray, np.ndarray], dict[str, float]]
    epochs: tuple[int, ...]


def _split_digits(seed: int) -> Split:
    x, y = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(x / 16, y, test_size=0.5, random_state=seed, stratify=y)
    return Split(x, y, x_test, y_test)


def _split_diabetes(seed: int) -> Split:
    x, y = load_diabetes(return_X_y=True, scaled=False)
    x, x_test, y, y_test = train_test_split(x, y[:, None], test_size=0.25, random_state=seed)
    inputs, targets = StandardScaler().fit(x), StandardScaler().fit(y)
    x, x_test = inputs.transform(x), inputs.transform(x_test)
    return Split(x, targets.transform(y), x_test, targets.transform(y_test), targets.scale_.item())


def _classifier() -> keras.Model:
    hidden = [layers.Dense(64, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10, activation="softmax")])


def _regressor() -> keras.Model:
    return keras.Sequential(
        [keras.Input((10,)), layers.Dense(50, activation="relu"), layers.Dense(2)]
    )


def _score_classes(split: Split, y: np.ndarray, probabilities: np.ndarray) -> dict[str, float]:
    probabilities = probabilities.astype("float64")
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    right = probabilities.argmax(axis=1) == y
    return {
        "accuracy": right.mean().item(),
        "NLL": metrics.log_loss(y, probabilities),
        "ECE": calibration_error(probabilities.max(axis=1), right),
    }


def calibration_error(confidence: np.ndarray, right: np.ndarray, bins: int = _BINS) -> float:
    """The expected calibration error: the distance between confidence and accuracy.

    Rows go into bins of equal width by their confidence; the result is the mean over the bins,
    weighted by rows, of `|accuracy - mean confidence|` (Guo, Pleiss, Sun and Weinberger, "On
    calibration of modern neural networks", 2017, equation 3).

    Args:
        confidence: the probability of the predicted class, of shape `(rows,)`.
        right: whether that is the true class, of shape `(rows,)`.
        bins: their number between 0 and 1.
    """
    numbers = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = np.bincount(numbers, weights=right - confidence, minlength=bins)
    return np.abs(gaps).sum().item() / len(confidence)


def _score_gaussians(split: Split, y: np.ndarray, gaussians: np.ndarray) -> dict[str, float]:
    y, mean = split.unit * y[:, 0], split.unit * gaussians[:, 0]
    deviation = split.unit * np.sqrt(gaussians[:, 1])
    return {
        "RMSE": metrics.root_mean_squared_error(y, mean),
        "NLL": -scipy.stats.norm.logpdf(y, mean, deviation).mean().item(),
    }


# The first number of epochs is the best for the single model, found on other seeds.
TASKS = {
    "digits": Task(
        _split_digits,
        _classifier,
        mean_mix,
        keras.losses.SparseCategoricalCrossentropy(),
        _score_classes,
        epochs=(50,),
    ),
    "diabetes": Task(
        _split_diabetes, _regressor, GaussianMix, GaussianNLL(), _score_gaussians, epochs=(20, 80)
    ),
}


def compare(task: Task, seed: int) -> dict[int, dict[str, dict[str, float]]]:
    """The scores after each number of epochs.

    For a single model, for two committees, and for their members alone, on average.
    """
    split = task.split(seed)
    scores: dict[int, dict[str, dict[str, float]]] = {epochs: {} for epochs in task.epochs}
    x = np.concatenate([split.x_test, split.x])
    for epochs, single in _train(task, split, seed, _complete):
        scores[epochs]["single"] = _rate(task, split, single.predict(x, verbose=0))
    for loss_of in ("mix", "replicas"):
        join = functools.partial(_committee, loss_of=loss_of)
        for epochs, committee in _train(task, split, seed, join):
            scores[epochs][loss_of] = _rate(task, split, committee.predict(x, verbose=0))
            outputs = committee.predict_replicas(x, verbose=0)
            alone = [_rate(task, split, np.asarray(task.mix()([output]))) for output in outputs]
            scores[epochs][f"{loss_of}, alone"] = {
                name: statistics.mean(one[name] for one in alone) for name in alone[0]
            }
    return scores


def _rate(task: Task, split: Split, prediction: np.ndarray) -> dict[str, float]:
    """The scores on the test rows, and the NLL on the training rows."""
    rows = len(split.y_test)
    fitted = task.score(split, split.y, prediction[rows:])
    return task.score(split, split.y_test, prediction[:rows]) | {"training NLL": fitted["NLL"]}


def _complete(task: Task, model: keras.Model) -> keras.Model:
    """A plain Keras model whose output is a prediction, like a committee of one."""
    return keras.Model(model.inputs, task.mix()(model.outputs))


def _committee(task: Task, model: keras.Model, loss_of: str) -> Any:
    return keras_multigpu.make_parallel(
        model, _MEMBERS, mode="tower", replicas="independent", mix=task.mix(), loss_of=loss_of
    )


def _train(
    task: Task, split: Split, seed: int, prepare: Callable[[Task, keras.Model], Any]
) -> Iterator[tuple[int, Any]]:
    """Trains the model that `prepare` returns, and yields it after each number of epochs.

    The seed sets the weights and the order of the rows.
    """
    keras.utils.set_random_seed(seed)
    model = prepare(task, task.build())
    model.compile("adam", task.loss)
    for start, stop in itertools.pairwise((0, *task.epochs)):
        model.fit(split.x, split.y, initial_epoch=start, epochs=stop, verbose=0)
        yield stop, model


def score(seed: int) -> dict[str, Any]:
    """The scores of all tasks, and the seconds."""
    keras_multigpu.use_virtual_devices(_MEMBERS)
    start = time.perf_counter()
    scores = {
        f"{name}, {epochs} epochs": found
        for name, task in TASKS.items()
        for epochs, found in compare(task, seed).items()
    }
    return {"scores": scores, "seconds": time.perf_counter() - start}


def main() -> None:
    answer(score, ("keras", "tensorflow", "sklearn", "keras_multigpu"))


if __name__ == "__main__":
    main()
