"""Batches to time a step with: the user's rows, or made ones that look like them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_multigpu.graphs.graph import Graph, LayerCall, is_graph, read_graph
from keras_multigpu.layers import MultiHotDense

# Layers and operations that take indices, and the attribute that says how many there are.
_INDEX_TAKERS = {
    "Embedding": "input_dim",
    "ReversibleEmbedding": "input_dim",
    "MultiHotDense": "width",
    "CategoryEncoding": "num_tokens",
    "OneHot": "num_classes",
    "MultiHot": "num_classes",
}
# Operations that hand integers on as they are.
_HAND_ON = (
    *("BroadcastTo", "Cast", "Concatenate", "Copy", "ExpandDims", "Flatten", "GetItem"),
    *("Identity", "InputLayer", "Permute", "Repeat", "RepeatVector", "Reshape", "Split"),
    *("Squeeze", "Stack", "SwapAxes", "Tile", "Transpose"),
)
# Operations that look values up in a table that they don't tell.
_LOOK_UP = frozenset({"Take", "TakeAlongAxis", "Scatter", "ScatterUpdate", "Slice"})
_VALUES = 256  # integers that are no indices are drawn from 0 to 255


def take(inputs: Any, rows: int) -> Any:
    """The first rows of arrays in any structure."""
    return keras.tree.map_structure(lambda part: part[:rows], inputs)


def repeat(arrays: Any, times: int) -> Any:
    """The rows of arrays in any structure, several times."""
    return keras.tree.map_structure(
        lambda part: np.concatenate([keras.ops.convert_to_numpy(part)] * times), arrays
    )


def check_rows(name: str, arrays: Any, batch_size: int) -> Any:
    """The arrays, `None` if there are none.

    Raises:
        ValueError: if an array has fewer rows than a batch.
    """
    if arrays is None:
        return None
    shapes = [tuple(np.shape(part)) for part in keras.tree.flatten(arrays)]
    if not shapes or any(not shape or shape[0] < batch_size for shape in shapes):
        raise ValueError(
            f"`{name}` must have at least batch_size={batch_size} rows, for a step on a whole "
            f"batch to be timed. Received: {name} of the shapes {shapes}. Give `x[:{batch_size}]`."
        )
    return arrays


def make_inputs(model: keras.Model, rows: int) -> Any:
    """Inputs for a model that tells their shapes: random numbers.

    What an `Embedding`, or another layer that looks up, takes are integers drawn evenly from all
    that it knows; other integers are from 0 to 255.

    Args:
        model: a Functional model, or a Sequential one that is built.
        rows: how many rows to make.

    Raises:
        ValueError: if the model does not tell the shape of an input, or the range of integers.

    Example:
        >>> words = keras.Input((3,), dtype="int32")
        >>> model = keras.Sequential([words, keras.layers.Embedding(9, 2)])
        >>> made = make_inputs(model, 500)
        >>> made.shape, int(made.min()), int(made.max())
        ((500, 3), 0, 8)
    """
    # A Sequential model has no `input` of its own, others keep the structure there.
    known = getattr(model, "inputs", None)
    structure = known and (known[0] if isinstance(model, keras.Sequential) else model.input)
    tensors = keras.tree.flatten(structure)
    if not known or any(None in one.shape[1:] or one.dtype == "string" for one in tensors):
        shapes = [(tuple(one.shape), one.dtype) for one in tensors] if known else "not known"
        raise ValueError(
            "`inputs` must be given for a model that does not tell the shapes of its inputs, or "
            f"takes texts. Received: model={model.name!r}, with the input shapes {shapes}. Give "
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
            "`inputs` must be given for a model whose layers don't tell which integers they take. "
            f"Received: model={model.name!r}, with the input {tensor.name!r} of {dtype}. Give "
            f"`inputs=x[:{rows}]`, some rows of your data."
        )
    return random.integers(0, min(_VALUES, np.iinfo(dtype).max + 1), shape).astype(dtype)


def _ranges(graph: Graph, tensor: Any) -> Iterator[float | None]:
    """How many integers each taker of a tensor knows: `inf` if any will do, `None` if not known."""
    waiting, seen = [tensor], set()
    while waiting:
        current = waiting.pop()
        for call in graph.calls:
            if id(call) in seen or not any(one is current for one in call.inputs):
                continue
            seen.add(id(call))
            if type(call.layer).__name__ in _HAND_ON and _is_keras(call.layer):
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
    inside = {found for part in _parts(layer) if (found := _own_range(part)) is not None}
    return inside.pop() if len(inside) == 1 else None


def _own_range(layer: Any) -> int | None:
    is_known = _is_keras(layer) or isinstance(layer, (keras.layers.Embedding, MultiHotDense))
    names = [kind.__name__ for kind in type(layer).__mro__ if kind.__name__ in _INDEX_TAKERS]
    return getattr(layer, _INDEX_TAKERS[names[0]]) if is_known and names else None


def _parts(layer: Any) -> Iterator[Any]:
    """The layers within a layer."""
    for value in vars(layer).values():
        for part in keras.tree.flatten(value) if isinstance(value, (list, dict)) else [value]:
            if isinstance(part, keras.Layer) and part is not layer:
                yield part
                yield from _parts(part)


def _is_keras(layer: Any) -> bool:
    return type(layer).__module__.partition(".")[0] == "keras"
