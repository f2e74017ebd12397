"""How a mix of replicas' outputs is built and called, and which losses fit it."""

from __future__ import annotations

import inspect
from typing import Any

import keras

from keras_multigpu.engines import is_array, reason_of
from keras_multigpu.layers.gaussian import GaussianMix, reads_gaussians
from keras_multigpu.layers.mixing import check_keeps_rows
from keras_multigpu.layers.outputs import Mix


def build_mix(mix: keras.Layer, outputs: Any, replicas: int, inputs: Any) -> Any:
    """The mix's symbolic outputs, from the symbolic outputs of a replica.

    Raises:
        ValueError: if the mix fails, or loses the rows.
    """
    try:
        mixed = call_mix(mix, [outputs] * replicas, inputs)
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        if isinstance(mix, Mix) and not isinstance(mix, keras.layers.Lambda):
            raise  # one of ours: it says what it needs
        given = mix.function if isinstance(mix, keras.layers.Lambda) else mix
        raise ValueError(
            f"`mix` must take one list, of the outputs of the {replicas} replicas, and mix them "
            f"with Keras's operations (`keras.ops`). Received: mix={given!r}, which fails: "
            f"{reason_of(error)}."
        ) from error
    if isinstance(mix, keras.layers.Lambda):
        check_keeps_rows(mix, outputs, replicas)
    return mixed


def features_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The inputs of a model among the arguments of its call."""
    given = (*args, *kwargs.values())
    arrays = (one for one in given if any(map(_is_tensor_or_symbol, keras.tree.flatten(one))))
    return next(arrays, given[0] if given else None)


def _is_tensor_or_symbol(value: Any) -> bool:
    return isinstance(value, keras.KerasTensor) or is_array(value)


def call_mix(mix: keras.Layer, outputs: list[Any], features: Any) -> Any:
    """Calls a mix, with the inputs of the model if it takes them."""
    takes_features = "features" in inspect.signature(mix.call).parameters
    return mix(outputs, features=features) if takes_features else mix(outputs)


def is_fit_by(mix: Any, loss: Any) -> bool:
    """Whether a loss reads what a mix gives."""
    return not isinstance(mix, GaussianMix) or reads_gaussians(loss)


def has_weights(mix: keras.Layer) -> bool:
    """Whether a mix has weights, or may get some when it is built."""
    never = (keras.layers.Lambda, GaussianMix)
    return bool(mix.variables) or not (mix.built or isinstance(mix, never))
