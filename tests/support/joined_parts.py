"""Trainings in which each process gives its part of a batch.

`joined_parts.py FOLDER COUNTS NUMBER ADDRESS CASE...`. COUNTS are the devices of each process:
`1,2`. Every process trains each model over all devices, on its part of the data, and the first one
then the same model alone, on the whole batches; it writes what differs.
"""

import pathlib
import sys

import keras
import numpy as np
from keras import layers, ops
from support.joined_training import BATCH, ROWS, integers, mlp, numbers, tables

import keras_multigpu
from keras_multigpu import make_parallel
from keras_multigpu.cluster import join

FEW = 19


def weighted():
    """Weights of rows, and of classes."""
    model, (x, y) = mlp(weighted_metrics=["accuracy"], metrics=None)
    return model, (x, y, np.linspace(0.0, 2.0, ROWS))


def even():
    """Rows of which each device gets some of its own process's, but for the last batches."""
    return mlp(optimizer="sgd")


def several_steps():
    return mlp(optimizer=keras.optimizers.Adam(use_ema=True), steps_per_execution=2)


def eager():
    return mlp(optimizer=keras.optimizers.SGD(0.1, global_clipnorm=0.1), run_eagerly=True)


def contrastive(truth, predicted):
    """Compares every row of the batch with every other."""
    near = ops.matmul(predicted, ops.transpose(predicted))
    rows = -ops.mean(ops.diagonal(ops.log_softmax(near, axis=-1)), keepdims=True)
    return rows + ops.mean(truth - predicted)


@keras.saving.register_keras_serializable()
class OfTheBatch(keras.Model):
    """Has a loss of its own, by the inputs of the whole batch; several outputs for each row."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(5, "tanh"), layers.Dense(4)

    def call(self, inputs):
        x = self.second(self.first(ops.concatenate([inputs["a"], inputs["b"]], axis=1)))
        return {"p": x, "q": ops.reshape(x, (-1, 2))}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        centred = x["a"] - ops.mean(x["a"], axis=0)
        return ops.mean(ops.square(y_pred["p"] - centred)) + contrastive(y["p"], y_pred["p"])[0]


def of_the_batch():
    model, inputs = OfTheBatch(), {"a": numbers(ROWS, 4), "b": numbers(ROWS, 2, seed=1)}
    model.build({"a": (None, 4), "b": (None, 2)})
    model.compile(optimizer="rmsprop")
    return model, (inputs, {"p": numbers(ROWS, 4, seed=2)})


def texts():
    """Masks through a recurrent layer, and the sparse gradient of an embedding."""
    inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(20, 5, mask_zero=True)(inputs)
    outputs = layers.Dense(1)(layers.LSTM(4, return_sequences=True)(x))
    model = keras.Model(inputs, outputs)
    model.compile(optimizer=keras.optimizers.Adam(0.01, clipnorm=0.5), loss="mse")
    words = integers(20, ROWS, 7)
    words[:, 5:] = 0
    return model, (words, numbers(ROWS, 7, 1))


def own_step():
    """A `train_step` that calls parts, and takes the gradient by the inputs of one."""
    from support import joined_models

    return joined_models.parts()


def in_shards():
    return tables()


def meshed():
    """Large layers in parts within a process, which the processes divide once more."""
    inputs = keras.Input((6,))
    x = layers.Reshape((8, 8))(layers.Dense(64, "gelu")(inputs))
    x = layers.Flatten()(x + layers.MultiHeadAttention(4, 8)(x, x))
    model = keras.Model(inputs, layers.Dense(2)(layers.Dense(1024, "relu")(x)))
    model.compile(keras.optimizers.Adam(0.01, clipnorm=0.05, use_ema=True), loss="mse")
    return model, (numbers(ROWS, 6), numbers(ROWS, 2, seed=1))


CASES = [mlp, even, weighted, several_steps, eager, of_the_batch, texts, own_step, in_shards]
CASES += [meshed]
OPTIONS = {in_shards: {"shard": "weights"}, meshed: {"shard": "weights", "model_devices": 2}}


def rows_of(tree, chosen):
    """Some rows of all arrays."""
    if isinstance(tree, dict):
        return {key: rows_of(one, chosen) for key, one in tree.items()}
    return tuple(rows_of(one, chosen) for one in tree) if isinstance(tree, tuple) else tree[chosen]


class Part:
    """What a process gives of each batch: as much as the others, or the last one more."""

    def __init__(self, case, number, count):
        self.number, self.count, self.parts = number, count, count + (case != "even")

    def of_batch(self, rows):
        """Its rows of a batch."""
        bounds = [-(-rows * k // self.parts) for k in range(self.count)]  # of 3 rows, each has one
        return [*bounds, rows][self.number : self.number + 2]

    def rows(self, count):
        """Its rows of each batch of a pass."""
        firsts = range(0, count, BATCH)
        bounds = [(first, self.of_batch(min(BATCH, count - first))) for first in firsts]
        return [np.arange(first + low, first + high) for first, (low, high) in bounds]


class Batches(keras.utils.PyDataset):
    """Some rows in each batch."""

    def __init__(self, data, rows):
        super().__init__()
        self.data, self.rows = data, rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        return rows_of(self.data, self.rows[place])


def train(make, number=0, count=1, **devices):
    """What comes out of a training: logs, outputs and weights, by name."""
    keras.utils.set_random_seed(3)
    model, data = make()
    part = Part(make.__name__, number, count)
    if devices:
        options = OPTIONS.get(make, {}) if count > 1 else {}
        model = make_parallel(model, **devices, **options)
    rows, few = part.rows(ROWS), Batches(data, part.rows(FEW))
    quiet = {"verbose": 0}
    given = rows_of(data, np.concatenate(rows))
    names = dict(zip(("x", "y", "sample_weight"), given), batch_size=len(rows[0]), shuffle=False)
    found = {}
    logs = [model.fit(**names, validation_data=few, epochs=2, **quiet).history]
    if make is weighted:  # from a generator, whose length is unknown; and weights of classes
        steps = int(model.optimizer.iterations) + len(few)
        logs.append(model.fit((few[place] for place in range(len(few))), **quiet).history)
        # Plain Keras may count the step that finds the generator at its end.
        model.optimizer.iterations.assign(steps)
        names["sample_weight"] = None
        logs.append(model.fit(**names, class_weight={0: 1.0, 1: 0.3, 2: 2.0}, **quiet).history)
    for place, log in enumerate(logs):
        found.update({f"log {place} {key}": np.array(values) for key, values in log.items()})
    found["evaluated"] = np.array(keras.tree.flatten(model.evaluate(few, **quiet)))
    predicted = model.predict(few, **quiet)
    for place, one in enumerate(keras.tree.flatten(predicted)):
        found[f"own predicted {place}"] = one
    batch = rows_of(data, np.arange(*part.of_batch(3)))
    found["one batch"] = np.array(model.train_on_batch(*batch))
    found["own one prediction"] = np.asarray(
        keras.tree.flatten(model.predict_on_batch(batch[0]))[0]
    )
    in_parts = make in OPTIONS and keras.backend.backend() == "jax"  # no process can read slots
    slots = [] if in_parts else model.optimizer.variables
    for place, weight in enumerate([*model.get_weights(), *slots]):
        found[f"weight {place}"] = np.asarray(weight)
    return found


def main(folder, counts, number, address, *chosen):
    counts, number = [int(one) for one in counts.split(",")], int(number)
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    keras.config.set_floatx("float64")
    keras_multigpu.use_virtual_devices(counts[number])
    join(address, len(counts), number, timeout=60, data="parts")
    names = keras_multigpu.list_devices()
    own = names[sum(counts[:number])]
    for make in CASES:
        if make.__name__ not in chosen:
            continue
        together = train(make, number, len(counts), devices=names)
        np.savez(pathlib.Path(folder) / f"{make.__name__}{number}.npz", **together)
        if not number:
            alone = train(make, devices=[own])
            np.savez(pathlib.Path(folder) / f"{make.__name__}.npz", **alone)


if __name__ == "__main__":
    main(*sys.argv[1:])
