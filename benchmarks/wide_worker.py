"""Times the training of a wide model from one kind of input, in this process: see `wide`.

    python -m benchmarks.wide_worker '{"side": "indices", "model": "hidden"}'

The last line on stdout is a JSON object: examples per second of every timed epoch, the losses of
all epochs, the peak of the process's memory in MiB, and the versions.
"""

from __future__ import annotations

import pathlib
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.processes import answer, peak_mib

COLUMNS = 20
CARDINALITY = 100_000
BATCH = 4096
_EPOCHS = 3


def make_rows(rows: int) -> tuple[Any, np.ndarray]:
    """Values drawn from Zipf's law, of shape `(rows, COLUMNS)`, and labels 0 and 1."""
    rng = np.random.default_rng(0)
    chances = 1 / np.arange(1, CARDINALITY + 1)
    bounds = np.cumsum(chances / chances.sum())
    ranks = np.searchsorted(bounds, rng.random((rows, COLUMNS)))
    ranks = np.minimum(ranks, CARDINALITY - 1)
    score = np.sin(ranks * np.arange(1, COLUMNS + 1)).sum(axis=1) / 2
    return ranks, (score + rng.normal(size=rows) > 0).astype("float32")[:, None]


def train(side: str, model: str, rows: int, devices: int = 1) -> dict[str, Any]:
    """Times `fit`.

    Args:
        side: `"dense"`, rows made dense batch by batch; `"csr"`, a SciPy CSR matrix; `"indices"`,
            ours; `"sparse"`, ours with sparse gradients.
        model: `"hidden"`, 32 units and Adam; or `"linear"`, Ftrl.
        rows: the number of examples in an epoch.
        devices: the number of virtual devices.
    """
    import keras

    import keras_multigpu
    from keras_multigpu.layers import MultiHotDense
    from keras_multigpu.sparse import HashEncoder
    from keras_multigpu.sparse.encoder import to_multi_hot

    keras_multigpu.use_virtual_devices(devices)
    keras.utils.set_random_seed(0)
    names = [f"column_{number}" for number in range(COLUMNS)]
    encoder = HashEncoder(dict.fromkeys(names, CARDINALITY), layout="published")
    ranks, labels = make_rows(rows)
    indices = encoder.transform({name: ranks[:, place] for place, name in enumerate(names)})
    units = 32 if model == "hidden" else 1

    class DenseBatches(keras.utils.PyDataset):
        """Batches whose dense rows are made on request."""

        def __len__(self) -> int:
            return rows // BATCH

        def __getitem__(self, number: int) -> Any:
            part = slice(number * BATCH, (number + 1) * BATCH)
            return to_multi_hot(indices[part], encoder.width, "dense"), labels[part]

    first: Any
    if side == "dense":
        x, first = keras.Input((encoder.width,)), keras.layers.Dense(units)
        data: dict[str, Any] = {"x": DenseBatches()}
    elif side == "csr":
        x, first = keras.Input((encoder.width,), sparse=True), keras.layers.Dense(units)
        data = {"x": to_multi_hot(indices, encoder.width, "csr"), "y": labels, "batch_size": BATCH}
    else:
        x = keras.Input((encoder.ones,), dtype="int32")
        first = MultiHotDense(units, encoder.width, sparse_gradient=side == "sparse")
        data = {"x": indices, "y": labels, "batch_size": BATCH}
    out = first(x)
    trained = keras.Model(x, keras.layers.Dense(1)(out) if model == "hidden" else out)
    if devices > 1:
        trained = keras_multigpu.make_parallel(trained, devices)
    optimizer: Any = keras.optimizers.Adam() if model == "hidden" else keras.optimizers.Ftrl(0.2)
    # The fastest setting for each side on processors: XLA for indices.
    trained.compile(optimizer, "mse", jit_compile=True if side == "indices" else "auto")
    losses, rates = [], []
    for epoch in range(_EPOCHS + 1):
        begin = time.perf_counter()
        losses += trained.fit(**data, shuffle=False, verbose=0).history["loss"]
        if epoch:
            rates.append(rows / (time.perf_counter() - begin))
    return {"rates": rates, "losses": losses}


def vowpal_wabbit(rows: int) -> dict[str, Any]:
    """Times one pass of Vowpal Wabbit's driver over its text format: linear, Ftrl."""
    import vowpalwabbit

    ranks, labels = make_rows(rows)
    rates = []
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "train.txt"
        with path.open("w") as file:
            for row, label in zip(ranks.tolist(), labels[:, 0].tolist()):
                named = " ".join(f"{place}_{rank}" for place, rank in enumerate(row))
                file.write(f"{label:g} | {named}\n")
        for _ in range(_EPOCHS):
            begin = time.perf_counter()
            learner = vowpalwabbit.Workspace(f"-d {path} --ftrl -b 18 --quiet")
            learner.finish()
            rates.append(rows / (time.perf_counter() - begin))
    return {"rates": rates, "losses": []}


def measure(side: str, **request: Any) -> dict[str, Any]:
    """The figures of one side, and the process's peak memory."""
    is_peer = side == "vw"
    result = vowpal_wabbit(request["rows"]) if is_peer else train(side, **request)
    result["peak_mib"] = peak_mib()
    return result


def main() -> None:
    answer(measure, ("keras", "jax", "scipy", "tensorflow", "vowpalwabbit"))


if __name__ == "__main__":
    main()
