"""DeepCoNN: a user's text and an item's text, read by two branches that meet at the end."""

from __future__ import annotations

from typing import Any

import keras

_SIDES = ("user", "item")


@keras.saving.register_keras_serializable(package="keras_multigpu")
class FactorizationMachine(keras.layers.Layer):
    """All numbers of a row, alone and in pairs: `b + x w + sum over i < j of <v_i, v_j> x_i x_j`.

    Rendle, "Factorization machines" (ICDM 2010), equation 1; the pairs are summed in linear time
    by his lemma 3.1.

    Args:
        factors: the size of the vectors `v`.
        **kwargs: those of `keras.layers.Layer`.

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
        _check_sizes(factors=factors)
        self.factors = factors

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
    """A compiled model of a rating from two texts.

    By Zheng, Noroozi and Yu, "Joint deep modeling of users and items using reviews for
    recommendation" (WSDM 2017): each text goes through an embedding, a convolution, the maximum
    over the text and a dense layer; the two results meet in a factorization machine. The paper's
    embedding is a pretrained one of 300 numbers: put its weights into `user_embedding` and
    `item_embedding`. Smaller variants that were published for experiments on two GPUs have 10
    filters with `"tanh"`, linear units, and a dot product (`head="dot"`) at the end.

    Args:
        vocabulary: how many numbers of words there are: `len(reviews.vocabulary)`. 0 stands for no
            word.
        length: the words of a text.
        embedding: the numbers that stand for a word.
        filters: of the convolution.
        width: the words that the convolution sees at once.
        units: of the dense layer.
        activation: of the convolution.
        unit_activation: of the dense layer; `None` for a linear one.
        head: `"fm"`, a factorization machine of 8 factors on both results; or `"dot"`.
        optimizer: as for `compile`.
        loss: as for `compile`.
        metrics: as for `compile`.

    Returns:
        A model of the inputs `"user"` and `"item"`, int32 of shape `(rows, length)`, whose output
        has the shape `(rows, 1)`. Its layers are named `user_...`, `item_...` and `match`, so
        that mode `"model"` puts a branch on a device by `{"user_.*": 0, "item_.*": 1}`.

    Raises:
        ValueError: if an argument is not of its kind.

    Example:
        >>> model = deepconn(1000, length=40, embedding=8, filters=4, units=3)
        >>> model.count_params(), model.output_shape
        (16285, (None, 1))
        >>> [layer.name for layer in model.layers if layer.name.startswith("user")]
        ['user', 'user_embedding', 'user_conv', 'user_max', 'user_dense']
    """
    sizes = {"vocabulary": vocabulary, "length": length, "embedding": embedding}
    _check_sizes(**sizes, filters=filters, width=width, units=units)
    if head not in ("fm", "dot"):
        raise ValueError(f'`head` must be "fm" or "dot". Received: head={head!r}.')
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


def _check_sizes(**sizes: Any) -> None:
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"`{name}` must be a positive integer. Received: {name}={size!r}.")
