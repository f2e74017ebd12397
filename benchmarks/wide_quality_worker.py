"""Trains wide models, or a peer, on one table, in this process: see `wide_quality`.

    python -m benchmarks.wide_quality_worker '{"data": "clicks", "side": "wide", "models": [{}]}'

The last line on stdout is a JSON object: for each model the AUC and the log-loss of other rows, the
width of the row, the bytes of weights and optimizer, and the rows of an epoch per second of
processor time: other programs may run on the machine.
"""

from __future__ import annotations

import pathlib
import tempfile
import time
from typing import Any

import numpy as np
from sklearn.metrics import log_loss, roc_auc_score

from benchmarks import wide_tables
from benchmarks.processes import answer
from benchmarks.wide_tables import Data

BATCH, EPOCHS = 1024, 3


def judge(data: Data, scores: np.ndarray) -> dict[str, Any]:
    """The AUC and the log-loss of predicted logits."""
    chances = 1 / (1 + np.exp(-np.asarray(scores, "float64")))
    return {
        "auc": float(roc_auc_score(data.other_labels, chances)),
        "log_loss": float(log_loss(data.other_labels, np.clip(chances, 1e-7, 1 - 1e-7))),
    }


def wide(data: Data, devices: int, published: bool, encoder: dict[str, Any]) -> dict[str, Any]:
    """A wide model with its defaults, or with the published loss and optimizer."""
    import keras

    from keras_multigpu import make_parallel, zoo
    from keras_multigpu.sparse import HashEncoder

    keras.utils.set_random_seed(0)
    options = {"loss": "mse", "optimizer": "ftrl"} if published else {}
    model = zoo.wide(HashEncoder(data.cardinalities, **encoder), **options)
    model = make_parallel(model, devices) if devices > 1 else model
    indices = model.encoder.transform(data.table)
    ends = [time.process_time()]
    clock = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: ends.append(time.process_time()))
    model.fit(
        indices, data.labels[:, None], batch_size=BATCH, epochs=EPOCHS, callbacks=[clock], verbose=0
    )
    scores = model.predict_table(data.other, batch_size=8192, verbose=0)[:, 0]
    if published:
        scores = np.log(np.clip(scores, 1e-3, 1 - 1e-3) / (1 - np.clip(scores, 1e-3, 1 - 1e-3)))
    state = [*model.weights, *model.optimizer.variables]
    return {
        **judge(data, scores),
        "width": model.encoder.width,
        "bytes": sum(np.asarray(one).nbytes for one in state),
        "rate": len(indices) / min(np.diff(ends)[1:]),
    }


def feature_hasher(data: Data) -> dict[str, Any]:
    """scikit-learn's logistic regression on `FeatureHasher`, with their defaults."""
    from sklearn.feature_extraction import FeatureHasher
    from sklearn.linear_model import LogisticRegression

    hasher = FeatureHasher(input_type="string")
    names = list(data.table)

    def transform(table: Any) -> Any:
        rows = table.itertuples(index=False, name=None)
        return hasher.transform([f"{n}={value}" for n, value in zip(names, row)] for row in rows)

    model = LogisticRegression(max_iter=500).fit(transform(data.table), data.labels)
    scores = model.decision_function(transform(data.other))
    return {**judge(data, scores), "width": hasher.n_features}


def vowpal_wabbit(data: Data, bits: int = 18) -> dict[str, Any]:
    """One pass of Vowpal Wabbit with its logistic loss."""
    import vowpalwabbit

    def write(path: pathlib.Path, table: Any, labels: np.ndarray) -> None:
        names = list(table)
        with path.open("w") as file:
            for label, row in zip(labels, table.itertuples(index=False, name=None)):
                values = (value.replace(" ", "_").replace(":", "_") for value in row)
                named = " ".join(f"{name}={value}" for name, value in zip(names, values))
                file.write(f"{1 if label else -1} | {named}\n")

    with tempfile.TemporaryDirectory() as folder:
        train, other, model, found = (
            pathlib.Path(folder) / one for one in ("train", "other", "model", "found")
        )
        write(train, data.table, data.labels)
        write(other, data.other, data.other_labels)
        options = f"-d {train} --loss_function logistic -b {bits} -f {model} --quiet"
        vowpalwabbit.Workspace(options).finish()
        vowpalwabbit.Workspace(f"-d {other} -t -i {model} -p {found} --quiet").finish()
        return {**judge(data, np.loadtxt(found)), "width": 2**bits}


def measure(
    data: str, side: str, models: Any = (), devices: int = 1, published: bool = False
) -> dict[str, Any]:
    """The figures of one side, in the order of its models."""
    if devices > 1:
        import keras_multigpu

        keras_multigpu.use_virtual_devices(devices)
    table = wide_tables.read(data)
    if side == "wide":
        found = [wide(table, devices, published, one) for one in models]
    else:
        found = [{"feature_hasher": feature_hasher, "vw": vowpal_wabbit}[side](table)]
    return {"models": found}


def main() -> None:
    answer(measure, ("keras", "jax", "sklearn", "tensorflow", "vowpalwabbit"))


if __name__ == "__main__":
    main()
