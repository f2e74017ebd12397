"""How well `deepconn` predicts ratings from texts, beside simple predictions.

    python -m benchmarks.deepconn_quality reviews_Musical_Instruments_5.json.gz
    python -m benchmarks.deepconn_quality                # made-up reviews

Mean squared errors in stars, of reviews held out. A review is never among the texts that predict
its rating, neither in training nor after it. A tenth of the reviews to train on chooses the rate
and the epoch of `deepconn` and the penalties of the other models.
Needs scikit-learn. Progress goes to stderr, the table to stdout.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import scipy.sparse
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import Ridge

from keras_multigpu import make_parallel, use_virtual_devices
from keras_multigpu.zoo import Reviews, deepconn, make_reviews, read_reviews

_PENALTIES = (1.0, 3.0, 10.0, 30.0)
_FACTORS = 8
_ROUNDS = 15
_RATES = (1e-3, 3e-4)
_PATIENCE = 10


class Parts:
    """The numbers of the reviews to fit, to choose by, and to test on."""

    def __init__(self, reviews: Reviews, share: float, seed: int):
        self.reviews = reviews
        self.train, self.test = reviews.split(share, seed)
        order = np.random.default_rng(seed).permutation(self.train)
        cut = len(order) // 10
        self.choice, self.fit = np.sort(order[:cut]), np.sort(order[cut:])

    def error(self, rows: np.ndarray, predicted: Any) -> float:
        """The mean squared error in stars."""
        ratings = self.reviews.ratings
        clipped = np.clip(np.ravel(predicted), ratings.min(), ratings.max())
        return float(np.mean((clipped - ratings[rows]) ** 2))

    def best(self, predict: Callable[[float, np.ndarray, np.ndarray], Any]) -> float:
        """The error of `predict(penalty, train, test)` with the penalty that is best elsewhere."""
        errors = [self.error(self.choice, predict(p, self.fit, self.choice)) for p in _PENALTIES]
        penalty = _PENALTIES[int(np.argmin(errors))]
        print(f"penalty {penalty}: {min(errors):.4f}", file=sys.stderr)
        return self.error(self.test, predict(penalty, self.train, self.test))


def factorize(reviews: Reviews, factors: int, penalty: float, train: Any, test: Any) -> np.ndarray:
    """Biases of users and items, and vectors with a penalty, by alternating least squares."""
    draw = np.random.default_rng(0)
    mean = reviews.ratings[train].mean()
    sides = [reviews.user_rows, reviews.item_rows]
    # A side's own vector, its bias, and a 1 for the bias of the other side.
    tables = [draw.normal(scale=0.1, size=(rows.max() + 1, factors + 2)) for rows in sides]
    for table, bias in zip(tables, (factors, factors + 1)):
        table[:, factors:] = 0
        table[:, 2 * factors + 1 - bias] = 1
    free = [np.append(np.arange(factors), factors), np.append(np.arange(factors), factors + 1)]
    for _ in range(_ROUNDS):
        for side, other in ((0, 1), (1, 0)):
            rows, facing = sides[side][train], tables[other][sides[other][train]]
            mine, fixed = free[side], 2 * factors + 1 - free[side][-1]
            goal = reviews.ratings[train] - mean - facing[:, fixed]
            for owner in np.unique(rows):
                at = rows == owner
                x = facing[at][:, mine]
                gram = x.T @ x + penalty * np.eye(len(mine))
                tables[side][owner, mine] = np.linalg.solve(gram, x.T @ goal[at])
            absent = np.setdiff1d(np.arange(len(tables[side])), rows)
            tables[side][absent[:, None], mine] = 0
    return mean + (tables[0][sides[0][test]] * tables[1][sides[1][test]]).sum(axis=1)


def regress(reviews: Reviews, length: int, penalty: float, train: Any, test: Any) -> np.ndarray:
    """Ridge regression on TF-IDF of both texts."""
    counts = [_count_words(reviews, rows, train, length) for rows in (train, test)]
    weights = [TfidfTransformer(sublinear_tf=True).fit(side) for side in counts[0]]
    x, other = (
        scipy.sparse.hstack([weight.transform(side) for weight, side in zip(weights, part)])
        for part in counts
    )
    return Ridge(penalty).fit(x, reviews.ratings[train]).predict(other)


def _count_words(reviews: Reviews, rows: Any, known: Any, length: int) -> list[Any]:
    """How often each word is in a user's and in an item's text."""
    pairs = reviews.pairs(rows, known, length=length, batch_size=500, shuffle=False)
    sides: dict[str, list[Any]] = {"user": [], "item": []}
    for number in range(len(pairs)):
        texts, _ = pairs[number]
        for side, words in texts.items():
            places = np.repeat(np.arange(len(words)), length), words.ravel()
            shape = len(words), len(reviews.vocabulary)
            table = scipy.sparse.csr_matrix((np.ones(words.size), places), shape=shape)
            sides[side].append(table[:, 1:])  # 0 is no word
    return [scipy.sparse.vstack(parts).tocsr() for parts in sides.values()]


def read_texts(parts: Parts, options: argparse.Namespace, devices: int) -> float:
    """Trains DeepCoNNs at several rates; the reviews to choose by choose the rate and the epoch."""
    reviews, size = parts.reviews, {"length": options.length, "batch_size": 100}
    found: list[tuple[float, Any]] = []
    for rate in _RATES:
        keras.utils.set_random_seed(0)
        parallel = make_parallel(build(parts, options, rate), n_gpus=devices)
        stop = keras.callbacks.EarlyStopping(patience=_PATIENCE, restore_best_weights=True)
        log = parallel.fit(
            reviews.pairs(parts.fit, **size),
            validation_data=reviews.pairs(parts.choice, parts.fit, **size),
            epochs=options.epochs,
            callbacks=[stop],
            verbose=0,
        )
        print(rate, [round(one, 4) for one in log.history["val_loss"]], file=sys.stderr)
        found.append((min(log.history["val_loss"]), parallel))
    best = min(found, key=lambda pair: pair[0])[1]
    predicted = best.predict(reviews.pairs(parts.test, parts.train, **size), verbose=0)
    return parts.error(parts.test, predicted)


def build(parts: Parts, options: argparse.Namespace, rate: float) -> keras.Model:
    """A DeepCoNN that begins near the mean rating."""
    model = deepconn(
        len(parts.reviews.vocabulary),
        options.length,
        embedding=options.embedding,
        filters=options.filters,
        optimizer=keras.optimizers.Adam(rate),
    )
    match = model.get_layer("match")
    match.bias.assign([parts.reviews.ratings[parts.fit].mean()])
    for weight in (match.kernel, match.pairs):
        weight.assign(0.1 * weight)
    return model


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", nargs="?", help="Amazon's reviews; by default made-up ones")
    parser.add_argument("--share", type=float, default=0.2, help="held out")
    parser.add_argument("--seed", type=int, default=0, help="of the split")
    parser.add_argument("--length", type=int, default=200, help="words of a text")
    parser.add_argument("--embedding", type=int, default=64)
    parser.add_argument("--filters", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=40, help="at most")
    parser.add_argument("--devices", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    if max(options.devices) > 1:
        use_virtual_devices(max(options.devices))
    with tempfile.TemporaryDirectory() as folder:
        path = options.file or make_reviews(os.path.join(folder, "reviews.json"))
        reviews = read_reviews(path, verbose=0)
    parts = Parts(reviews, options.share, options.seed)
    mean = np.full(len(parts.test), reviews.ratings[parts.train].mean())
    sides: dict[str, Callable[[], float]] = {
        "the mean": lambda: parts.error(parts.test, mean),
        "biases of users and items": lambda: parts.best(lambda *one: factorize(reviews, 0, *one)),
        f"matrix factorization, {_FACTORS} factors": lambda: parts.best(
            lambda *one: factorize(reviews, _FACTORS, *one)
        ),
        "TF-IDF, ridge": lambda: parts.best(lambda *one: regress(reviews, options.length, *one)),
    }
    for count in options.devices:
        name = f"`deepconn`, {count} device{'s' if count > 1 else ''}"
        sides[name] = lambda count=count: read_texts(parts, options, count)
    origin = "" if options.file else "Made-up reviews: "
    print(f"{origin}{reviews}; {len(parts.test):,} held out\n")
    print("| prediction | MSE (stars²) | s |\n|---|---|---|")
    for name, run in sides.items():
        start = time.perf_counter()
        print(f"| {name} | {run():.4f} | {time.perf_counter() - start:.0f} |", flush=True)


if __name__ == "__main__":
    main()
