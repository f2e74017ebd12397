"""Processes that train a model with `shard`: `SCENARIO FOLDER 2 NUMBER ADDRESS`."""

import functools
import sys

import keras
import numpy as np
import pytest
from keras import layers
from support import process_script as script

from keras_multigpu import make_parallel
from keras_multigpu.layers import MultiHotDense

SHARDS = ("optimizer", "weights")
ROWS, BATCH = 35, 16
script.TIMEOUT = 30.0  # s; a killed process is noticed sooner


ON_JAX = keras.backend.backend() == "jax"

if ON_JAX:
    import jax

    from keras_multigpu.engines.jax.state import state_shards

    LEAST = state_shards, "_LEAST"
else:
    from keras_multigpu.engines.tensorflow.weights import divided, homes

    LEAST = homes, "LEAST"


def doubled():
    """All in float64, and weights of a few elements are spread too."""
    if ON_JAX:
        jax.config.update("jax_enable_x64", True)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    setattr(*LEAST, 3)  # not seeds


def kept(variable):
    """How many elements of a variable this process's first device has."""
    if ON_JAX:
        return variable._value.addressable_shards[0].data.size
    return divided.parts_of(variable)[0].shape.num_elements()


def build():
    keras.utils.set_random_seed(7)
    inputs = keras.Input((6,))
    x = layers.Dense(8, "tanh", kernel_regularizer="l2")(inputs)
    x = layers.Dropout(0.2)(layers.BatchNormalization()(x))
    model = keras.Model(inputs, layers.Dense(3)(x))
    model.compile(keras.optimizers.Adam(0.01, clipnorm=0.05), _squares)
    return model


def wide():
    """A table of which each device adds up its rows, and one of which it looks them up."""
    keras.utils.set_random_seed(7)
    indices = keras.Input((4,), dtype="int32")
    rows = layers.GlobalAveragePooling1D()(layers.Embedding(1024, 3)(indices * 8 + 8))
    model = keras.Model(indices, MultiHotDense(3, 64, padding=-1)(indices) + rows)
    model.compile("adam", _squares)
    return model


def _squares(truth, predicted):
    """The mean of the squares of each row."""
    return keras.ops.mean(keras.ops.square(truth - predicted), axis=-1)


def data():
    rng = np.random.default_rng(7)
    return rng.normal(size=(ROWS, 6)), rng.normal(size=(ROWS, 3))


def train(model, table, callbacks=()):
    """Trains both; gives all that came out."""
    x, y = data()
    few, options = (x[: BATCH + 1], y[: BATCH + 1]), {"batch_size": BATCH, "verbose": 0}
    given = {"epochs": 2, "validation_data": few, "callbacks": callbacks, "shuffle": False}
    history = model.fit(x, y, **given, **options)
    found = {f"log {key}": np.array(values) for key, values in history.history.items()}
    indices = np.random.default_rng(8).integers(-1, 64, (ROWS, 4))
    table.fit(indices, y, epochs=2, shuffle=False, **options)
    found["evaluated"] = np.array(model.evaluate(*few, **options))
    found["predicted"] = model.predict(few[0], **options)
    found["one batch"] = np.array(model.train_on_batch(x[:5], y[:5]))
    for place, weight in enumerate([*model.get_weights(), *table.get_weights()]):
        found[f"weight {place}"] = weight
    return found


class Reads(keras.callbacks.Callback):
    """Reads the weights within `fit`, in one process alone."""

    seen = ()

    def on_train_begin(self, logs=None):
        self.seen = self.model.get_weights()  # slots are new here

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.seen = self.model.get_weights()


def refused(call):
    try:
        call()
    except RuntimeError as error:
        return np.array(str(error))
    raise AssertionError("No error came.")


def train_optimizer(folder, number):
    parallel = train_with("optimizer", folder, number)
    if ON_JAX:  # whose template has whole weights
        predicted = parallel.template.predict(data()[0][: BATCH + 1], verbose=0)
        np.save(folder / f"template {number}.npy", predicted)
        return
    kernel = parallel.template.layers[1].kernel

    def differ():
        if number:
            kernel.assign(np.zeros(kernel.shape))
        parallel.fit(*data(), verbose=0)

    script.fails(differ)


def train_weights(folder, number):
    parallel = train_with("weights", folder, number)
    template, x = parallel.template, data()[0]
    uses = {"predict": functools.partial(template.predict, x, verbose=0)}
    if ON_JAX:  # on TensorFlow all processes read together
        uses["get_weights"] = template.layers[1].get_weights
        uses["call"] = functools.partial(template, x[:3])
    np.savez(folder / f"uses {number}.npz", **{key: refused(use) for key, use in uses.items()})
    kernel = template.layers[1].kernel

    def differ():
        kernel.assign(np.zeros(kernel.shape) + number)
        parallel.fit(*data(), verbose=0)

    script.fails(differ)


def train_with(shard, folder, number):
    """Trains, saves and loads; writes what came out of it."""
    doubled()
    parallel, table = make_parallel(build(), shard=shard), make_parallel(wide(), shard=shard)
    latest = folder / f"{number} {{epoch}}.weights.h5"  # the name tells who has written it
    callbacks = [
        keras.callbacks.ModelCheckpoint(latest, save_weights_only=True),
        script.Within(make_parallel(script.build())),  # process 1 waits there for process 0
        *([Reads()] if number else []),
    ]
    found = train(parallel, table, callbacks)
    assert not number or len(callbacks[-1].seen) == len(parallel.weights)
    parts = [*parallel.trainable_variables, *parallel.optimizer.variables[2:]]
    found["parts"] = np.array(list(map(kept, parts)))
    found["sizes"] = np.array([int(np.prod(one.shape)) for one in parts])
    found["longest"] = np.array([max(one.shape, default=1) for one in parts])
    parallel.save_weights(folder / "saved.weights.h5")
    parallel.save(folder / "saved.keras")
    loaded = keras.saving.load_model(folder / "saved.keras", {"_squares": _squares})
    found["loaded"] = np.concatenate([one.ravel() for one in loaded.get_weights()])
    parallel.set_weights([0 * one for one in parallel.get_weights()])
    parallel.load_weights(folder / "saved.weights.h5")
    found["read"] = np.concatenate([one.ravel() for one in parallel.get_weights()])
    slot = parallel.optimizer.variables[2]
    if ON_JAX:
        found["slot"], found["shown"] = refused(functools.partial(np.asarray, slot)), repr(slot)
    np.savez(folder / f"found {number}.npz", **found)
    return parallel


def changing(model, path, reads=()):
    """Files of the last epoch, after which the weights change: averages, or the best ones."""
    averaged = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5)
    model.compile(averaged, _squares)
    file = keras.callbacks.ModelCheckpoint(f"{path}_averaged.weights.h5", save_weights_only=True)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model.fit(*data(), epochs=2, callbacks=[file], **options)
    model.compile(keras.optimizers.SGD(0.05), _squares)
    file = keras.callbacks.ModelCheckpoint(f"{path}_stopped.weights.h5", save_weights_only=True)
    best = {"monitor": "loss", "min_delta": 1e3, "patience": 1}  # the first epoch's
    stopping = keras.callbacks.EarlyStopping(**best, restore_best_weights=True)
    model.fit(*data(), epochs=5, callbacks=[file, stopping], **options)
    assert stopping.stopped_epoch
    model.compile("adafactor", _squares)
    model.fit(*data(), callbacks=[*reads], **options)
    return [*model.get_weights(), np.array(model.evaluate(*data(), verbose=0))]


def train_changing(folder, number):
    """Process 0 writes, while process 1 goes on to where the weights change."""
    doubled()
    found = changing(
        make_parallel(build(), shard="weights"), folder / "joined", [Reads()] if number else []
    )
    np.savez(folder / f"changed {number}.npz", *found)
    compiled = make_parallel(build(), shard="optimizer")
    if ON_JAX:
        with pytest.raises(ValueError, match="use_ema=True"):
            compiled.compile(keras.optimizers.Adam(use_ema=True), "mse")


def train_backed_up(folder, number):
    setattr(*LEAST, 3)
    keras.utils.set_random_seed(7)
    parallel = make_parallel(script.build(dropout=0.0), shard="weights")
    backup = keras.callbacks.BackupAndRestore(folder / "backup")
    try:
        script.train_in_order(parallel, [backup, script.Pause()])
    except script.ClusterError as error:
        print(error, flush=True)
        sys.exit(1)
    np.savez(folder / f"trained{number}.npz", *parallel.get_weights())


if __name__ == "__main__":
    script.main(*sys.argv[1:], scenarios=globals())
