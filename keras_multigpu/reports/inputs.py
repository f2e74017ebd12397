"""Inputs to run a model with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_multigpu.graphs.graph import Graph, LayerCall, is_graph, read_graph
from keras_multigpu.layers import MultiHotDense

# Layers and operations that take indices, and the attribute with the number of valid ones.
_INDEX_TAKERS = {
    "Embedding": "input_dim",
    "ReversibleEmbedding": "input_dim",
    "MultiHotDense": "width",
    "CategoryEncoding": "num_tokens",
    "OneHot": "num_classes",
    "MultiHot": "num_classes",
}
# Operations whose outputs contain the integers of their inputs.
_PASS_ON = (
    *("BroadcastTo", "Cast", "Concatenate", "Copy", "ExpandDims", "Flatten", "GetItem"),
    *("Identity", "InputLayer", "Permute", "Repeat", "RepeatVector", "Reshape", "Split"),
    *("Squeeze", "Stack", "SwapAxes", "Tile", "Transpose"),
)
# Operations that index a table of unknown length.
_LOOK_UP = frozenset({"Take", "TakeAlongAxis", "Scatter", "ScatterUpdate", "Slice"})
_VALUES = 256  # integers that are no indices are drawn from 0 to 255


def make_inputs(model: keras.Model, rows: int) -> Any:
    """Random inputs for a model with known input shapes, in the model's structure.

    Where an `Embedding`, or another layer that looks up, takes integers, they are drawn evenly from
    all valid ones; other integers are from 0 to 255. A `ValueError` says which input has no known
    shape or range.
    """
    # A Sequential model has no `input`; in other models it has the structure.
    known = getattr(model, "inputs", None)
    structure = known and (known[0] if isinstance(model, keras.Sequential) else model.input)
    tensors = keras.tree.flatten(structure)
    if not known or any(None in one.shape[1:] or one.dtype == "string" for one in tensors):
        shapes = [(tuple(one.shape), one.dtype) for one in tensors] if known else "unknown"
        raise ValueError(
            "`inputs` must be given if the model's input shapes are unknown, or if it takes texts. "
            f"Received: model={model.name!r}, with the input shapes {shapes}. Give "
            f"`inputs=x[:{rows}]`, some rows of your data."
        )
    graph = read_graph(model) if is_graph(model) else None
    own = graph.inputs if graph else [None] * len(tensors)
    random = np.random.default_rng(0)
    made = [_make(model, graph, *pair, rows, random) for pair in zip(tensors, own)]
    return keras.tree.pack_sequence_as(structure, made)


def _make(
    model: keras.Model, graph: Graph | None, tensor: Any, own: Any, rows: int, random: Any
) -> np.ndarray:
    """Rows of one input."""
    shape, dtype = (rows, *tensor.shape[1:]), keras.backend.standardize_dtype(tensor.dtype)
    is_float = keras.backend.is_float_dtype(dtype)
    ranges = list(_ranges(graph, own)) if graph else [None]
    tops = [top for top in ranges if top is not None]
    if tops and min(tops) < math.inf:
        values = random.integers(0, int(min(tops)), shape)
        return values.astype("float32" if is_float else dtype)
    if is_float:
        return random.normal(size=shape).astype("float32")
    if dtype == "bool":
        return random.integers(0, 2, shape).astype("bool")
    if None in ranges:
        raise ValueError(
            "`inputs` must be given if the valid integers of an input are unknown. "
            f"Received: model={model.name!r}, with the input {tensor.name!r} of {dtype}. Give "
            f"`inputs=x[:{rows}]`, some rows of your data."
        )
    return random.integers(0, min(_VALUES, np.iinfo(dtype).max + 1), shape).astype(dtype)


def _ranges(graph: Graph, tensor: Any) -> Iterator[float | None]:
    """The number of valid integers of each call that uses a tensor, followed through `_PASS_ON`.

    `inf` if the call takes any integer, `None` if that is unknown.
    """
    waiting, seen = [tensor], set()
    while waiting:
        current = waiting.pop()
        for call in graph.calls:
            if id(call) in seen or not any(one is current for one in call.inputs):
                continue
            seen.add(id(call))
            if type(call.layer).__name__ in _PASS_ON and _is_keras(call.layer):
                waiting += call.outputs
            else:
                yield _range(call)


def _range(call: LayerCall) -> float | None:
    layer, name = call.layer, type(call.layer).__name__
    top = _own_range(layer)
    if top is not None:
        return top
    if _is_keras(layer) and not isinstance(layer, keras.Model):
        makes_integers = any("int" in str(one.dtype) for one in call.outputs)
        return None if makes_integers or name in _LOOK_UP else math.inf
    parts = layer._flatten_layers(include_self=False) if isinstance(layer, keras.Layer) else ()
    inside = {found for part in parts if (found := _own_range(part)) is not None}
    return inside.pop() if len(inside) == 1 else None


def _own_range(layer: Any) -> int | None:
    is_known = _is_keras(layer) or isinstance(layer, (keras.layers.Embedding, MultiHotDense))
    names = [kind.__name__ for kind in type(layer).__mro__ if kind.__name__ in _INDEX_TAKERS]
    return getattr(layer, _INDEX_TAKERS[names[0]]) if is_known and names else None


def _is_keras(layer: Any) -> bool:
    return type(layer).__module__.partition(".")[0] == "keras"
