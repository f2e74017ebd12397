"""DeepCoNN: two branches read a user's text and an item's text, and meet at the end."""

from __future__ import annotations

from typing import Any

import keras

from keras_multigpu.arguments import check_choice, positive_integer

_SIDES = ("user", "item")


@keras.saving.register_keras_serializable(package="keras_multigpu")
class FactorizationMachine(keras.layers.Layer):
    """The sum of a row's numbers and of their pairs: `b + x w + sum_(i<j) <v_i, v_j> x_i x_j`.

    Rendle, "Factorization machines" (ICDM 2010), equation 1. Lemma 3.1 sums the pairs in linear
    time.

    Args:
        factors: the size of the vectors `v`.
        **kwargs: passed to `keras.layers.Layer`.

    Input: of shape `(rows, size)`. Output: of shape `(rows, 1)`.

    Raises:
        ValueError: if `factors` is not a positive integer.

    Example:
        >>> import numpy as np
        >>> layer = FactorizationMachine(factors=2)
        >>> tuple(layer(np.ones((3, 4))).shape), layer.count_params()
        ((3, 1), 13)
    """

    def __init__(self, factors: int = 8, **kwargs: Any):
        super().__init__(**kwargs)
        self.factors = positive_integer("factors", factors)

    def build(self, input_shape: Any) -> None:
        """Makes the weights."""
        size = input_shape[-1]
        self.bias = self.add_weight(name="bias", shape=(1,), initializer="zeros")
        self.kernel = self.add_weight(name="kernel", shape=(size, 1))
        self.pairs = self.add_weight(name="pairs", shape=(size, self.factors))

    def call(self, inputs: Any) -> Any:
        """The sums."""
        ops = keras.ops
        both = ops.square(ops.matmul(inputs, self.pairs))
        alone = ops.matmul(ops.square(inputs), ops.square(self.pairs))
        pairs = 0.5 * ops.sum(both - alone, axis=-1, keepdims=True)
        return ops.matmul(inputs, self.kernel) + pairs + self.bias

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        """The shape of the output."""
        return (*input_shape[:-1], 1)

    def get_config(self) -> dict[str, Any]:
        """The layer's arguments."""
        return {**super().get_config(), "factors": self.factors}


def deepconn(
    vocabulary: int,
    length: int = 800,
    *,
    embedding: int = 300,
    filters: int = 100,
    width: int = 3,
    units: int = 50,
    activation: str = "relu",
    unit_activation: str | None = "relu",
    head: str = "fm",
    optimizer: Any = "rmsprop",
    loss: Any = "mse",
    metrics: Any = None,
) -> keras.Model:
    """A compiled model that predicts a rating from two texts.

    Zheng, Noroozi and Yu, "Joint deep modeling of users and items using reviews for
    recommendation" (WSDM 2017): each text goes through an embedding, a convolution, the maximum
    over the text and a dense layer; a factorization machine combines the two results. The paper
    uses a pretrained embedding of 300 numbers: assign its weights to `user_embedding` and
    `item_embedding`. Smaller variants, published for experiments on two GPUs, have 10 filters with
    `"tanh"`, linear units, and a dot product (`head="dot"`) at the end.

    Args:
        vocabulary: the number of words, `len(reviews.vocabulary)`; word 0 stands for no word.
        length: the number of words in a text.
        embedding: the size of the vector of a word.
        filters: the filters of the convolution.
        width: how many words the convolution sees at once.
        units: the units of the dense layer.
        activation: the activation of the convolution.
        unit_activation: the activation of the dense layer; `None` for a linear one.
        head: `"fm"`, a factorization machine with 8 factors; or `"dot"`, a dot product.
        optimizer: as for `compile`.
        loss: as for `compile`.
        metrics: as for `compile`.

    Returns:
        A model of the inputs `"user"` and `"item"`, int32 of shape `(rows, length)`, whose output
        has the shape `(rows, 1)`. Its layers are named `user_...`, `item_...` and `match`: in mode
        `"model"`, the placement `{"user_.*": 0, "item_.*": 1}` puts each branch on a device.

    Raises:
        ValueError: if an argument is invalid.

    Example:
        >>> model = deepconn(1000, length=40, embedding=8, filters=4, units=3)
        >>> model.count_params(), model.output_shape
        (16285, (None, 1))
        >>> [layer.name for layer in model.layers if layer.name.startswith("user")]
        ['user', 'user_embedding', 'user_conv', 'user_max', 'user_dense']
    """
    vocabulary = positive_integer("vocabulary", vocabulary)
    length, width = positive_integer("length", length), positive_integer("width", width)
    embedding, filters = (
        positive_integer("embedding", embedding),
        positive_integer("filters", filters),
    )
    units = positive_integer("units", units)
    check_choice("head", head, "fm", "dot")
    if width > length:
        raise ValueError(
            f"`width` must not be above `length`. Received: width={width}, length={length}."
        )
    layers = keras.layers

    def branch(side: str) -> tuple[Any, Any]:
        x = inputs = keras.Input((length,), dtype="int32", name=side)
        x = layers.Embedding(vocabulary, embedding, name=f"{side}_embedding")(x)
        x = layers.Conv1D(filters, width, activation=activation, name=f"{side}_conv")(x)
        x = layers.GlobalMaxPooling1D(name=f"{side}_max")(x)
        return inputs, layers.Dense(units, unit_activation, name=f"{side}_dense")(x)

    inputs, ends = zip(*map(branch, _SIDES))
    if head == "dot":
        output = layers.Dot(1, name="match")(list(ends))
    else:
        both = layers.Concatenate(name="match_input")(list(ends))
        output = FactorizationMachine(name="match")(both)
    model = keras.Model(dict(zip(_SIDES, inputs)), output, name="deepconn")
    model.compile(optimizer, loss, metrics=metrics)
    return model
