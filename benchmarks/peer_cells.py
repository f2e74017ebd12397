"""The cells of the table of peers: one training case on one side, in this process. See `peers`.

    python -m benchmarks.peer_cells uneven mirrored

The last line on stdout is a JSON object with the cell's text and the versions. The reference is the
same model trained by plain Keras on one device, computed before in the same process, from the same
initial weights and with the same order of batches.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import scipy.sparse

from benchmarks.processes import describe

_DEVICES = 4
_ROWS, _FEATURES, _TARGETS, _BATCH = 70, 16, 4, 32
_EVEN_ROWS = 64
_ROUNDING = 1e-5


class Peer:
    """One way to train: its actions before and after a model is built.

    Attributes:
        wrap: prepares a model that was built within `scope` for this side.
        scope: entered to build and to compile a model.
    """

    def __init__(
        self,
        scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        wrap: Callable[[keras.Model], keras.Model] = lambda model: model,
    ):
        self.scope = scope
        self.wrap = wrap


def start_backend() -> None:
    """Four virtual devices. Must come before the first tensor."""
    if keras.backend.backend() == "jax":
        # With JAX's own setting alone, trainings hang because there are too few threads.
        importlib.import_module("keras_multigpu").use_virtual_devices(_DEVICES)
        return
    tf = importlib.import_module("tensorflow")
    parts = [tf.config.LogicalDeviceConfiguration() for _ in range(_DEVICES)]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)


def make_peer(side: str) -> Peer:
    """One of `"plain"`, `"mirrored"`, `"jax"`, `"ours"` and `"workers"` (several machines)."""
    if side == "plain":
        return Peer()
    if side == "ours":
        make_parallel = importlib.import_module("keras_multigpu").make_parallel
        return Peer(wrap=lambda model: make_parallel(model, n_gpus=_DEVICES))
    if side == "jax":
        distribution = keras.distribution.DataParallel(devices=keras.distribution.list_devices())
        return Peer(scope=distribution.scope)
    tf = importlib.import_module("tensorflow")
    if side == "workers":
        return Peer(scope=tf.distribute.MultiWorkerMirroredStrategy().scope)
    names = [f"/cpu:{index}" for index in range(_DEVICES)]
    return Peer(scope=tf.distribute.MirroredStrategy(names).scope)


def build(sparse: bool = False) -> keras.Model:
    """A small model without random layers, with the same initial weights every time."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((_FEATURES,), sparse=sparse),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dense(_TARGETS),
        ]
    )


def data(rows: int, sparse: bool = False) -> tuple[Any, np.ndarray]:
    """Inputs (a SciPy CSR matrix if `sparse`) and targets."""
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, _FEATURES)).astype("float32")
    y = random.normal(size=(rows, _TARGETS)).astype("float32")
    return (scipy.sparse.csr_matrix(x * (x > 0.5)) if sparse else x), y


def train(peer: Peer, x: Any, y: np.ndarray, model: keras.Model | None = None) -> keras.Model:
    """Two epochs of SGD, on the given model or on one built in the peer's scope."""
    with peer.scope():
        model = peer.wrap(model or build(sparse=scipy.sparse.issparse(x)))
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=_BATCH, epochs=2, shuffle=False, verbose=0)
    return model


def compare(value: float) -> str:
    """A difference in words."""
    verdict = "exact (max diff {:.0e})" if value <= _ROUNDING else "differs by {:.1e}"
    return verdict.format(value)


def _difference(first: keras.Model, second: keras.Model) -> float:
    pairs = zip(first.get_weights(), second.get_weights())
    return max(float(np.abs(one - other).max()) for one, other in pairs)


def uneven(peer: Peer) -> str:
    """Two epochs whose last batch is incomplete: 32, 32 and 6 rows."""
    x, y = data(_ROWS)
    return compare(_difference(train(Peer(), x, y), train(peer, x, y)))


def few_rows(peer: Peer) -> str:
    """Evaluation of fewer rows than devices, and of one more."""
    plain = build()
    plain.compile(loss="mse")
    with peer.scope():
        model = peer.wrap(build())
        model.compile(loss="mse")
    differences, errors = [], {}
    for rows in (1, 2, 3, 5):
        x, y = data(rows)
        try:
            with peer.scope():
                loss = model.evaluate(x, y, verbose=0)
            differences.append(abs(loss - plain.evaluate(x, y, verbose=0)))
        except Exception as error:
            errors.setdefault(type(error), describe(error))
    return "; ".join([*errors.values(), *([compare(max(differences))] if differences else [])])


def csr(peer: Peer) -> str:
    """A SciPy CSR matrix in `fit`, in whole batches."""
    x, y = data(_EVEN_ROWS, sparse=True)
    return compare(_difference(train(Peer(), x, y), train(peer, x, y)))


def built_before(peer: Peer) -> str:
    """A model that was built outside the scope, in whole batches."""
    x, y = data(_EVEN_ROWS)
    model = build()
    return compare(_difference(train(Peer(), x, y), train(peer, x, y, model)))


def several_machines(peer: Peer) -> str:
    """Two workers from `TF_CONFIG`, in whole batches."""
    x, y = data(_EVEN_ROWS)
    trained = train(peer, x, y)
    return compare(_difference(train(Peer(), x, y), trained))


CASES = {
    "uneven": uneven,
    "few_rows": few_rows,
    "csr": csr,
    "built_before": built_before,
    "several_machines": several_machines,
}


def main() -> None:
    case, side = sys.argv[1:]
    versions = {"keras": keras.__version__}
    for name in (keras.backend.backend(), *(["keras_multigpu"] if side == "ours" else [])):
        versions[name] = importlib.import_module(name).__version__
    try:
        if side != "workers":
            start_backend()
        text = CASES[case](make_peer(side))
    except Exception as error:
        text = describe(error)
    print(json.dumps({"text": text, "versions": versions}))


if __name__ == "__main__":
    main()
