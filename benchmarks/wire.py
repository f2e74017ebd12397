"""The effect of sending weights and gradients in half precision: on a training, and on bytes.

    python -m benchmarks.wire --seeds 5

The data are scikit-learn's digits, half of the rows for testing; two hidden layers of 64, 50 epochs
of Adam in batches of 32. A seed sets the split, the initial weights and the order of the rows, the
same for all sides. Nothing is timed: accuracy and bytes hold for GPUs too.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_multigpu
from benchmarks.processes import host, make_parser, markdown_table, progress

_DEVICES = 4
_EPOCHS = 50
SIDES = {"one device": None, "own type": None, "bfloat16": "bfloat16", "float16": "float16"}


def train(seed: int, side: str) -> dict[str, float]:
    """The scores of one training, and the kB of weights and gradients that a step sends."""
    x, y = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(x / 16, y, test_size=0.5, random_state=seed, stratify=y)
    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(64, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])
    if side != "one device":
        model = keras_multigpu.make_parallel(model, _DEVICES, wire_dtype=SIDES[side])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    order = np.random.default_rng(seed).permutation(len(x))
    history = model.fit(x[order], y[order], 32, _EPOCHS, shuffle=False, verbose=0).history
    nll, accuracy = model.evaluate(x_test, y_test, verbose=0)
    sent = 0
    if side != "one device":
        crossed = keras_multigpu.reports.transfers(model, (x[:32], y[:32])).bytes("training")
        sent = crossed["weights"] + crossed["gradients"]
    return {"accuracy": accuracy, "nll": nll, "train": history["loss"][-1], "kb": sent / 1e3}


def table(results: dict[str, Sequence[dict[str, float]]]) -> str:
    """A row for each side, with the mean and the standard deviation over the seeds."""

    def show(found: Sequence[dict[str, float]], key: str) -> str:
        values = [one[key] for one in found]
        spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
        return f"{statistics.mean(values):.4f}{spread}"

    header = ["crosses as", "test accuracy", "test loss", "training loss", "kB a step"]
    rows = [
        [side, *(show(found, key) for key in ("accuracy", "nll", "train")), f"{found[0]['kb']:.0f}"]
        for side, found in results.items()
    ]
    return markdown_table(header, rows)


def main() -> None:
    parser = make_parser("wire", __doc__)
    parser.add_argument("--seeds", type=int, default=5, help="from 0 on (default: 5)")
    options = parser.parse_args()
    if keras.backend.backend() != "tensorflow":
        parser.error("`wire_dtype` needs TensorFlow: set KERAS_BACKEND=tensorflow")
    keras_multigpu.use_virtual_devices(_DEVICES)
    results: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for seed in range(options.seeds):
        for side, found in results.items():
            found.append(train(seed, side))
            progress(f"seed {seed}, {side}: accuracy {found[-1]['accuracy']:.4f}")
    versions = f"keras {keras.__version__} on {keras.backend.backend()}"
    print(f"- {host()}\n- {versions}, {_DEVICES} devices, {options.seeds} seeds\n")
    print(table(results))


if __name__ == "__main__":
    main()
