"""Processes that train a model on a mesh of devices: `SCENARIO FOLDER 2 NUMBER ADDRESS`."""

import sys

import keras
import numpy as np
from keras import layers
from support import process_script as script
from support.spread_script import ON_JAX, Reads, doubled, refused

from keras_multigpu import make_parallel

ROWS, BATCH = 35, 16
script.TIMEOUT = 30.0  # s; a killed process is noticed sooner


def build():
    """Layers that are spread, and others; random numbers."""
    keras.utils.set_random_seed(7)
    inputs = keras.Input((6,))
    x = layers.Dropout(0.2, seed=3)(layers.Dense(64, "gelu")(inputs))
    x = layers.Dense(1024, "relu")(x)
    model = keras.Model(inputs, layers.Dense(3)(x))
    model.compile(keras.optimizers.Adam(0.01, clipnorm=0.05), "mse")
    return model


def data():
    rng = np.random.default_rng(7)
    return rng.normal(size=(ROWS, 6)), rng.normal(size=(ROWS, 3))


def train(model, callbacks=()):
    """Trains; gives all that came out."""
    x, y = data()
    few, options = (x[: BATCH + 1], y[: BATCH + 1]), {"batch_size": BATCH, "verbose": 0}
    given = {"epochs": 2, "validation_data": few, "callbacks": callbacks, "shuffle": False}
    history = model.fit(x, y, **given, **options)
    found = {f"log {key}": np.array(values) for key, values in history.history.items()}
    found["evaluated"] = np.array(model.evaluate(*few, **options))
    found["predicted"] = model.predict(few[0], **options)
    found["one batch"] = np.array(model.train_on_batch(x[:5], y[:5]))
    for place, weight in enumerate(model.get_weights()):
        found[f"weight {place}"] = weight
    return found


def on_mesh(folder, number, shard=None):
    doubled()
    parallel = make_parallel(build(), model_devices=2, shard=shard)
    latest = folder / f"{number} {{epoch}}.weights.h5"  # the name tells who has written it
    file = keras.callbacks.ModelCheckpoint(latest, save_weights_only=True)
    reads = Reads()
    found = train(parallel, [file, *([reads] if number else [])])  # process 1 reads alone
    assert not number or len(reads.seen) == len(parallel.weights)
    np.savez(folder / f"placed {number}.npz", **parallel.placement)
    parallel.save(folder / "saved.keras")
    loaded = keras.saving.load_model(folder / "saved.keras")
    found["loaded"] = loaded.predict(data()[0], verbose=0)
    np.savez(folder / f"found {number}.npz", **found)
    if ON_JAX:
        kernel = parallel.template.layers[3].kernel
        np.save(folder / f"refused {number}.npy", refused(lambda: np.asarray(kernel)))


def in_shards(folder, number):
    on_mesh(folder, number, "weights")


if __name__ == "__main__":
    script.main(*sys.argv[1:], scenarios=globals())
