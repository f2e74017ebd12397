"""Models that joined processes train together: `joined_models.py FOLDER COUNTS NUMBER ADDRESS`.

COUNTS are the devices of each process: `1,2`. Every process trains each model over all devices,
and the first one then the same model alone; it writes what differs.
"""

import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from support.joined_training import BATCH, ROWS, difference, integers, mlp, numbers, tables

import keras_multigpu
from keras_multigpu import make_parallel
from keras_multigpu.cluster import join


def clipped_eager():
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1)
    return mlp(optimizer=optimizer, run_eagerly=True, metrics=[])


def several_steps():
    return mlp(optimizer=keras.optimizers.Adam(use_ema=True), steps_per_execution=3)


def halved():
    """Gradients and weights cross in 16 bits: those of an embedding, too."""
    inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(20, 5)(inputs)
    model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(x)))
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    return model, (integers(20, ROWS, 7), numbers(ROWS, 1))


def in_shards():
    return tables()


def slots_in_shards():
    """The rows of the tables that a batch names are changed, in the parts that have them."""
    return tables(optimizer=keras.optimizers.Adagrad(0.1), jit_compile=True)


def own_norms():
    """A step of the user's own that computes with whole weights, gradients and their norms."""
    inputs = keras.Input((40,))
    model = OwnNorms(inputs, layers.Dense(2)(layers.Dense(50, "tanh")(inputs)))
    model.compile(optimizer="adam", loss="mse")
    return model, (numbers(ROWS, 40), numbers(ROWS, 2, seed=1))


class OwnNorms(keras.Model):
    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            loss += 0.01 * sum(tf.reduce_sum(tf.abs(one)) for one in weights)
        gradients = tape.gradient(loss, weights)
        norm = tf.linalg.global_norm(gradients)
        self.optimizer.apply_gradients(zip([one / (norm + 1.0) for one in gradients], weights))
        weights[0].assign(0.99 * weights[0] + 0.01 * tf.reduce_max(weights[0]))
        return {"loss": loss, "norm": norm, "largest": tf.reduce_max(weights[0])}


OPTIONS = {
    "halved": {"wire_dtype": "bfloat16"},
    "in_shards": {"shard": "weights"},
    "slots_in_shards": {"shard": "optimizer"},
    "own_norms": {"shard": "weights"},
}
SHARDED = ["in_shards", "slots_in_shards", "own_norms"]


def compiled():
    return mlp(jit_compile=True)


def images():
    model = keras.Sequential([
        keras.Input((8, 8, 2)), layers.Conv2D(4, 3), layers.BatchNormalization(axis=-1),
        layers.ReLU(), layers.GlobalAveragePooling2D(), layers.Dense(2),
    ])  # fmt: skip
    model.compile(optimizer="sgd", loss="mse")
    return model, (numbers(ROWS, 8, 8, 2), numbers(ROWS, 2, seed=1))


def texts():
    """Sparse gradients of an embedding, masks through a recurrent layer, clipping by norm."""
    inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(20, 5, mask_zero=True)(inputs)
    x = layers.LSTM(4, return_sequences=True)(x)
    outputs = layers.Dense(1)(x)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer=keras.optimizers.Adam(0.01, clipnorm=0.5), loss="mse")
    words = integers(20, ROWS, 7)
    words[:, 5:] = 0
    return model, (words, numbers(ROWS, 7, 1))


def sums_in_a_loop():
    """Names of layers that differ between the processes must not matter to what crosses there."""
    inputs = keras.Input((6, 1))
    model = keras.Model(inputs, layers.Dense(1)(layers.LSTM(5, recurrent_dropout=0.2)(inputs)))
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    return model, (numbers(ROWS, 6, 1), numbers(ROWS, 1, seed=1))


@keras.saving.register_keras_serializable()
class AddsLosses(layers.Layer):
    """Adds a loss that is a mean over the rows, and counts calls."""

    def __init__(self):
        super().__init__()
        self.seen = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        self.seen.assign_add(1.0)
        return x


def contrastive(truth, predicted):
    """Compares every row of the batch with every other."""
    near = ops.matmul(predicted, ops.transpose(predicted))
    return -ops.mean(ops.diagonal(ops.log_softmax(near, axis=-1)), keepdims=True) + 0.0 * ops.mean(
        truth
    )


def several_outputs():
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((2,), name="b")}
    x = layers.Concatenate()([inputs["a"], inputs["b"]])
    x = AddsLosses()(layers.Dense(5, activity_regularizer="l2")(x))
    outputs = {"p": layers.Dense(3, name="p")(x), "q": layers.Dense(1, name="q")(x)}
    model = keras.Model(inputs, outputs)
    loss = {"p": contrastive, "q": "mse"}
    model.compile(optimizer="rmsprop", loss=loss, metrics={"q": ["mae"]})
    x = {"a": numbers(ROWS, 4), "b": numbers(ROWS, 2, seed=1)}
    return model, (x, {"p": numbers(ROWS, 3, seed=2), "q": numbers(ROWS, 1, seed=3)})


@keras.saving.register_keras_serializable()
class Adversarial(keras.Model):
    """Calls parts, and takes the gradient by the inputs of one."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(5, "tanh")
        self.second = layers.Dense(1)

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y, *_ = data
        with tf.GradientTape() as outer:
            hidden = self.first(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                first_loss = ops.mean(ops.square(self(x) - y))
            moved = x + 0.1 * ops.tanh(tape.gradient(first_loss, x))  # differentiated twice
            loss = ops.mean(ops.square(self.second(hidden) - y)) + ops.mean(
                ops.square(self(moved) - y)
            )
        weights = self.trainable_variables
        self.optimizer.apply(outer.gradient(loss, weights), weights)
        return {"loss": loss}


def parts():
    model = Adversarial()
    model.build((None, 4))
    model.compile(optimizer="adam", loss="mse")
    return model, (numbers(ROWS, 4), numbers(ROWS, 1, seed=1))


@keras.saving.register_keras_serializable()
class Ranked(layers.Layer):
    """Adds to each row its rank in the batch, which every process finds for all rows."""

    def call(self, x):
        ranks = tf.argsort(tf.argsort(x[:, 0]))
        return x + 0.1 * ops.cast(ranks, x.dtype)[:, None]


def without_rules():
    """Noise, and numbers that one device would compute alone."""
    drop = layers.Dropout(0.3, seed=5)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(5), Ranked(), drop, layers.Dense(2)])
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    return model, (numbers(ROWS, 6), numbers(ROWS, 2, seed=1))


HERE = [1.0]  # another in each process


@keras.saving.register_keras_serializable()
class Outside(layers.Layer):
    """Multiplies by what Python says, of a rank that is not known, once and in a loop."""

    def call(self, x):
        def asked():
            return tf.numpy_function(lambda: np.asarray(HERE[0], x.dtype.name), [], x.dtype)

        x = x * tf.reshape(tf.tanh(asked()), [])
        _, factor = tf.while_loop(
            lambda k, _: k < 2,
            lambda k, one: (k + 1, one * tf.reshape(tf.tanh(asked()), [])),
            (0, tf.constant(1, x.dtype)),
        )
        return x * factor


def from_outside():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(5), Outside(), layers.Dense(2)])
    model.compile(optimizer="sgd", loss="mse")
    return model, (numbers(ROWS, 6), numbers(ROWS, 2, seed=1))


def counts_of_numbers():
    """Keras asks for the largest of all rows, of a rank that TensorFlow does not know."""
    counts = layers.IntegerLookup(vocabulary=[1, 2, 3], output_mode="count")
    model = keras.Sequential([keras.Input((2,), dtype="int64"), counts, layers.Dense(2)])
    model.compile(optimizer="sgd", loss="mse")
    x = np.random.default_rng(0).integers(1, 6, (ROWS, 2))
    return model, (x, numbers(ROWS, 2, seed=1))


@keras.saving.register_keras_serializable()
class Seen(layers.Layer):
    """Adds how often a row's number has come, which a table counts."""

    def __init__(self):
        super().__init__()
        self.table = tf.lookup.experimental.MutableHashTable("int64", "float64", 0.0)

    def call(self, x):
        keys = tf.cast(4 * x[:, 0], "int64")
        seen = self.table.lookup(keys)
        with tf.control_dependencies([self.table.insert(keys, seen + 1)]):
            return x + 0.01 * ops.cast(tf.reshape(seen, [-1, 1]), x.dtype)


def writes_a_table():
    model = keras.Sequential([keras.Input((6,)), Seen(), layers.Dense(2)])
    model.compile(optimizer="sgd", loss="mse")
    return model, (numbers(ROWS, 6), numbers(ROWS, 2, seed=1))


CASES = [
    *(mlp, clipped_eager, several_steps, compiled, images, texts, several_outputs, parts),
    *(halved, without_rules, sums_in_a_loop, from_outside),
    *(counts_of_numbers, writes_a_table),
    *(in_shards, slots_in_shards, own_norms),
]


WHOLE = [case.__name__ for case in CASES if case.__name__ not in SHARDED]


def train(make, **devices):
    """What comes out of a training: logs, outputs and weights, by name."""
    keras.utils.set_random_seed(3)
    model, (x, y) = make()
    if devices:
        model = make_parallel(model, **devices, **OPTIONS.get(make.__name__, {}))
    options = {"batch_size": BATCH, "verbose": 0}
    few = tuple(keras.tree.map_structure(lambda one: one[: BATCH + 1], one) for one in (x, y))
    history = model.fit(x, y, epochs=2, validation_data=few, **options).history
    found = {f"log {key}": np.array(values) for key, values in history.items()}
    found["evaluated"] = np.array(keras.tree.flatten(model.evaluate(*few, **options)))
    for place, one in enumerate(keras.tree.flatten(model.predict(few[0], **options))):
        found[f"predicted {place}"] = one
    alone = keras.tree.map_structure(lambda one: one[:1], (x, y))
    found["one row"] = np.array(model.train_on_batch(*alone))
    for place, weight in enumerate([*model.get_weights(), *model.optimizer.variables]):
        found[f"weight {place}"] = np.asarray(weight)
    return found


def main(folder, counts, number, address, floatx="float64", *chosen):
    counts, number = [int(one) for one in counts.split(",")], int(number)
    HERE[0] += number
    keras.config.set_floatx(floatx)
    keras_multigpu.use_virtual_devices(counts[number])
    join(address, len(counts), number, timeout=60)
    names = keras_multigpu.list_devices()
    own = names[sum(counts[:number])]
    for make in CASES:
        if chosen and make.__name__ not in chosen:
            continue
        # Mixed by process: the rows are in their order whatever that of the devices is.
        is_mixed = make in (mlp, in_shards)
        together = train(make, devices=[*names[1:], names[0]] if is_mixed else names)
        alone = together if number else train(make, devices=[own])
        assert together.keys() == alone.keys()
        worst = max(difference(together[key], alone[key]) for key in alone)
        np.savez(pathlib.Path(folder) / f"{make.__name__}{number}.npz", **together, worst=worst)


if __name__ == "__main__":
    main(*sys.argv[1:])
