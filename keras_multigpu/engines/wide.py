"""Tensor parallelism: which weights are spread over several devices, and along which axis."""

from __future__ import annotations

import collections
import dataclasses
import math
import warnings
import weakref
from collections.abc import Collection, Sequence

import keras

from keras_multigpu.arguments import number_of
from keras_multigpu.engines.templates import is_built
from keras_multigpu.engines.values import Request
from keras_multigpu.graphs.costs import flops
from keras_multigpu.graphs.graph import is_graph, read_graph

SPREAD = "spread"
"""The placement of large layers on all devices."""

# Of which models, on how many devices, it was said that they have little to spread.
_told: weakref.WeakKeyDictionary[keras.Model, set[int]] = weakref.WeakKeyDictionary()
# A weight with a smaller share of the model than this is not spread.
_LEAST_SHARE = 0.01
_MOST_UNDIVIDED = 0.25  # of the weights, which no warning names
_LEAST_WORK = 0.1  # of which a warning says that it is little
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
    large = _large(model)
    names = names_of(model)
    axes = {names[id(kernel)]: _axis(layer, kernel.shape, count) for layer, kernel in large}
    found = {path: axis for path, axis in axes.items() if axis is not None}
    if not found:
        shapes = _named([kernel for _, kernel in large])
        raise ValueError(
            "What is spread over several devices are the weights of large `Dense`, `EinsumDense`, "
            f"`Embedding` and attention layers. Received: the model {model.name!r} and {count} "
            f"devices, with no such weight of which an axis can be divided by {count} "
            f"({shapes or 'there is no such layer'}). "
            f"{'Choose another number of devices, or use' if large else 'Use'} `mode='data'`, "
            "without `model_devices` or `placement`."
        )
    return found


def wide_variables(model: keras.Model, count: int) -> list[tuple[keras.Variable, int]]:
    """The variables that `find_wide` finds, each with its axis."""
    axes, names = find_wide(model, count), names_of(model)
    return [(one, axes[names[id(one)]]) for one in model.variables if names[id(one)] in axes]


def _large(model: keras.Model) -> list[tuple[keras.Layer, keras.Variable]]:
    """The layers of the kinds that are spread whose kernels are large, and these."""
    total = sum(math.prod(variable.shape) for variable in model.variables)
    kinds = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding)
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, kinds)]
    # The largest weight of each.
    found = [
        (one, max(one.weights, key=lambda v: math.prod(v.shape))) for one in layers if one.weights
    ]
    return [(one, v) for one, v in found if math.prod(v.shape) >= _LEAST_SHARE * total]


def check_wide(model: keras.Model, count: int) -> None:
    """Refuses a model without layers to spread.

    Warns:
        UserWarning: if what is spread is a small part of the weights or of the work; once.
    """
    axes, names = find_wide(model, count), names_of(model)
    told = _told.setdefault(model, set())
    if count in told:
        return
    sizes = {id(one): math.prod(one.shape) for one in model.variables}
    undivided = [kernel for _, kernel in _large(model) if names[id(kernel)] not in axes]
    share = sum(sizes[id(one)] for one in undivided) / sum(sizes.values())
    if share > _MOST_UNDIVIDED:
        warnings.warn(
            f"A large layer is spread over {count} devices along an axis of its kernel that "
            f"{count} divides. Received: {_named(undivided)}, {share:.0%} of the weights of "
            f"{model.name!r}, whole on each device, or on one. Choose lengths that "
            f"{count} divides, or another number of devices.",
            stacklevel=6,
        )
    elif is_graph(model) and (work := spread_work(model, axes)) < _LEAST_WORK:
        warnings.warn(
            f"Large layers, which are spread over {count} devices, do about {work:.0%} of the "
            f"work of {model.name!r}. One of the devices does the rest, or each: this saves memory "
            "and hardly time. To save time use `mode='data'` without `model_devices`.",
            stacklevel=6,
        )
    told.add(count)


def busiest_share(model: keras.Model, count: int) -> float:
    """The work of the device that does what is not spread, too, relative to one device."""
    return 1 - (1 - 1 / count) * spread_work(model, find_wide(model, count))


def spread_work(model: keras.Model, axes: Collection[str]) -> float:
    """The share of the work that layers do whose weights are spread; without a graph, of these."""
    names = names_of(model)
    work = {True: 0.0, False: 0.0}
    if is_graph(model):
        for call in read_graph(model).calls:
            work[any(names.get(id(one)) in axes for one in call.variables)] += flops(call)
    else:
        for variable in model.variables:
            work[names[id(variable)] in axes] += math.prod(variable.shape)
    return work[True] / max(sum(work.values()), 1.0)


def check_mesh(request: Request, owners: Sequence[int]) -> None:
    """Refuses `model_devices` that don't fit the devices, the model, or another option.

    `owners`: of joined processes, which of them has each device.
    """
    width, count = request.options.get("model_devices", 1), len(request.devices)
    if width == 1:
        return
    if count % width:
        raise ValueError(
            "`model_devices` must divide the number of devices: each group of so many computes a "
            f"slice of the batch. Received: model_devices={width} and "
            f"{number_of(count, 'device')}. Take {count - count % width or width} devices, or "
            "another `model_devices`."
        )
    if any(len(set(owners[k : k + width])) > 1 for k in range(0, len(owners), width)):
        raise ValueError(
            "`model_devices` must divide the number of devices of each process: a group is within "
            f"one. Received: model_devices={width} and devices of the processes "
            f"{', '.join(map(str, owners))}. Take another `model_devices`, the devices in the "
            "order of their processes, or `shard='weights'`."
        )
    if is_built(request.template):
        check_wide(request.template, width)


def adapt_mesh(request: Request) -> Request:
    """On other devices, as many whole groups as there are; of fewer than one, a smaller group."""
    width, devices = request.options.get("model_devices", 1), request.devices
    if width == 1:
        return request
    if len(devices) >= width:
        devices = devices[: len(devices) - len(devices) % width]
    else:
        devices = usable(request.template, devices)
    options = {**request.options, "model_devices": min(width, len(devices))}
    return dataclasses.replace(request, devices=devices, options=options)


def usable(model: keras.Model, devices: tuple[str, ...]) -> tuple[str, ...]:
    """As many of the devices as the weights of a model can be spread over."""
    while is_built(model) and len(devices) > 1:
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


def _named(kernels: Sequence[keras.Variable]) -> str:
    return ", ".join(f"{kernel.path} {tuple(kernel.shape)}" for kernel in kernels)


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
