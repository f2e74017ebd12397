"""Mixing: the outputs of several replicas become one prediction.

A mix is a Keras layer. It is called with a list that has one structure of outputs per replica, all
alike, and returns one such structure. Outputs that are not floating point (ids, booleans, strings)
and outputs that are `None` are those of the first replica: mix logits or probabilities, not
classes. Every output carries the Keras mask of the first replica's, and has its dtype; sums are
taken in float32 at least. A mix whose `call` has a second parameter named `features` is given the
model's inputs too: `mix(outputs, features=inputs)`.

A mix averages what the replicas give, whatever that is. The mean of logits is not the mean of
probabilities: as probabilities, it is their normalised geometric mean.

    >>> import numpy as np
    >>> logits = [np.array([[0.0, 4.0]], "float32"), np.array([[0.0, 0.0]], "float32")]
    >>> print(np.round(keras.ops.softmax(mean_mix()(logits)), 2))
    [[0.12 0.88]]
    >>> print(np.round(mean_mix()([keras.ops.softmax(part) for part in logits]), 2))
    [[0.26 0.74]]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras


class Mix(keras.Layer):
    """What the mixes have in common; abstract."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"autocast": False, **kwargs})
        self.supports_masking = True

    def compute_mask(self, inputs: list[Any], previous_mask: Any = None) -> Any:
        return None if previous_mask is None else previous_mask[0]

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        # A layer with `compute_output_shape` would take every output to be of its own dtype.
        return keras.Operation.compute_output_spec(self, *args, **kwargs)


@keras.saving.register_keras_serializable(package="keras_multigpu")
class MixLambda(Mix, keras.layers.Lambda):
    """A `keras.layers.Lambda` of the list of outputs that keeps their dtypes and masks."""

    @classmethod
    def from_config(cls, config: dict[str, Any], **kwargs: Any) -> MixLambda:
        # Keras's own writes into the dict that it is given, which could then be read only once.
        return super().from_config(dict(config), **kwargs)


def mean_mix(**kwargs: Any) -> keras.layers.Lambda:
    """A layer that gives the mean of the replicas' outputs.

    It averages the outputs as they are, logits or probabilities, and the two differ: see the
    example at the head of this module. The layer is a `keras.layers.Lambda` around a registered
    function, so that a file with it is loaded in safe mode.

    Args:
        **kwargs: those of `keras.Layer`.

    Input: a list with one structure per replica, of tensors of any shape.
    Output: one such structure.

    Raises:
        ValueError: if the layer is called on anything but such a list.

    Example:
        >>> import numpy as np
        >>> print(np.array(mean_mix()([np.array([[1.0, 2.0]]), np.array([[3.0, 6.0]])])))
        [[2. 4.]]
    """
    return MixLambda(mean_of_replicas, **kwargs)


@keras.saving.register_keras_serializable(package="keras_multigpu")
def mean_of_replicas(outputs: list[Any]) -> Any:
    """The mean of a list of structures of tensors, leaf by leaf."""
    return mix_leaves(average, outputs)


@keras.saving.register_keras_serializable(package="keras_multigpu")
class WeightedMix(Mix):
    """A learned convex combination of the replicas' outputs, the same for all outputs and rows.

    `sum_i w_i * output_i` with `w = softmax(logits)`: the layer's one weight, `logits` of shape
    `(replicas,)`, begins as zeros, which gives the mean. It combines the outputs as they are,
    logits or probabilities, and the two differ: see the example at the head of this module.

    Args:
        **kwargs: those of `keras.Layer`.

    Input: a list with one structure per replica, of tensors of any shape.
    Output: one such structure.

    Raises:
        ValueError: if the layer is called on anything but such a list, or on another number of
            replicas than it was built for.

    Example:
        >>> import numpy as np
        >>> mix, outputs = WeightedMix(), [np.array([[0.0]]), np.array([[4.0]])]
        >>> print(np.array(mix(outputs)))
        [[2.]]
        >>> mix.set_weights([np.log([1.0, 3.0])])
        >>> print(np.round(mix(outputs), 4))
        [[3.]]
    """

    def build(self, outputs_shape: list[Any] | None = None) -> None:
        shape = (count_replicas(outputs_shape),)
        self.logits = self.add_weight(shape, "zeros", name="logits", autocast=False)

    def call(self, outputs: list[Any]) -> Any:
        built_for = self.logits.shape[0]
        if count_replicas(outputs) != built_for:
            raise ValueError(
                f"This `WeightedMix` has weights for the outputs of {built_for} replicas. "
                f"Received: outputs of {len(outputs)} replicas. Create a new layer for them."
            )
        weights = _softmax(self.logits)
        shares = [weights[index] for index in range(built_for)]
        return mix_leaves(lambda parts: weighted_sum(parts, shares), outputs)

    def compute_output_shape(self, outputs_shape: list[Any]) -> Any:
        return outputs_shape[0]


@keras.saving.register_keras_serializable(package="keras_multigpu")
class GatedMix(Mix):
    """A mixture of experts: a gating network on the inputs weights the replicas, row by row.

    `sum_i w_i(x) * output_i` with `w(x) = softmax(gate(x))` (Jacobs, Jordan, Nowlan and Hinton,
    "Adaptive mixtures of local experts", 1991). It combines the outputs as they are, logits or
    probabilities, and the two differ: see the example at the head of this module.

    Args:
        gate: a Keras layer or model from the features to logits of shape `(rows, replicas)`.
            The default is `Dense(hidden, "tanh")` and `Dense(replicas)` on all dense
            floating-point features, each row flattened; it begins as the mean.
        hidden: the units of the default gate's hidden layer.
        balance: how strongly the gate is kept from always choosing the same replicas: in
            training, `balance * CV^2` is added to the loss, the squared coefficient of variation
            of the weights' sums over the batch (Shazeer et al., "Outrageously large neural
            networks", 2017, the importance loss).
        **kwargs: those of `keras.Layer`.

    Input: a list with one structure per replica, of tensors of shape `(rows, ...)`; and
        `features`, the inputs of the model, which the gate reads.
    Output: one such structure.

    Raises:
        ValueError: if an argument is not of that kind, the layer is called on anything but such
            a list, the gate can't read the features, or gives no logit per replica.

    Example:
        >>> import numpy as np
        >>> outputs = [np.array([[0.0], [0.0]]), np.array([[4.0], [4.0]])]
        >>> print(np.array(GatedMix()(outputs, features=np.array([[1.0], [2.0]]))))
        [[2.]
         [2.]]
    """

    def __init__(
        self,
        gate: keras.Layer | None = None,
        hidden: int = 16,
        balance: float = 0.0,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if gate is not None and not isinstance(gate, keras.Layer):
            raise ValueError(
                "`gate` must be a Keras layer from the features to logits of shape "
                f"(rows, replicas), or None. Received: gate={gate!r}. Wrap a function in a "
                "`keras.layers.Lambda`, and create a layer from its class."
            )
        if isinstance(hidden, bool) or not isinstance(hidden, int) or hidden < 1:
            raise ValueError(f"`hidden` must be a positive integer. Received: hidden={hidden!r}.")
        if isinstance(balance, bool) or not isinstance(balance, int | float) or not balance >= 0:
            raise ValueError(
                f"`balance` must be a number from 0 up. Received: balance={balance!r}."
            )
        self.gate: Any = gate
        self.hidden = hidden
        self.balance = balance
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
            importance = keras.ops.sum(weights, axis=0)
            self.add_loss(self.balance * _squared_variation(importance))
        return mix_leaves(lambda parts: _weigh_rows(parts, weights), outputs)

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
        return _softmax(logits)

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


def get_mix(mix: Any) -> keras.Layer:
    """The Keras layer that a user means by `mix`.

    Args:
        mix: `"mean"`, `"weighted"`, `"gaussian"` or `"gated"`; a Keras layer; or a function from
            the list of outputs to one structure, which becomes a `keras.layers.Lambda`. A file
            with a Python lambda or a local function in it can't be loaded in safe mode: give the
            function a name and `keras.saving.register_keras_serializable`.

    Raises:
        ValueError: if it is none of these.

    Example:
        >>> get_mix("weighted").__class__.__name__
        'WeightedMix'
    """
    # Imported here because it stands on this module.
    from keras_multigpu.layers.gaussian import GaussianMix

    named: dict[str, Callable[[], keras.Layer]]
    named = {"mean": mean_mix, "weighted": WeightedMix, "gaussian": GaussianMix, "gated": GatedMix}
    if isinstance(mix, str) and mix in named:
        return named[mix]()
    if isinstance(mix, keras.Layer):
        return mix
    if callable(mix) and not isinstance(mix, type):
        return MixLambda(mix)
    cure = "Choose one of these."
    if isinstance(mix, type):
        cure = f"Give an instance, not the class: `mix={mix.__name__}(...)`."
    raise ValueError(
        f"`mix` must be one of {', '.join(map(repr, named))}, a Keras layer, or a function of the "
        f"list of the replicas' outputs. Received: mix={mix!r}. {cure}"
    )


def mix_leaves(mix: Callable[[list[Any]], Any], outputs: list[Any]) -> Any:
    """One structure of tensors from a list of structures.

    Args:
        mix: from the replicas' tensors at one place, in float32 at least, to one tensor. Where
            they are not floating point, the first replica's is taken instead.
        outputs: a list with one structure of tensors per replica.
    """
    count_replicas(outputs)
    first = outputs[0]
    for index, other in enumerate(outputs):
        if not _are_alike(first, other):
            raise ValueError(
                "The outputs of all replicas must have the same structure and shapes. Received "
                f"(as shapes): outputs[0]={_shapes(first)}, outputs[{index}]={_shapes(other)}. "
                "Mix the outputs of replicas of one model."
            )

    def mix_leaf(*parts: Any) -> Any:
        if parts[0] is None or not _is_float(parts[0]):
            return parts[0]
        wide = wide_dtype(parts[0].dtype)
        # Keras takes the product of a symbolic tensor and a number to be sparse.
        dense = [keras.ops.convert_to_tensor(part, sparse=False) for part in parts]
        mixed = mix([keras.ops.cast(part, wide) for part in dense])
        return keras.ops.cast(mixed, parts[0].dtype)

    return keras.tree.map_structure(mix_leaf, *outputs)


def count_replicas(outputs: Any) -> int:
    """The length of a list of outputs, or of their shapes (Keras gives `None` for no tensor)."""
    if isinstance(outputs, list) and outputs:
        return len(outputs)
    raise ValueError(
        "A mix needs a list with one structure of outputs per replica, at least one. Received "
        f"(as shapes): outputs={[] if outputs is None else _shapes(outputs)}. Put the outputs "
        "into a list: `mix([first, second])`."
    )


def average(parts: Sequence[Any]) -> Any:
    """The mean of some tensors."""
    return sum(parts[1:], parts[0]) / len(parts)


def weighted_sum(parts: Sequence[Any], weights: Sequence[Any]) -> Any:
    """`sum_i weights_i * parts_i`, in the dtype of the parts."""
    dtype = parts[0].dtype
    products = [keras.ops.cast(weight, dtype) * part for weight, part in zip(weights, parts)]
    return sum(products[1:], products[0])


def wide_dtype(dtype: Any) -> str:
    """The dtype in which values of a floating-point dtype are summed."""
    return "float64" if keras.backend.standardize_dtype(dtype) == "float64" else "float32"


def fit(shape: tuple[int | None, ...], other: tuple[int | None, ...]) -> bool:
    """Whether two shapes can be the same, as far as they are known."""
    pairs = zip(shape, other)
    return len(shape) == len(other) and all(a == b or None in (a, b) for a, b in pairs)


def _softmax(logits: Any) -> Any:
    # `keras.ops.softmax` warns of one logit, which is all that a committee of one has.
    logits = keras.ops.cast(logits, wide_dtype(logits.dtype))
    return keras.ops.exp(logits - keras.ops.logsumexp(logits, axis=-1, keepdims=True))


def _flat_rows(features: Any, dtype: str) -> Any:
    """All dense floating-point features beside each other, of shape `(rows, columns)`."""
    given = [leaf for leaf in keras.tree.flatten(features) if leaf is not None]
    leaves = [leaf for leaf in given if _is_dense(leaf) and _is_float(leaf) and len(leaf.shape)]
    widths = [leaf.shape[1:] for leaf in leaves]
    if not leaves or any(length is None for width in widths for length in width):
        raise ValueError(
            "The default gate reads dense floating-point features whose shape is known but for "
            f"the rows. Received (as shapes): features={_shapes(features)}, of dtypes "
            f"{_kinds(features)}. Pass `gate=`, a Keras layer from your features to logits of "
            "shape (rows, replicas), such as a Sequential of an Embedding, a "
            "GlobalAveragePooling1D and a Dense."
        )
    columns = [
        keras.ops.reshape(keras.ops.cast(leaf, dtype), (-1, math.prod(width)))
        for leaf, width in zip(leaves, widths)
    ]
    return keras.ops.concatenate(columns, axis=1)


def _weigh_rows(parts: list[Any], weights: Any) -> Any:
    """The sum of tensors of shape `(rows, ...)`, weighted by the columns of `(rows, replicas)`."""
    shape = tuple(parts[0].shape)
    if not fit(shape[:1], tuple(weights.shape[:1])):
        raise ValueError(
            "Every output must have the rows of the features along its first axis. Received: an "
            f"output of shape {shape} and features of {weights.shape[0]} rows. Give the features "
            "of the same batch, and one output per row."
        )
    column = (-1, *(1 for _ in shape[1:]))
    columns = [keras.ops.reshape(weights[:, index], column) for index in range(len(parts))]
    return weighted_sum(parts, columns)


def _squared_variation(values: Any) -> Any:
    """The squared coefficient of variation; 0 where all values are 0, as for a batch of no rows."""
    mean = keras.ops.mean(values)
    return keras.ops.divide_no_nan(keras.ops.var(values), mean * mean)


def _is_float(tensor: Any) -> bool:
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype))


def _is_dense(leaf: Any) -> bool:
    # Only sparse tensors have indices, and only ragged ones row splits, on every backend.
    return not hasattr(leaf, "indices") and not hasattr(leaf, "row_splits")


def _are_alike(first: Any, other: Any) -> bool:
    try:
        keras.tree.assert_same_structure(first, other)
    except (TypeError, ValueError):
        return False
    pairs = zip(keras.tree.flatten(first), keras.tree.flatten(other))
    return all(
        a is b if a is None or b is None else fit(tuple(a.shape), tuple(b.shape)) for a, b in pairs
    )


def _shapes(structure: Any) -> Any:
    return keras.tree.map_structure(
        lambda leaf: tuple(leaf.shape) if hasattr(leaf, "shape") else leaf, structure
    )


def _kinds(structure: Any) -> Any:
    def kind(leaf: Any) -> str | None:
        if leaf is None:
            return None
        dense = "" if _is_dense(leaf) else ", not dense"
        return keras.backend.standardize_dtype(leaf.dtype) + dense

    return keras.tree.map_structure(kind, structure)
