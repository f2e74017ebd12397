"""How well `autorec` predicts ratings that it has not seen, beside simple predictions.

    python -m benchmarks.autorec                  # MovieLens 100K of the package `recbole`
    python -m benchmarks.autorec ml-1m/ratings.dat --share 0.1 --only item
    python -m benchmarks.autorec u.data --only item --devices 1 4

By five-fold cross-validation, or on a share held out. Every model is trained for a fixed number of
epochs, and nothing is chosen fold by fold. But `autorec`'s defaults were chosen on MovieLens 100K.
Progress goes to stderr, the table to stdout.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import keras
import numpy as np

from benchmarks.movielens import find_ratings
from keras_multigpu import make_parallel, use_virtual_devices
from keras_multigpu.zoo import (
    Ratings,
    RatingScore,
    autorec,
    evaluate_ratings,
    historic_autorec,
    read_ratings,
)

_NAMES = {
    "user-mean": "each user's mean",
    "item-mean": "each item's mean",
    "popular": "the most rated items",
    "biases": "biases of users and items",
    "historic": "`historic_autorec`",
    "user": '`autorec(by="user")`',
    "item": "`autorec`, the default",
}
_HISTORIC_BATCH = 250


class RowMeans:
    """Predicts the mean of a row, like a model."""

    def predict_on_batch(self, rows: np.ndarray) -> np.ndarray:
        means = rows.sum(axis=1) / np.maximum((rows > 0).sum(axis=1), 1)
        return np.repeat(means[:, None], rows.shape[1], axis=1)


class Popularity:
    """Ranks items by how many users rated them, like a model of users' rows."""

    def __init__(self, train: Ratings):
        counts = train.matrix.getnnz(axis=0)
        self._scores = counts / counts.max()

    def predict_on_batch(self, rows: np.ndarray) -> np.ndarray:
        return np.repeat(self._scores[None], len(rows), axis=0)


def build(side: str, train: Ratings, devices: int, epochs: int) -> tuple[Any, str]:
    """A trained model, and what its rows are."""
    keras.utils.set_random_seed(0)
    if side == "popular":
        return Popularity(train), "user"
    if side.endswith("-mean"):
        return RowMeans(), side.removesuffix("-mean")
    by = side if side in ("user", "item") else "user"
    if side == "historic":
        model = historic_autorec(len(train.items))
        batches = train.batches(_HISTORIC_BATCH, by=by, hide=0)
    else:
        model, batches = autorec(train, by=by), train.batches(by=by)
    if side == "biases":
        last = [layer for layer in model.layers if isinstance(layer, keras.layers.Dense)][-1]
        last.set_weights([0 * weight for weight in last.get_weights()])
        return model, by
    parallel = make_parallel(model, n_gpus=devices)
    parallel.fit(batches, epochs=epochs, verbose=0)
    return parallel, by


def measure(
    side: str, pairs: list[tuple[Ratings, Ratings]], devices: int, epochs: int
) -> tuple[list[RatingScore], float]:
    """The scores of all folds, and the seconds that a fold took."""
    scores, start = [], time.perf_counter()
    for train, test in pairs:
        model, by = build(side, train, devices, epochs)
        scores.append(evaluate_ratings(model, train, test, by=by))
        print(f"{side}, {devices} device(s): {scores[-1]}", file=sys.stderr, flush=True)
        keras.backend.clear_session()
    return scores, (time.perf_counter() - start) / len(pairs)


def line(name: str, devices: int, scores: list[RatingScore], seconds: float) -> str:
    """A row of the table."""
    rmse, mae, recall, ndcg = (
        statistics.mean(getattr(score, field) for score in scores)
        for field in ("rmse", "mae", "recall", "ndcg")
    )
    spread = max(score.rmse for score in scores) - min(score.rmse for score in scores)
    errors = "- | - | -" if name == _NAMES["popular"] else f"{rmse:.4f} | {spread:.4f} | {mae:.4f}"
    return f"| {name} | {devices} | {errors} | {recall:.3f} | {ndcg:.3f} | {seconds:.0f} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", nargs="?", help="ratings; by default MovieLens 100K of `recbole`")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--share", type=float, help="hold out this share instead of folds")
    parser.add_argument("--seed", type=int, default=0, help="of the split")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=_NAMES, default=list(_NAMES))
    parser.add_argument("--devices", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    if max(options.devices) > 1:
        use_virtual_devices(max(options.devices))
    ratings = read_ratings(find_ratings(options.file), verbose=0)
    if options.share:
        pairs = [ratings.split(options.share, options.seed)]
    else:
        pairs = ratings.split(folds=options.folds, seed=options.seed)
    print(f"{ratings}; {sum(len(pair[1].matrix.data) for pair in pairs):,} of them predicted\n")
    print("| prediction | devices | RMSE | max - min | MAE | recall@10 | NDCG@10 | s a fold |")
    print("|---|---|---|---|---|---|---|---|")
    for side in options.only:
        for devices in options.devices:
            scores, seconds = measure(side, pairs, devices, options.epochs)
            print(line(_NAMES[side], devices, scores, seconds), flush=True)


if __name__ == "__main__":
    main()
