"""Tensor parallelism: which weights model mode spreads over all devices, and along which axis."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

import keras

SPREAD = "spread"
"""The placement of large layers on all devices."""

# A weight with a smaller share of the model than this is not spread.
_LEAST_SHARE = 0.01
# Where the heads are in the kernels of an attention layer.
_HEADS = {"query": 1, "key": 1, "value": 1, "attention_output": 0}


def find_wide(model: keras.Model, count: int) -> dict[str, int]:
    """The kernels to spread over a number of devices, and along which axis.

    Attention is spread by heads, `Embedding` by features, `Dense` and `EinsumDense` along their
    longest axis. A layer that widens is then spread by outputs, and a following one that narrows
    by inputs, so that one sum crosses instead of the wide activation (Shoeybi et al.,
    "Megatron-LM", 2019).

    Returns:
        The axis, by the weight's path; a number is appended if another weight has the same path.

    Raises:
        ValueError: if no large layer can be spread over this number of devices.
    """
    total = sum(math.prod(variable.shape) for variable in model.variables)
    kinds = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding)
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, kinds)]
    kernels = {id(layer): _kernel(layer) for layer in layers}
    large = [
        (layer, kernel)
        for layer in layers
        if (kernel := kernels[id(layer)]) is not None
        and math.prod(kernel.shape) >= _LEAST_SHARE * total
    ]
    names = names_of(model)
    axes = {names[id(kernel)]: _axis(layer, kernel.shape, count) for layer, kernel in large}
    found = {path: axis for path, axis in axes.items() if axis is not None}
    if not found:
        shapes = ", ".join(f"{kernel.path} {tuple(kernel.shape)}" for _, kernel in large)
        raise ValueError(
            "Model mode can spread the weights of large `Dense`, `EinsumDense`, `Embedding` and "
            f"attention layers over the devices. Received: the model {model.name!r} and {count} "
            f"devices, with no such weight of which an axis can be divided by {count} "
            f"({shapes or 'there is no such layer'}). Choose another number of devices, or use "
            "`mode='data'`."
        )
    return found


def usable(model: keras.Model, devices: tuple[str, ...]) -> tuple[str, ...]:
    """As many of the devices as the weights of a model can be spread over."""
    while model.built and len(devices) > 1:
        try:
            find_wide(model, len(devices))
        except ValueError:
            devices = devices[:-1]
        else:
            break
    return devices


def names_of(model: keras.Model) -> dict[int, str]:
    """A name for each variable, by its `id`: paths alone may repeat."""
    names: dict[int, str] = {}
    seen: collections.Counter[str] = collections.Counter()
    for variable in model.variables:
        seen[variable.path] += 1
        number = seen[variable.path]
        names[id(variable)] = f"{variable.path} ({number})" if number > 1 else variable.path
    return names


def _kernel(layer: keras.Layer) -> keras.Variable | None:
    """The largest weight of a layer."""
    return max(layer.weights, key=lambda weight: math.prod(weight.shape), default=None)


def _axis(layer: keras.Layer, shape: Sequence[int], count: int) -> int | None:
    """The axis of a kernel to spread; `None` if the devices divide no axis."""
    divided = [axis for axis, length in enumerate(shape) if length % count == 0]
    if isinstance(layer, keras.layers.Embedding):
        wanted: int | None = 1
    else:
        wanted = _HEADS.get(layer.name) if len(shape) == 3 else None
    if wanted in divided:
        return wanted
    return max(divided, key=lambda axis: (shape[axis], axis), default=None)
