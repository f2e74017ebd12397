"""The table of models on which one device and several must agree."""

from __future__ import annotations

from typing import Any

import keras
import scipy.sparse
from keras import layers, ops
from support.case import Case, vectors

if keras.backend.backend() == "jax":
    from support.cases_jax import BACKEND_CASES
else:
    from support.cases_tensorflow import BACKEND_CASES


def _images(rng, rows):
    return rng.normal(size=(rows, 8, 8, 2)).astype("float32"), rng.integers(0, 5, rows)


def _tokens(rng, rows):
    x = rng.integers(1, 30, size=(rows, 7))
    x[:, 5:] *= rng.integers(0, 2, size=(rows, 1))  # rows of unequal length
    return x, rng.normal(size=(rows, 3))


def _mlp():
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(16, activation="tanh"), layers.Dense(2)]
    )


def _unbuilt():
    return keras.Sequential([layers.Dense(16, activation="tanh"), layers.Dense(2)])


def _conv():
    x = inputs = keras.Input((8, 8, 2))
    x = layers.Conv2D(8, 3, activation="tanh")(x)
    x = layers.DepthwiseConv2D(3)(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(5)(x))


def _normalized():
    """Its dense layers have no bias, whose gradient would be rounding alone."""
    x = inputs = keras.Input((8, 8, 2))
    x = layers.Conv2D(8, 3, use_bias=False)(x)
    x = layers.Activation("tanh")(layers.BatchNormalization(momentum=0.8)(x))
    skipped = layers.BatchNormalization()(layers.Conv2D(4, 1, use_bias=False)(x))
    x = layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same", use_bias=False)(x))
    x = layers.GlobalAveragePooling2D()(layers.add([x, skipped]))
    return keras.Model(inputs, layers.Dense(5)(x))


def _normalized_sequence():
    """What a mask leaves out is left out of the statistics."""
    x = inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(30, 8, mask_zero=True)(x)
    return keras.Model(inputs, layers.Dense(3)(layers.LSTM(8)(layers.BatchNormalization()(x))))


def _residual():
    inputs = keras.Input((6,))
    block = keras.Sequential([keras.Input((6,)), layers.Dense(6, activation="tanh")], name="block")
    x = layers.add([inputs, block(inputs)])
    x = layers.LayerNormalization()(layers.add([x, block(x)]))
    return keras.Model(inputs, layers.Dense(2)(x))


def _lstm_masked():
    x = inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(30, 8, mask_zero=True)(x)
    return keras.Model(inputs, layers.Dense(3)(layers.LSTM(8)(x)))


def _sequence_out():
    """The output carries its mask on to the loss."""
    x = inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(30, 8, mask_zero=True)(x)
    x = layers.Bidirectional(layers.GRU(4, return_sequences=True))(x)
    return keras.Model(inputs, layers.Dense(1)(x))


def _sequence_data(rng, rows):
    x, _ = _tokens(rng, rows)
    return x, rng.normal(size=(rows, 7, 1))


def _attention():
    x = inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(30, 8)(x)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalMaxPooling1D()(x)))


def _two_by_two():
    """Dicts in and out, two inputs and two outputs."""
    left, right = keras.Input((6,), name="left"), keras.Input((3,), name="right")
    x = layers.Dense(8, activation="tanh")(layers.concatenate([left, right]))
    outputs = {"mean": layers.Dense(2, name="mean")(x), "logit": layers.Dense(1, name="logit")(x)}
    return keras.Model({"left": left, "right": right}, outputs)


def _two_by_two_data(rng, rows):
    x = {"left": rng.normal(size=(rows, 6)), "right": rng.normal(size=(rows, 3))}
    return x, {"mean": rng.normal(size=(rows, 2)), "logit": rng.integers(0, 2, (rows, 1))}


def _siamese():
    """A shared layer, a list of inputs."""
    first, second = keras.Input((6,)), keras.Input((6,))
    shared = layers.Dense(8, activation="tanh")
    x = layers.subtract([shared(first), shared(second)])
    return keras.Model([first, second], layers.Dense(1, activation="sigmoid")(x))


def _siamese_data(rng, rows):
    x = [rng.normal(size=(rows, 6)), rng.normal(size=(rows, 6))]
    return x, rng.integers(0, 2, (rows, 1))


def _regularized():
    x = inputs = keras.Input((6,))
    x = layers.Dense(8, activation="tanh", kernel_regularizer="l2", activity_regularizer="l1")(x)
    return keras.Model(inputs, layers.Dense(2, bias_regularizer="l1l2")(x))


class Penalty(layers.Layer):
    """Adds a mean over the batch, a sum over it, and a value for each row."""

    def call(self, inputs):
        self.add_loss(0.1 * ops.mean(ops.square(inputs)))
        self.add_loss(0.01 * ops.sum(ops.abs(inputs)))
        self.add_loss(0.01 * ops.max(inputs, axis=1))
        return inputs


class Subclassed(keras.Model):
    """Layers are made when it is first called; `training` matters; no `get_config`."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, activation="tanh")
        self.penalty = Penalty()
        self.out = layers.Dense(2)
        self.scale = self.add_weight(shape=(2,), initializer="ones", name="scale")

    def call(self, inputs, training=False):
        x = self.penalty(self.hidden(inputs))
        return self.out(x) * self.scale + (0.5 if training else 0.0)


class Nested(keras.Model):
    """Nested inputs and outputs, and an argument that is a tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(3), layers.Dense(2)

    def call(self, inputs):
        left, (middle, right) = inputs["left"], inputs["pair"]
        x = self.first(left) + self.first(middle)
        return {"out": [x, self.second(right)], "sum": self.second(x)}


def _nested_data(rng, rows):
    left, middle, right = (rng.normal(size=(rows, 6)) for _ in range(3))
    right = right[:, :3]
    y = {
        "out": [rng.normal(size=(rows, 3)), rng.normal(size=(rows, 2))],
        "sum": rng.normal(size=(rows, 2)),
    }
    return {"left": left, "pair": (middle, right)}, y


def _list_outputs():
    inputs = keras.Input((6,))
    x = layers.Dense(4, activation="tanh")(inputs)
    return keras.Model(inputs, [layers.Dense(2, name="a")(x), layers.Dense(1, name="b")(x)])


def _list_outputs_data(rng, rows):
    x, y = vectors(rng, rows)
    return x, [y, rng.normal(size=(rows, 1))]


def _backbone():
    """A frozen model inside a new one."""
    backbone = keras.Sequential(
        [keras.Input((6,)), layers.Dense(5, activation="tanh"), layers.BatchNormalization()]
    )
    backbone.trainable = False
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(2)(backbone(inputs, training=False)))


class Counting(layers.Layer):
    """Counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = self.add_weight(shape=(), dtype="int32", trainable=False, name="calls")

    def call(self, inputs):
        self.calls.assign(self.calls + 1)
        return inputs


def _counting():
    return keras.Sequential([keras.Input((6,)), layers.Dense(3), Counting(), layers.Dense(2)])


def _recurrent():
    x = inputs = keras.Input((5, 2))
    x = layers.TimeDistributed(layers.Dense(4))(x)
    x = layers.RNN(layers.GRUCell(4), return_sequences=True)(x)
    x, state = layers.SimpleRNN(3, return_state=True)(x)
    return keras.Model(inputs, layers.Dense(2)(x + state))


def _recurrent_data(rng, rows):
    return rng.normal(size=(rows, 5, 2)), rng.normal(size=(rows, 2))


def _sequence_to_sequence():
    """Recurrent layers that begin with a state that is given."""
    encoded, decoded = keras.Input((5, 2)), keras.Input((4, 3))
    start = keras.Input((4,))
    _, hidden, cell = layers.LSTM(4, return_state=True)(encoded)
    decoder = layers.LSTM(4, return_sequences=True)
    x = decoder(decoded, initial_state=[hidden, cell + start])
    return keras.Model([encoded, decoded, start], layers.Dense(1)(x))


def _sequence_to_sequence_data(rng, rows):
    shapes = [(rows, 5, 2), (rows, 4, 3), (rows, 4)]
    return [rng.normal(size=shape) for shape in shapes], rng.normal(size=(rows, 4, 1))


def _bool_input():
    inputs = keras.Input((6,), dtype="bool")
    return keras.Model(inputs, layers.Dense(2)(ops.cast(inputs, "float32")))


def _bool_data(rng, rows):
    return rng.random((rows, 6)) < 0.5, rng.normal(size=(rows, 2))


def _spectral():
    inputs = keras.Input((6,))
    return keras.Model(
        inputs, layers.Dense(2)(layers.SpectralNormalization(layers.Dense(6))(inputs))
    )


def _sparse_input():
    return keras.Sequential([keras.Input((40,), sparse=True), layers.Dense(4)])


def _sparse_data(rng, rows):
    dense = rng.normal(size=(rows, 40)) * (rng.random((rows, 40)) < 0.1)
    return scipy.sparse.csr_matrix(dense.astype("float32")), rng.normal(size=(rows, 4))


def _contrastive(y_true, y_pred):
    """Compares every row of the batch with every other."""
    similarity = ops.matmul(y_pred, ops.transpose(y_pred))
    return ops.logsumexp(similarity, axis=1) - ops.sum(y_pred * y_true, axis=1)


_BINARY = {"loss": "binary_crossentropy", "metrics": ["accuracy", "AUC"]}
_CLASSES = {
    "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "metrics": ["accuracy"],
}
_BY_NAME = {
    "loss": {"mean": "mse", "logit": keras.losses.BinaryCrossentropy(from_logits=True)},
    "loss_weights": {"mean": 0.3, "logit": 1.0},
    "metrics": {"mean": ["mae"]},
}

CASES = [
    Case("mlp", _mlp, vectors),
    Case("unbuilt_sequential", _unbuilt, vectors, {"optimizer": "adam"}),
    Case("conv", _conv, _images, _CLASSES),
    Case("batch_normalization", _normalized, _images, _CLASSES),
    Case("batch_normalization_masked", _normalized_sequence, _tokens),
    Case("residual_shared_block", _residual, vectors, {"metrics": ["mae"]}),
    Case("embedding_lstm_masked", _lstm_masked, _tokens),
    Case("bidirectional_masked_output", _sequence_out, _sequence_data),
    Case("attention", _attention, _tokens),
    Case("dict_inputs_and_outputs", _two_by_two, _two_by_two_data, _BY_NAME),
    Case("siamese_list_inputs", _siamese, _siamese_data, _BINARY),
    Case("regularized", _regularized, vectors),
    Case("subclassed_add_loss", Subclassed, vectors),
    Case("nested_structures", Nested, _nested_data),
    Case("list_outputs", _list_outputs, _list_outputs_data, {"loss": ["mse", "mae"]}),
    Case("frozen_backbone", _backbone, vectors),
    Case("counter_in_a_layer", _counting, vectors),
    Case("recurrent", _recurrent, _recurrent_data),
    Case("sequence_to_sequence", _sequence_to_sequence, _sequence_to_sequence_data),
    Case("bool_input", _bool_input, _bool_data),
    Case("spectral_normalization", _spectral, vectors),
    Case("scipy_csr_input", _sparse_input, _sparse_data),
    Case("in_batch_contrastive", _mlp, vectors, {"loss": _contrastive}),
    Case("clipped_accumulated_ema", _mlp, vectors, {"optimizer": "special"}),
    *BACKEND_CASES,
]


def compile_case(case: Case, model: keras.Model, **changes: Any) -> None:
    """Compiles a model as its case says; objects are made afresh for each model."""
    arguments = {"optimizer": keras.optimizers.SGD(0.05), "loss": "mse", **case.compile, **changes}
    # A loss computes in the type that was Keras's default when it was made.
    arguments["loss"] = keras.tree.map_structure(
        lambda one: one.from_config(one.get_config()) if isinstance(one, keras.Loss) else one,
        arguments["loss"],
    )
    if arguments["optimizer"] == "special":
        arguments["optimizer"] = keras.optimizers.Adam(
            0.01,
            global_clipnorm=0.1,
            use_ema=True,
            weight_decay=0.01,
            gradient_accumulation_steps=2,
        )
    model.compile(**arguments)


def build_equal(case: Case, count: int = 2) -> list[keras.Model]:
    """Models of a case with the same initial weights."""
    models = []
    for _ in range(count):
        keras.utils.set_random_seed(11)
        models.append(case.build())
    return models
