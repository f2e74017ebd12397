"""One host's process in `hosts`: trains a model with the others, and times its steps.

The last line on stdout is a JSON object: the seconds of every step (`all_steps_s`), the bytes that
this host's interface has sent and received in a step, the bytes of the weights, and the versions.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import pathlib
import time
from typing import Any

import numpy as np

from benchmarks.processes import answer

CLASSES = 10
_WARM_UP = 3
_TIMEOUT_S = 120.0
_PACK = 4 * 2**20
_SHAPES = {"mlp": (1024,), "convnet": (32, 32, 3)}


def build(library: Any, model: str, **normalization: Any) -> Any:
    """The same model by Keras 3 or by Keras 2.

    Args:
        library: the module `keras` or `tf_keras`.
        model: `"mlp"`, of 17 MB, or `"convnet"`, with `BatchNormalization`.
        **normalization: arguments of `BatchNormalization`.
    """
    layers, parts = library.layers, []
    if model == "mlp":
        parts = [layers.Dense(1024, activation="relu") for _ in range(4)]
    else:
        for filters in (32, 64, 128):
            parts += [
                layers.Conv2D(filters, 3, padding="same", use_bias=False),
                layers.BatchNormalization(**normalization),
                layers.ReLU(),
                layers.MaxPooling2D(),
            ]
        parts.append(layers.GlobalAveragePooling2D())
    return library.Sequential([library.Input(_SHAPES[model]), *parts, layers.Dense(CLASSES)])


def compile_model(library: Any, model: Any) -> None:
    """Compiles a model for training with SGD."""
    loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(library.optimizers.SGD(0.01), loss, jit_compile=False)


def make_batch(model: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of a whole batch, equal in all processes."""
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, *_SHAPES[model])).astype("float32")
    return x, random.integers(CLASSES, size=rows, dtype="int32")


def make_clock(library: Any, crossed: list[tuple[int, int]], ends: list[float]) -> Any:
    """A callback that notes when each batch ends, and what has crossed by then."""

    class Clock(library.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch, logs=None):
            for value in (logs or {}).values():
                np.asarray(value)
            ends.append(time.perf_counter())
            crossed.append(crossed_bytes())

    return Clock()


def crossed_bytes() -> tuple[int, int]:
    """The bytes that this host's interface has sent and received."""
    counts = pathlib.Path("/sys/class/net/eth0/statistics")
    sent, received = (int((counts / f"{way}_bytes").read_text()) for way in ("tx", "rx"))
    return sent, received


def measure(
    side: str,
    model: str,
    is_synchronized: bool,
    rows: int,
    steps: int,
    number: int,
    addresses: list[str],
) -> dict[str, Any]:
    """Times the steps of one side.

    Args:
        side: `"join"`, `"connect"`, `"mwms"`, or `"mwms_packs"`, with gradients in packs of 4 MiB.
        model: as in `build`.
        is_synchronized: whether the peer's `BatchNormalization` sees the whole batch.
        rows: of the whole batch.
        steps: how many to time, after the first one and the warm-up.
        number: this host's.
        addresses: of all hosts, with ports.
    """
    import tensorflow as tf

    is_keras_2 = side.startswith("mwms")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    library = importlib.import_module("tf_keras" if is_keras_2 else "keras")
    count = 1 + _WARM_UP + steps
    x, y = make_batch(model, rows)
    if is_keras_2:
        strategy = _strategy(number, addresses, _PACK if side == "mwms_packs" else 0)
        library.utils.set_random_seed(0)
        with strategy.scope():
            trained = build(library, model, synchronized=is_synchronized)
            compile_model(library, trained)
        # The rows of its worker only: no strategy has to cut them from a larger batch.
        own = slice(number * rows // len(addresses), (number + 1) * rows // len(addresses))
        one = tf.data.Dataset.from_tensors((x[own], y[own])).repeat(count)
        data: Any = strategy.distribute_datasets_from_function(lambda _: one)
    else:
        trained = _ours(side, model, number, addresses)
        compile_model(library, trained)
        data = tf.data.Dataset.from_tensors((x, y)).repeat(count)
    crossed: list[tuple[int, int]] = []
    ends: list[float] = []
    trained.fit(
        data, steps_per_epoch=count, verbose=0, callbacks=[make_clock(library, crossed, ends)]
    )
    first, last = crossed[_WARM_UP], crossed[-1]
    return {
        "all_steps_s": [end - begin for begin, end in itertools.pairwise(ends[_WARM_UP:])],
        "sent": (last[0] - first[0]) / steps,
        "received": (last[1] - first[1]) / steps,
        "weights": sum(4 * int(np.prod(one.shape)) for one in trained.trainable_weights),
    }


def _strategy(number: int, addresses: list[str], pack: int) -> Any:
    """TensorFlow's strategy; `pack` is the most bytes of gradients in a message, 0 for no limit."""
    import tensorflow as tf

    task = {"type": "worker", "index": number}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=pack)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def _ours(side: str, model: str, number: int, addresses: list[str]) -> Any:
    import keras

    from keras_multigpu import cluster, make_parallel

    devices = None
    if side == "join":
        cluster.join(addresses[0], len(addresses), number, timeout=_TIMEOUT_S)
    else:
        remote = cluster.connect(addresses[1:], timeout=_TIMEOUT_S, local=addresses[0])
        devices = ["cpu:0", *remote]
    keras.utils.set_random_seed(0)
    built = build(keras, model)
    return make_parallel(built, devices=devices)


if __name__ == "__main__":
    answer(measure, ("keras", "tensorflow", "tf_keras", "keras_multigpu"))
