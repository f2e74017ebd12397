"""Layers as users write them: each represents a family of things that `call` can do.

Their source is copied into the scripts, so they use only `keras`, `layers`, `ops` and `np`.
"""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops


class Positions(layers.Layer):
    """Adds an embedding of each row's positions: indices that do not come from the batch."""

    def build(self, shape):
        self.table = layers.Embedding(shape[1], shape[-1], embeddings_initializer="normal")
        self.table.build()

    def call(self, x):
        return x + self.table(ops.arange(x.shape[1]))


class Rows(layers.Layer):
    """Takes rows of a weight at fixed places, some of them twice."""

    def build(self, shape):
        self.w = self.add_weight(shape=(6, shape[-1]), initializer="normal", name="w")

    def call(self, x):
        return x + ops.sum(ops.take(self.w, [0, 2, 2, 5], axis=0), axis=0)


class AddsLoss(layers.Layer):
    """Adds a loss: `loss` is a function of `x` and of the mask, as numbers, or `None`."""

    def __init__(self, loss, **kwargs):
        super().__init__(**kwargs)
        self.loss, self.supports_masking = loss, True

    def call(self, x, mask=None):
        mask = ops.ones(ops.shape(x)[:-1], x.dtype) if mask is None else ops.cast(mask, x.dtype)
        self.add_loss(self.loss(x, mask[..., None]))
        return x


class Keeps(layers.Layer):
    """Keeps a state: `update` makes the next one of the last one and `x`, in training."""

    def __init__(self, update, first=0.0, dtype=None, used=False, **kwargs):
        super().__init__(**kwargs)
        self.update, self.used = update, used
        self.state = self.add_weight(
            shape=(),
            initializer=keras.initializers.Constant(first),
            trainable=False,
            dtype=dtype,
            name="state",
        )

    def call(self, x, training=None):
        if training:
            self.state.assign(self.update(self.state, x))
        return x * (1 + 0.1 * ops.tanh(ops.cast(self.state, x.dtype))) if self.used else x


class Phases(layers.Layer):
    """Computes something different in training."""

    def call(self, x, training=False):
        return 2 * x + 0.5 if training else x


class Chooses(layers.Layer):
    """Runs one of two branches, by the value of a weight."""

    def build(self, shape):
        self.inner = layers.Dense(shape[-1], activation="tanh")
        self.inner.build(shape)

    def call(self, x):
        chosen = ops.sum(self.inner.bias) > -1.0
        # On JAX Keras infers float32 for a branch, whatever the input type.
        return ops.cond(chosen, lambda: ops.cast(self.inner(x), x.dtype), lambda: x)


class Repeats(layers.Layer):
    """Applies a layer in a loop."""

    def build(self, shape):
        self.inner = layers.Dense(shape[-1], activation="tanh")
        self.inner.build(shape)

    def call(self, x):
        return ops.fori_loop(0, 3, lambda _, y: self.inner(y) + x, x)


class Recomputed(layers.Layer):
    """Computes a layer again for its gradient."""

    def build(self, shape):
        self.inner = layers.Dense(shape[-1], activation="tanh")
        self.inner.build(shape)

    def call(self, x):
        # A new function each time: JAX keeps what it traced of `self.inner`, and of its methods,
        # with that trace's weights, and plain Keras then does not train them.
        return keras.remat(lambda x: self.inner(x))(x)


class Stopped(layers.Layer):
    """A layer without a gradient."""

    def build(self, shape):
        self.inner = layers.Dense(shape[-1])
        self.inner.build(shape)

    def call(self, x):
        return x + ops.stop_gradient(self.inner(x))


class OwnGradient(layers.Layer):
    """A function with a custom gradient."""

    def call(self, x):
        @ops.custom_gradient
        def clipped(x):
            def grad(*args, upstream=None):
                upstream = args[0] if upstream is None else upstream
                return 0.5 * upstream

            return ops.minimum(x, 1.0), grad

        return clipped(x)


class Apply(layers.Layer):
    """A function of `x`."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


class Shared(layers.Layer):
    """One embedding that is used on the way in and, transposed, on the way out."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = layers.Embedding(12, 4, embeddings_initializer="normal")

    def build(self, shape):
        self.table.build()

    def call(self, tokens):
        x = self.table(tokens) + self.table(ops.flip(tokens, axis=1))
        return ops.matmul(ops.tanh(x), ops.transpose(self.table.embeddings))


class Experts(layers.Layer):
    """A mixture of experts with a loss that balances their use."""

    def build(self, shape):
        self.gate, self.one, self.two = (layers.Dense(k) for k in (2, shape[-1], shape[-1]))
        for inner in (self.gate, self.one, self.two):
            inner.build(shape)

    def call(self, x):
        share = ops.softmax(5 * self.gate(x))
        axes = tuple(range(len(x.shape) - 1))
        self.add_loss(10 * ops.sum(ops.square(ops.mean(share, axis=axes))))
        return share[..., :1] * self.one(x) + share[..., 1:] * self.two(x)


def scipy_csr(dense):
    """A SciPy matrix of the values that are not zero."""
    import scipy.sparse

    return scipy.sparse.csr_matrix(dense)


def batches(x, y, size):
    """The batches of several epochs, one after the other."""
    for _ in range(9):
        for start in range(0, len(keras.tree.flatten(x)[0]), size):
            yield keras.tree.map_structure(lambda a, k=start: np.asarray(a)[k : k + size], (x, y))


NAMES = [
    name
    for name, value in list(globals().items())
    if getattr(value, "__module__", None) == __name__ and callable(value)
]
# Values of `loss`, `update` and `function` in cases.
LOSSES = [
    "lambda x, m: ops.mean(ops.square(x))",
    "lambda x, m: 0.1 * ops.sum(ops.abs(x))",
    "lambda x, m: 10 * ops.sum(x * x * m) / (ops.sum(m) + 1)",
    "lambda x, m: ops.mean(ops.square(x), axis=0)",
    "lambda x, m: ops.mean(ops.square(x), axis=-1)",
    "lambda x, m: ops.mean(ops.square(x), keepdims=True)",
    "lambda x, m: ops.sum(ops.square(ops.mean(x, axis=0)))",
    "lambda x, m: ops.max(ops.square(x))",
    "lambda x, m: ops.log(1 + ops.sum(ops.square(x)))",
    "lambda x, m: 0.3 * ops.sqrt(ops.mean(ops.square(x)) + 1e-3)",
    "lambda x, m: ops.mean(ops.var(x, axis=0))",
    "lambda x, m: ops.cast(0.5, x.dtype)",
    "lambda x, m: 1e-4 * ops.relu(ops.sum(ops.square(x)) - 1000.0)",
]
UPDATES = [
    "lambda v, x: v + 1",
    "lambda v, x: 0.9 * v + 0.1 * ops.cast(ops.mean(x), v.dtype)",
    "lambda v, x: v + ops.cast(ops.sum(x), v.dtype)",
    "lambda v, x: v + ops.cast(ops.shape(x)[0], v.dtype)",
    "lambda v, x: ops.maximum(v, ops.cast(ops.max(x), v.dtype))",
    "lambda v, x: 0.9 * v + 0.1 * ops.cast(ops.mean(ops.var(x, axis=0)), v.dtype)",
    "lambda v, x: ops.cast(x[0, ..., 0], v.dtype) if len(x.shape) == 2 else v + 2",
    "lambda v, x: ops.cast(ops.mean(x), v.dtype)",
    "lambda v, x: ops.where(ops.max(x) > 20, v + 1, v)",
]
FUNCTIONS = [
    "lambda x: x - ops.mean(x, axis=0)",
    "lambda x: ops.flip(x, axis=0)",
    "lambda x: ops.softmax(x, axis=0)",
    "lambda x: x / (1 + ops.sum(ops.abs(x)))",
    "lambda x: ops.cumsum(x, axis=0)",
    "lambda x: ops.concatenate([x, -x], axis=-1)",
    "lambda x: ops.sort(x, axis=-1)",
    "lambda x: x * ops.rsqrt(ops.mean(ops.square(x), axis=-1, keepdims=True) + 1e-3)",
    "lambda x: ops.where(x > 0, x, 0.1 * x)",
    "lambda x: ops.tensordot(x, ops.ones((x.shape[-1], 3), x.dtype), axes=1)",
    "lambda x: x + ops.cast(ops.arange(x.shape[-1]), x.dtype)",
    "lambda x: ops.reshape(x, (-1, x.shape[-1])) if len(x.shape) == 2 else x",
    "lambda x: ops.roll(x, 1, axis=-1)",
    "lambda x: x * ops.cast(ops.shape(x)[0], x.dtype)",
    # What rows make of each other shows in some values or sizes only.
    "lambda x: x / ops.maximum(30.0, ops.sum(ops.abs(x)))",
    "lambda x: ops.cond(ops.max(x) > 50, lambda: x - ops.mean(x, axis=0), lambda: x)",
    "lambda x: x * ops.cast(ops.maximum(ops.shape(x)[0], 3), x.dtype)",
    "lambda x: ops.einsum('i...j,i...j->i...j', x, x)",
]
