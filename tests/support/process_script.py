"""What each of several processes runs: `process_script.py SCENARIO FOLDER COUNT NUMBER ADDRESS`."""

import os
import pathlib
import signal
import sys
import time

import keras
import numpy as np

import keras_multigpu
from keras_multigpu import engines, make_parallel
from keras_multigpu.cluster import ClusterError, join

TIMEOUT = 8.0  # to join takes seconds on a busy machine


def data(rows=70):
    rng = np.random.default_rng(7)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.integers(0, 3, rows)


def build(activation="tanh", dropout=0.2):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation=activation),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(3),
        ]
    )
    return compiled(model)


def compiled(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    return model


class Journal(keras.callbacks.Callback):
    """Says when a batch is done."""

    def on_train_batch_end(self, batch, logs=None):
        print(f"batch {batch}", flush=True)


class Within(keras.callbacks.Callback):
    """Trains another model meanwhile."""

    def __init__(self, other):
        super().__init__()
        self.other = other

    def on_epoch_begin(self, epoch, logs=None):
        x, y = data(10)
        self.other.fit(x, y, batch_size=2, verbose=0)

    def on_train_batch_end(self, batch, logs=None):
        if batch < 2:
            self.other.train_on_batch(*data(3))


def train(model, other, callbacks=(), epochs=2):
    """Trains, evaluates and predicts; gives all that came out."""
    callbacks = [*callbacks, Within(other)]
    x, y = data()
    options = {"batch_size": 32, "verbose": 0}
    few = (x[:38], y[:38])
    history = model.fit(x, y, epochs=epochs, validation_data=few, callbacks=callbacks, **options)
    found = {f"log {key}": np.array(values) for key, values in history.history.items()}
    found["evaluated"] = np.array(model.evaluate(*few, **options))
    found["predicted"] = model.predict(few[0], **options)
    found["one batch"] = np.array(model.train_on_batch(x[:6], y[:6]))
    found["one prediction"] = np.asarray(model.predict_on_batch(x[:6]))
    for place, weight in enumerate(
        [*model.get_weights(), *model.optimizer.variables, *other.get_weights()]
    ):
        found[f"weight {place}"] = np.asarray(weight)
    return found


def train_together(folder, number):
    keras.utils.set_random_seed(7)
    model = build()
    parallel = make_parallel(model)
    latest = folder / f"latest{number}.weights.h5"  # the name tells who has written it
    callbacks = [
        keras.callbacks.ModelCheckpoint(latest, save_weights_only=True),
        keras.callbacks.CSVLogger(folder / f"log{number}.csv"),
    ]
    found = train(parallel, make_parallel(build()), callbacks)
    parallel.save_weights(folder / f"by{number}.weights.h5")
    parallel.save_weights(folder / "saved.weights.h5")
    parallel.save(folder / "saved.keras")
    assert (folder / "saved.keras").exists()
    parallel.load_weights(folder / "saved.weights.h5")
    loaded = keras.saving.load_model(folder / "saved.keras")
    found["loaded predicted"] = loaded.predict(data()[0][:6], verbose=0)
    found["template predicted"] = model.predict(data()[0][:6], verbose=0)
    found["devices"] = np.array(parallel.devices)
    found["hosts"] = np.array([engines.current().host_of(name) for name in parallel.devices])
    found["loaded devices"] = np.array(loaded.devices)
    own = make_parallel(build(), devices=keras_multigpu.list_devices()[2 * number :][:2])
    own.predict(data()[0][: number + 2], verbose=0)  # by itself
    for mode, devices in (("tower", None), ("model", None), ("data", ["cpu:0", "cpu:1"])):
        try:
            make_parallel(build(), mode=mode, devices=devices)
        except ValueError as error:
            found[f"refusal {mode} {devices and len(devices)}"] = np.array(str(error))
    try:
        parallel.function(lambda x: parallel(x))
    except ValueError as error:
        found["refusal function"] = np.array(str(error))
    np.savez(folder / f"found{number}.npz", **found)
    x, y = data()
    fails(lambda: parallel.fit(x + number, y, verbose=0))


def fails(call):
    try:
        call()
    except ClusterError as error:
        print(f"{error.host}\n{error}", flush=True)
        sys.exit(1)
    raise AssertionError("No error came.")


def train_long(folder, number):
    parallel = make_parallel(build())
    fails(lambda: parallel.fit(*data(), epochs=10_000, verbose=0, callbacks=[Journal()]))


class Pause(keras.callbacks.Callback):
    """Leaves time to be killed in."""

    def on_epoch_end(self, epoch, logs=None):
        print(f"epoch {epoch}", flush=True)
        time.sleep(0.1)


def train_backed_up(folder, number):
    keras.utils.set_random_seed(7)
    backup = keras.callbacks.BackupAndRestore(folder / "backup")
    parallel = make_parallel(build(dropout=0.0))  # whose state is all in the file
    try:
        train_in_order(parallel, [backup, Pause()])
    except ClusterError as error:
        print(error, flush=True)
        sys.exit(1)
    np.savez(folder / f"trained{number}.npz", *parallel.get_weights())


def train_in_order(model, callbacks=()):
    model.fit(*data(), batch_size=32, epochs=20, shuffle=False, verbose=0, callbacks=callbacks)


class Only(keras.callbacks.Callback):
    """Does something in one process, after each epoch."""

    def __init__(self, action):
        super().__init__()
        self.action = action

    def on_epoch_end(self, epoch, logs=None):
        self.action(self.model)


def own_calls(folder, number):
    """Process 0 calls the model in a callback; then the processes' weights differ in rounding."""
    keras.utils.set_random_seed(7)
    parallel, (x, y) = make_parallel(build(dropout=0.0)), data()
    callbacks = [] if number else [Only(lambda model: model(x[:3]))]
    parallel.fit(x, y, batch_size=32, epochs=2, verbose=0, callbacks=callbacks)
    kernel = parallel.weights[0]
    kernel.assign(kernel.value * (1 + 1e-6 * number))
    parallel.evaluate(x, y, verbose=0)
    np.savez(folder / f"weights{number}.npz", *parallel.get_weights())
    faster = Only(lambda model: model.optimizer.learning_rate.assign(0.1))
    callbacks = [faster] if number else []
    fails(lambda: parallel.fit(x, y, epochs=2, verbose=0, callbacks=callbacks))


def other_weights(folder, number):
    keras.utils.set_random_seed(number)
    parallel = make_parallel(build())
    keras.utils.set_random_seed(7)
    fails(lambda: parallel.fit(*data(), verbose=0))


def other_options(folder, number):
    keras.utils.set_random_seed(7)
    on_jax = keras.backend.backend() == "jax"
    option = {"shard": "optimizer"} if on_jax else {"wire_dtype": "bfloat16"}
    parallel = make_parallel(build(), **(option if number else {}))
    fails(lambda: parallel.fit(*data(), verbose=0))


class SetAtTheEnd(keras.callbacks.Callback):
    """As `EarlyStopping` does, which restores weights."""

    def on_train_end(self, logs=None):
        weight = self.model.trainable_variables[0]
        weight.assign(weight + 0.01)


def other_end(folder, number):
    keras.utils.set_random_seed(7)
    parallel = make_parallel(build())
    callbacks = [SetAtTheEnd()] if number else []
    fails(lambda: parallel.fit(*data(), verbose=0, callbacks=callbacks))


class Terminated(keras.callbacks.Callback):
    """Gets the signal by which schedulers end a process."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def terminated(folder, number):
    keras.utils.set_random_seed(7)
    parallel = make_parallel(build())
    callbacks = [Terminated()] if number else []
    fails(lambda: parallel.fit(*data(), epochs=50, verbose=0, callbacks=callbacks))


def other_length(folder, number):
    """The rows are the same, as far as they go."""
    keras.utils.set_random_seed(7)
    batch = tuple(array[:32] for array in data())

    def generate():
        yield from [batch] * (2 if number else 3)

    parallel = make_parallel(build())
    fails(lambda: parallel.fit(generate(), verbose=0))


def other_steps(folder, number):
    """Process 1 evaluates after an epoch, on the rows on which process 0 goes on to train."""
    keras.utils.set_random_seed(7)
    parallel, (x, y) = make_parallel(build()), data(8)
    callbacks = [Only(lambda model: model.evaluate(x, y, verbose=0))] if number else []
    fails(lambda: parallel.fit(x, y, epochs=2, shuffle=False, verbose=0, callbacks=callbacks))


def parts_of_other_rows(folder, number):
    """Integers in one process, and floats in the other."""
    keras.utils.set_random_seed(7)
    x, y = data(8)
    parallel = make_parallel(build())
    parallel.predict(x[: number + 1], verbose=0)
    fails(lambda: parallel.fit(x, y.astype(["int32", "float32"][number]), verbose=0))


def parts_of_other_length(folder, number):
    """The epochs of process 1 have two batches, and those of process 0 three."""
    keras.utils.set_random_seed(7)
    x, y = data(6 - 2 * number)
    parallel = make_parallel(build())
    fails(lambda: parallel.fit(x, y, batch_size=2, epochs=2, verbose=0))


class FullDisk(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise OSError(28, "No space left on device")


def full_disk(folder, number):
    parallel = make_parallel(build())
    callbacks = [] if number else [FullDisk()]
    fails(lambda: parallel.fit(*data(), epochs=10_000, verbose=0, callbacks=callbacks))


def middle_raises(folder, number):
    """As `full_disk`, in process 1, after some steps that all have made."""
    parallel = make_parallel(build())
    callbacks = [Journal()] + ([FullDisk()] if number == 1 else [])
    fails(lambda: parallel.fit(*data(), epochs=10_000, verbose=0, callbacks=callbacks))


def await_others(folder, count, number, address):
    """Waits until all have imported what takes long: on a busy machine, longer than `TIMEOUT`."""
    imported = [folder / f"imported_{address}_{k}" for k in range(count)]
    imported[number].touch()
    while not all(path.exists() for path in imported):
        time.sleep(0.05)


def main(scenario, folder, count, number, address, scenarios=None):
    folder, count, number = pathlib.Path(folder), int(count), int(number)
    if scenario not in ("absent", "late"):
        await_others(folder, count, number, address)
    if scenario == "other_count" and number:
        count += 1
    if scenario in ("other_count", "absent", "late"):
        fails(lambda: join(address, count, number, timeout=TIMEOUT))
    if keras.backend.backend() == "tensorflow":
        keras_multigpu.use_virtual_devices(2)  # as on JAX, where a process has at least two
    options = {"timeout": TIMEOUT, "data": "parts" if scenario.startswith("parts") else "same"}
    names = join(address, count, number, **options)
    assert names == join(address, count, number, **options)
    assert f"(process {number}, pid {os.getpid()})" in names[number]
    (scenarios or globals())[scenario](folder, number)


if __name__ == "__main__":
    main(*sys.argv[1:])
