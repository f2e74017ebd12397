"""Mixes: layers that turn the outputs of several replicas into one prediction.

A mix takes a list with one structure of outputs per replica, all alike, and returns one structure.
Outputs that are `None` or not floating point (ids, booleans, strings) are copied from the first
replica, so mix logits or probabilities, not classes. Every output has the first replica's Keras
mask and dtype; sums are taken in float32 at least. If the mix's `call` has a second parameter named
`features`, it also gets the model's inputs: `mix(outputs, features=inputs)`.

A mix averages the outputs as they are. The mean of logits is not the mean of probabilities: after
a softmax, it is their normalised geometric mean.

    >>> import numpy as np
    >>> logits = [np.array([[0.0, 4.0]], "float32"), np.array([[0.0, 0.0]], "float32")]
    >>> print(np.round(keras.ops.softmax(mean_mix()(logits)), 2))
    [[0.12 0.88]]
    >>> print(np.round(mean_mix()([keras.ops.softmax(part) for part in logits]), 2))
    [[0.26 0.74]]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_multigpu.arguments import number_of
from keras_multigpu.layers.gated import GatedMix
from keras_multigpu.layers.gaussian import GaussianMix
from keras_multigpu.layers.outputs import (
    Mix,
    average,
    count_replicas,
    mix_leaves,
    shapes,
    softmax,
    weighted_sum,
)


@keras.saving.register_keras_serializable(package="keras_multigpu")
class MixLambda(Mix, keras.layers.Lambda):
    """A `keras.layers.Lambda` on the list of outputs that keeps dtypes and masks."""

    def call(self, inputs: Any, **kwargs: Any) -> Any:
        mixed = super().call(inputs, **kwargs)
        if mixed is None:
            raise ValueError(
                "A function that mixes must return the mixed outputs. Received: "
                f"{self.function.__name__!r}, which returns None. Write `return ...`."
            )
        return mixed

    @classmethod
    def from_config(cls, config: dict[str, Any], **kwargs: Any) -> MixLambda:
        # A copy, because Keras's method changes the dict, which could then be read only once.
        return super().from_config(dict(config), **kwargs)


def mean_mix(**kwargs: Any) -> keras.layers.Lambda:
    """A layer that returns the mean of the replicas' outputs.

    It averages the outputs as they are. Means of logits and of probabilities differ: see the
    example at the head of this module. The layer is a `keras.layers.Lambda` around a registered
    function, so files with it load in safe mode.

    Args:
        **kwargs: those of `keras.Layer`.

    Input: a list with one structure per replica, of tensors of any shape.
    Output: one structure.

    Raises:
        ValueError: if the layer is called on anything else.

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
    `(replicas,)`, begins as zeros, which gives the mean. It combines the outputs as they are.
    Logits and probabilities give different results: see the example at the head of this module.

    Args:
        **kwargs: those of `keras.Layer`.

    Input: a list with one structure per replica, of tensors of any shape.
    Output: one structure.

    Raises:
        ValueError: if the layer is called on anything else, or on another number of replicas than
            it was built for.

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
                "This `WeightedMix` has weights for the outputs of "
                f"{number_of(built_for, 'replica')}. Received: outputs of "
                f"{number_of(len(outputs), 'replica')}. Create a new layer for them."
            )
        weights = softmax(self.logits)
        shares = [weights[index] for index in range(built_for)]
        return mix_leaves(lambda parts: weighted_sum(parts, shares), outputs)

    def compute_output_shape(self, outputs_shape: list[Any]) -> Any:
        return outputs_shape[0]


def check_keeps_rows(mix: keras.layers.Lambda, outputs: Any, replicas: int) -> None:
    """Refuses a function that mixes rows, by symbolic outputs of some rows.

    Raises:
        ValueError: if the first axis of what it returns isn't that of the outputs.
    """

    def with_rows(leaf: Any) -> Any:
        return keras.KerasTensor((leaf.shape[0] or replicas + 1, *leaf.shape[1:]), leaf.dtype)

    if not all(leaf.shape for leaf in keras.tree.flatten(outputs)):
        return  # a replica returns a number, not rows
    given = keras.tree.map_structure(with_rows, outputs)
    rows = {leaf.shape[0] for leaf in keras.tree.flatten(given)}
    mixed = keras.tree.flatten(mix.compute_output_spec([given] * replicas))
    if any(not one.shape or one.shape[0] not in rows for one in mixed):
        raise ValueError(
            "`mix` must return outputs of the same rows as each replica's, along the first axis. "
            f"Received: mix={mix.function!r}, which makes "
            f"{', '.join(str(tuple(one.shape)) for one in mixed)} of {replicas} outputs of the "
            f"shapes {shapes(given)}. Mix along a new axis: "
            "`keras.ops.mean(keras.ops.stack(outputs), axis=0)`, for example."
        )


def is_average(mix: keras.Layer) -> bool:
    """Whether a mix is a mean, weighted or not, which leaves equal outputs unchanged."""
    is_mean = isinstance(mix, keras.layers.Lambda) and mix.function is mean_of_replicas
    return is_mean or isinstance(mix, WeightedMix | GatedMix)


def get_mix(mix: Any) -> keras.Layer:
    """The Keras layer for the argument `mix`; a function becomes a `keras.layers.Lambda`.

    Files with a Python lambda or a local function don't load in safe mode: name the function and
    register it by `keras.saving.register_keras_serializable`.
    """
    named: dict[str, Callable[[], keras.Layer]]
    named = {"mean": mean_mix, "weighted": WeightedMix, "gaussian": GaussianMix, "gated": GatedMix}
    if isinstance(mix, str) and mix in named:
        return named[mix]()
    if isinstance(mix, keras.Layer):
        return mix
    is_numpys = getattr(mix, "__module__", None) == "numpy"
    cure = "Choose one of these."
    if isinstance(mix, str) and mix.lower() in ("average", "avg"):
        cure = "Write `mix='mean'`."
    if callable(mix) and not isinstance(mix, type) and not is_numpys and mix is not mean_mix:
        try:
            return MixLambda(mix)
        except TypeError:  # Keras reads its arguments
            cure = "Its arguments can't be read: wrap it, `mix=lambda outputs: ...`."
    if mix is mean_mix:
        cure = "Give the layer that it makes: `mix=mean_mix()`."
    if is_numpys:
        cure = "NumPy's functions can't be trained through: use those of `keras.ops`."
    if isinstance(mix, type):
        cure = f"Give an instance, not the class: `mix={mix.__name__}(...)`."
    raise ValueError(
        f"`mix` must be one of {', '.join(map(repr, named))}, a Keras layer, or a function of the "
        f"list of the replicas' outputs. Received: mix={mix!r}. {cure}"
    )
