"""The base class and helpers of the mixes, which work on one structure of outputs per replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_multigpu.engines.attributes import get_attributes, set_attributes


class Mix(keras.Layer):
    """The abstract base of the mixes."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"autocast": False, **kwargs})
        self.supports_masking = True

    def compute_mask(self, inputs: list[Any], previous_mask: Any = None) -> Any:
        return None if previous_mask is None else previous_mask[0]

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        # With `compute_output_shape`, Keras would assume that outputs have the layer's dtype.
        return keras.Operation.compute_output_spec(self, *args, **kwargs)


def mix_leaves(mix: Callable[[list[Any]], Any], outputs: list[Any]) -> Any:
    """Mixes a list of structures, leaf by leaf, into one.

    `mix` gets the replicas' tensors in float32 at least. Leaves that are not floating point come
    from the first replica.
    """
    count_replicas(outputs)
    first = outputs[0]
    for index, other in enumerate(outputs):
        if not are_alike(first, other):
            raise ValueError(
                "The outputs of all replicas must have the same structure and shapes. Received "
                f"(as shapes): outputs[0]={shapes(first)}, outputs[{index}]={shapes(other)}. "
                "Mix the outputs of replicas of one model."
            )

    def mix_leaf(*parts: Any) -> Any:
        if parts[0] is None or not is_float(parts[0]):
            return parts[0]
        wide = wide_dtype(parts[0].dtype)
        # Keras marks the product of a symbolic tensor and a number as sparse.
        dense = [keras.ops.convert_to_tensor(part, sparse=False) for part in parts]
        mixed = mix([keras.ops.cast(part, wide) for part in dense])
        return keras.ops.cast(mixed, parts[0].dtype)

    return keras.tree.map_structure(mix_leaf, *outputs)


def hand_on_logits(outputs: list[Any], mixed: Any) -> None:
    """Attaches averaged logits to `mixed`, the average of equal outputs.

    Keras computes losses from them. A mean of different probabilities has no logits.
    """
    for whole, *parts in zip(*map(keras.tree.flatten, (mixed, *outputs))):
        logits = [get_attributes(part).get("logits") for part in parts]
        if all(part is not None for part in logits):
            set_attributes(whole, {"logits": mix_leaves(average, logits)})


def count_replicas(outputs: Any) -> int:
    """The length of a list of outputs, or of their shapes (Keras passes `None` for no tensor)."""
    if isinstance(outputs, list) and outputs:
        return len(outputs)
    raise ValueError(
        "A mix needs a list with one structure of outputs per replica, at least one. Received "
        f"(as shapes): outputs={[] if outputs is None else shapes(outputs)}. Put the outputs "
        "into a list: `mix([first, second])`."
    )


def average(parts: Sequence[Any]) -> Any:
    """The mean of tensors."""
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
    """Whether two shapes can be equal; unknown lengths match any."""
    pairs = zip(shape, other)
    return len(shape) == len(other) and all(a == b or None in (a, b) for a, b in pairs)


def softmax(logits: Any) -> Any:
    """Weights that add up to one along the last axis."""
    # `keras.ops.softmax` warns about a single logit, as in a committee of one.
    logits = keras.ops.cast(logits, wide_dtype(logits.dtype))
    return keras.ops.exp(logits - keras.ops.logsumexp(logits, axis=-1, keepdims=True))


def is_float(tensor: Any) -> bool:
    """Whether a tensor holds floating-point numbers."""
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype))


def are_alike(first: Any, other: Any) -> bool:
    """Whether two structures of tensors can have the same shapes."""
    try:
        keras.tree.assert_same_structure(first, other)
    except (TypeError, ValueError):
        return False
    pairs = zip(keras.tree.flatten(first), keras.tree.flatten(other))
    return all(
        a is b if a is None or b is None else fit(tuple(a.shape), tuple(b.shape)) for a, b in pairs
    )


def shapes(structure: Any) -> Any:
    """The shapes of a structure of tensors, for messages."""
    return keras.tree.map_structure(
        lambda leaf: tuple(leaf.shape) if hasattr(leaf, "shape") else leaf, structure
    )
