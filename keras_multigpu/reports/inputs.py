"""Inputs to run a model with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_multigpu import engines
from keras_multigpu.graphs.graph import is_graph, read_graph

# Layers and operations that take indices, and the attribute with the number of valid ones.
_INDEX_TAKERS = {
    "Embedding": "input_dim",
    "ReversibleEmbedding": "input_dim",
    "MultiHotDense": "width",
    "CategoryEncoding": "num_tokens",
    "OneHot": "num_classes",
    "MultiHot": "num_classes",
}


def make_inputs(model: keras.Model, rows: int) -> Any:
    """Random inputs for a model with known input shapes, in the model's structure.

    Integers are drawn from those that are valid for every `Embedding`, or other layer that looks
    up, in the model; floats too, if all inputs are floats. A `ValueError` says which input has no
    known shape or range.
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
    random, valid = np.random.default_rng(0), min(_find_ranges(model), default=None)
    are_floats = [keras.backend.is_float_dtype(one.dtype) for one in tensors]
    made = []
    for one, is_float in zip(tensors, are_floats):
        shape = (rows, *one.shape[1:])
        if is_float and (valid is None or not all(are_floats)):
            made.append(random.normal(size=shape).astype("float32"))
        else:
            made.append(_make_integers(model, one, shape, valid, random))
    return keras.tree.pack_sequence_as(structure, made)


def _make_integers(
    model: keras.Model, tensor: Any, shape: Any, valid: int | None, random: Any
) -> np.ndarray:
    """Rows of one input; `valid` is the number of valid integers, if a layer tells."""
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if keras.backend.is_float_dtype(dtype):
        return random.integers(0, valid, shape).astype("float32")
    if valid is None and dtype not in ("bool", "uint8"):  # flags, and pixels
        raise ValueError(
            "`inputs` must be given if the valid integers of an input are unknown. "
            f"Received: model={model.name!r}, with the input {tensor.name!r} of {dtype}. Give "
            f"`inputs=x[:{shape[0]}]`, some rows of your data."
        )
    top = 2 if dtype == "bool" else min(valid or 256, np.iinfo(dtype).max + 1)
    return random.integers(0, top, shape).astype(dtype)


def _find_ranges(model: keras.Model) -> Iterator[int]:
    """The number of valid integers of each layer and operation that looks up."""
    calls = read_graph(model).calls if is_graph(model) else ()
    for layer in [*engines.all_layers(model), *(call.layer for call in calls)]:
        for kind in type(layer).__mro__:
            valid = getattr(layer, _INDEX_TAKERS.get(kind.__name__, ""), None)
            if isinstance(valid, int):
                yield valid
                break
