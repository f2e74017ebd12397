"""Trains one model on the GPUs of several hosts; every host runs this script.

KERAS_BACKEND=jax python jax_train.py COORDINATOR NUM_PROCESSES PROCESS_ID FOLDER

FOLDER is one that all hosts share. Started again after a fault, it goes on where it was.
"""

import pathlib
import sys

import keras
import numpy as np

from keras_multigpu import make_parallel
from keras_multigpu.cluster import join


def main(coordinator: str, num_processes: str, process_id: str, folder: str) -> None:
    """Joins the other processes, and trains."""
    keras.utils.set_random_seed(7)  # the same weights and the same order of rows in all processes
    join(coordinator, int(num_processes), int(process_id), timeout=30)

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
