"""Trains one model on the GPUs of several hosts; every host runs this script.

python join_train.py FOLDER [COORDINATOR NUM_PROCESSES PROCESS_ID]

On TensorFlow, or on JAX with KERAS_BACKEND=jax. FOLDER is one that all hosts share. Under Slurm, or
with TF_CONFIG, the rest is in the environment. Started again after a fault, it goes on where it
was.
"""

import pathlib
import sys

from keras_multigpu import make_parallel  # first: tells if a backend is missing
from keras_multigpu.cluster import join
import keras
import numpy as np


def main(folder: str, coordinator: str | None = None, *numbers: str) -> None:
    """Joins the other processes, and trains."""
    keras.utils.set_random_seed(7)  # the same weights and the same order of rows in all processes
    join(coordinator, *map(int, numbers), timeout=30)

    # All processes read the same data, and each takes its rows of every batch.
    rng = np.random.default_rng(7)
    x = rng.normal(size=(1000, 20)).astype("float32")
    y = (x.sum(axis=1) > 0).astype("int32")

    model = keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(2)]
    )
    parallel = make_parallel(model)  # on all devices of all processes
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    parallel.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    backup = keras.callbacks.BackupAndRestore(pathlib.Path(folder) / "backup")
    parallel.fit(x, y, batch_size=64, epochs=5, callbacks=[backup], verbose=2)
    parallel.save_weights(pathlib.Path(folder) / "trained.weights.h5")  # process 0 writes it


if __name__ == "__main__":
    main(*sys.argv[1:])
