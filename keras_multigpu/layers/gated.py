"""The mix whose weights depend on the inputs."""

from __future__ import annotations

import math
from typing import Any

import keras

from keras_multigpu.arguments import finite_number, number_of, positive_integer
from keras_multigpu.layers.outputs import (
    Mix,
    count_replicas,
    fit,
    is_float,
    mix_leaves,
    shapes,
    softmax,
    weighted_sum,
)


@keras.saving.register_keras_serializable(package="keras_multigpu")
class GatedMix(Mix):
    """A mixture of experts: a gating network on the inputs weights the replicas, row by row.

    `sum_i w_i(x) * output_i` with `w(x) = softmax(gate(x))` (Jacobs, Jordan, Nowlan and Hinton,
    "Adaptive mixtures of local experts", 1991). It combines the outputs as they are. Logits and
    probabilities give different results: see the example at the head of
    `keras_multigpu.layers.mixing`.

    Args:
        gate: a Keras layer or model from the features to logits of shape `(rows, replicas)`.
            The default is `Dense(hidden, "tanh")` and `Dense(replicas)` on all dense
            floating-point features, flattened per row; it begins as the mean.
        hidden: the units of the default gate's hidden layer.
        balance: the weight of the importance loss, which keeps the gate from always choosing the
            same replicas: training adds `balance * CV^2` to the loss. CV is the coefficient of
            variation of the weights' sums over the batch (Shazeer et al., "Outrageously large
            neural networks", 2017).
        **kwargs: those of `keras.Layer`.

    Input: a list with one structure per replica, of tensors of shape `(rows, ...)`; and
        `features`, the inputs of the model, which the gate reads.
    Output: one structure.

    Raises:
        ValueError: if an argument or input is of another kind, or if the gate can't read the
            features or does not return one logit per replica.

    Example:
        >>> import numpy as np
        >>> outputs = [np.array([[0.0], [0.0]]), np.array([[4.0], [4.0]])]
        >>> print(np.array(GatedMix()(outputs, features=np.array([[1.0], [2.0]]))))
        [[2.]
         [2.]]
    """

    def __init__(
        self, gate: keras.Layer | None = None, hidden: int = 16, balance: float = 0.0, **kwargs: Any
    ):
        super().__init__(**kwargs)
        if gate is not None and not isinstance(gate, keras.Layer):
            raise ValueError(
                "`gate` must be a Keras layer from the features to logits of shape "
                f"(rows, replicas), or None. Received: gate={gate!r}. Wrap a function in a "
                "`keras.layers.Lambda`, and create a layer from its class."
            )
        self.gate: Any = gate
        self.hidden = positive_integer("hidden", hidden)
        self.balance = finite_number("balance", balance, "a number from 0 up", lambda one: one >= 0)
        self._has_own_gate = gate is None

    def build(self, outputs_shape: list[Any] | None = None, features_shape: Any = None) -> None:
        self._make_gate(count_replicas(outputs_shape))

    def _make_gate(self, num_replicas: int) -> None:
        if self._has_own_gate:
            dense, dtype = keras.layers.Dense, self.dtype_policy
            first = dense(self.hidden, "tanh", name="hidden", dtype=dtype)
            last = dense(num_replicas, kernel_initializer="zeros", name="logits", dtype=dtype)
            self.gate = keras.Sequential([first, last], name="gate")

    def call(self, outputs: list[Any], features: Any = None, training: bool | None = None) -> Any:
        weights = self._weigh(features, count_replicas(outputs))
        if training and self.balance:
            importance = keras.ops.sum(weights, axis=0)  # all 0 for an empty batch
            mean, variance = keras.ops.mean(importance), keras.ops.var(importance)
            self.add_loss(self.balance * keras.ops.divide_no_nan(variance, mean * mean))
        return mix_leaves(lambda parts: _weigh_rows(parts, weights), outputs)

    def compute_output_spec(
        self, outputs: list[Any], features: Any = None, training: bool | None = None
    ) -> Any:
        if self._has_own_gate and features is not None:
            _dense_leaves(features)  # raises here, not within what Keras tries to find a shape
        return super().compute_output_spec(outputs, features=features, training=training)

    def _weigh(self, features: Any, num_replicas: int) -> Any:
        if features is None:
            raise ValueError(
                "The gate needs the inputs of the model. Received: features=None. Call the layer "
                "as `mix(outputs, features=inputs)`."
            )
        logits = self.gate(
            _flat_rows(features, self.compute_dtype) if self._has_own_gate else features
        )
        if len(logits.shape) != 2 or logits.shape[1] not in (num_replicas, None):
            raise ValueError(
                f"The gate must give logits of shape (rows, {num_replicas}), one for each replica. "
                f"Received: logits of shape {tuple(logits.shape)}. Create a new layer for another "
                "number of replicas, or change its `gate`."
            )
        return softmax(logits)

    def compute_output_shape(self, outputs_shape: list[Any], features_shape: Any = None) -> Any:
        return outputs_shape[0]

    def get_build_config(self) -> dict[str, Any] | None:
        if not self._has_own_gate or not self.built:
            return None
        width = self.gate.input_shape[-1] if self.gate.built else None
        return {"num_replicas": self.gate.layers[-1].units, "width": width}

    def build_from_config(self, config: dict[str, Any]) -> None:
        self._make_gate(config["num_replicas"])
        if config["width"] is not None:
            self.gate.build((None, config["width"]))
        self.built = True

    def get_config(self) -> dict[str, Any]:
        gate = None if self._has_own_gate else keras.saving.serialize_keras_object(self.gate)
        own = {"gate": gate, "hidden": self.hidden, "balance": self.balance}
        return {**super().get_config(), **own}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GatedMix:
        gate = keras.saving.deserialize_keras_object(config.get("gate"))
        return super().from_config({**config, "gate": gate})


def _flat_rows(features: Any, dtype: str) -> Any:
    """Concatenates all dense floating-point features, to shape `(rows, columns)`."""
    columns = [
        keras.ops.reshape(keras.ops.cast(leaf, dtype), (-1, math.prod(leaf.shape[1:])))
        for leaf in _dense_leaves(features)
    ]
    return keras.ops.concatenate(columns, axis=1)


def _dense_leaves(features: Any) -> list[Any]:
    """The dense floating-point features, of known shapes but for the rows.

    Raises:
        ValueError: if there are none.
    """
    given = [leaf for leaf in keras.tree.flatten(features) if leaf is not None]
    leaves = [leaf for leaf in given if _is_dense(leaf) and is_float(leaf) and len(leaf.shape)]
    widths = [leaf.shape[1:] for leaf in leaves]
    if not leaves or any(length is None for width in widths for length in width):
        raise ValueError(
            "The default gate reads dense floating-point features whose shape is known but for "
            f"the rows. Received (as shapes): features={shapes(features)}, of dtypes "
            f"{_kinds(features)}. Pass `gate=`, a Keras layer from your features to logits of "
            "shape (rows, replicas), such as a Sequential of an Embedding, a "
            "GlobalAveragePooling1D and a Dense."
        )
    return leaves


def _weigh_rows(parts: list[Any], weights: Any) -> Any:
    """The sum of tensors of shape `(rows, ...)`, weighted by the columns of `(rows, replicas)`."""
    shape = tuple(parts[0].shape)
    if not fit(shape[:1], tuple(weights.shape[:1])):
        raise ValueError(
            "Every output must have the rows of the features along its first axis. Received: an "
            f"output of shape {shape} and features of {number_of(weights.shape[0], 'row')}. Give "
            "the features of the same batch, and one output per row."
        )
    column = (-1, *(1 for _ in shape[1:]))
    columns = [keras.ops.reshape(weights[:, index], column) for index in range(len(parts))]
    return weighted_sum(parts, columns)


def _is_dense(leaf: Any) -> bool:
    # Only sparse tensors have indices, and only ragged ones row splits, on every backend.
    return not hasattr(leaf, "indices") and not hasattr(leaf, "row_splits")


def _kinds(structure: Any) -> Any:
    def kind(leaf: Any) -> str | None:
        if leaf is None:
            return None
        dense = "" if _is_dense(leaf) else ", not dense"
        return keras.backend.standardize_dtype(leaf.dtype) + dense

    return keras.tree.map_structure(kind, structure)
