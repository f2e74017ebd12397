"""Trains a model on the devices of other machines, and goes on where it was interrupted.

python tensorflow_train.py --workers gpu1:2222 gpu2:2222 --backup /shared/run7
"""

import argparse

from keras_multigpu import cluster, make_parallel  # first: tells if a backend is missing
import keras
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--workers", nargs="+", required=True, metavar="HOST:PORT")
parser.add_argument("--local", metavar="HOST:PORT", help="where the workers reach this process")
parser.add_argument("--timeout", type=float, default=30.0, help="seconds of silence allowed")
parser.add_argument("--backup", required=True, help="a folder for the state of the training")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--weights", help="a file for the trained weights")
options = parser.parse_args()

devices = cluster.connect(options.workers, timeout=options.timeout, local=options.local)
print("Devices:", *devices, flush=True)  # connected before the first tensor or model

keras.utils.set_random_seed(7)
rng = np.random.default_rng(7)
x = rng.normal(size=(1000, 20)).astype("float32")  # put your own data and model here
y = np.tanh(x @ rng.normal(size=(20, 3))).astype("float32")
model = keras.Sequential(
    [keras.Input((20,)), keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(3)]
)

parallel = make_parallel(model, devices=devices)
parallel.compile(optimizer="adam", loss="mse")
parallel.fit(
    x,
    y,
    batch_size=128,
    epochs=options.epochs,
    shuffle=False,  # with the same rows in each batch an interrupted run ends like another
    callbacks=[keras.callbacks.BackupAndRestore(options.backup, delete_checkpoint=False)],
    verbose=2,
)
if options.weights:
    parallel.save_weights(options.weights)
