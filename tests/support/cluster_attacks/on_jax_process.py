"""A process that joins another one, trains, and says what it comes to."""

import argparse
import pathlib
import signal
import sys
import time

import keras
import numpy as np

from keras_multigpu import cluster, make_parallel

parser = argparse.ArgumentParser()
parser.add_argument("address")
parser.add_argument("number", type=int)
parser.add_argument("folder", type=pathlib.Path)
parser.add_argument("--seconds", type=float, default=1e9, help="how long to train")
parser.add_argument("--gigabytes", type=float, default=0.0, help="of weights")
parser.add_argument("--again", action="store_true", help="train again after an error")
parser.add_argument("--wait-for", type=pathlib.Path, help="join when this file is there")
chosen = parser.parse_args()


class Journal(keras.callbacks.Callback):
    """Says which batch is done; all processes stop after the same number of batches."""

    def __init__(self, steps):
        super().__init__()
        self.batches, self.steps = 0, steps

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches < 100:
            print(f"batch {self.batches}", flush=True)
        if self.batches >= self.steps:
            self.model.stop_training = True


def train(parallel, steps):
    """Trains; says how it ends."""
    width = parallel.input_shape[1]
    x = np.random.default_rng(7).normal(size=(64, width)).astype("float32")
    callbacks = [Journal(steps)]
    if not chosen.gigabytes:
        file = chosen.folder / "each.weights.h5"
        callbacks.append(keras.callbacks.ModelCheckpoint(file, save_weights_only=True))
    options = {"batch_size": 8, "epochs": 10**6, "verbose": 0, "callbacks": callbacks}
    try:
        parallel.fit(x, x[:, :2], **options)
        return "training ended"
    except (cluster.ClusterError, KeyboardInterrupt) as error:
        return f"{type(error).__name__} {getattr(error, 'problem', '')}".strip()


if chosen.wait_for:
    print("ready", flush=True)
    while not chosen.wait_for.exists():
        time.sleep(0.02)
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
try:
    cluster.join(chosen.address, 2, chosen.number, timeout=8.0)
except (cluster.ClusterError, ValueError) as error:
    told = getattr(error, "problem", str(error).partition(". Received")[0])
    print(f"ends with {type(error).__name__} {told}", flush=True)
    sys.exit(1)
keras.utils.set_random_seed(7)
units = int(chosen.gigabytes * 2**28) // 64 or 8
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(units), keras.layers.Dense(2)])
parallel = make_parallel(model)
parallel.compile("sgd", "mse")
STEPS = 3 if chosen.gigabytes else int(min(chosen.seconds * 100, 10**9))
print(f"ends with {train(parallel, STEPS)}", flush=True)
if chosen.again:
    print(f"second fit: {train(parallel, 20)}", flush=True)
