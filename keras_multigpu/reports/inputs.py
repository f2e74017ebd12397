"""What a model is run with: inputs that are made, and the checks of those that are given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_multigpu import engines
from keras_multigpu.arguments import number_of
from keras_multigpu.graphs.graph import is_graph, read_graph

Batch = tuple[Any, Any, Any]
"""Inputs, targets and sample weights, `None` where absent."""

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
    up, in the model; floats too, if all inputs are floats.
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
    are_indices = all(keras.backend.is_float_dtype(one.dtype) for one in tensors)  # floats, too
    made = [_make_rows(model, one, rows, valid, are_indices, random) for one in tensors]
    return keras.tree.pack_sequence_as(structure, made)


def _make_rows(
    model: keras.Model, tensor: Any, rows: int, valid: int | None, are_indices: bool, random: Any
) -> np.ndarray:
    """Rows of one input; `valid` is the number of valid integers, if a layer tells."""
    shape, dtype = (rows, *tensor.shape[1:]), keras.backend.standardize_dtype(tensor.dtype)
    if keras.backend.is_float_dtype(dtype):
        is_index = valid is not None and are_indices
        made = random.integers(0, valid, shape) if is_index else random.normal(size=shape)
        return made.astype("float32")
    if valid is None and dtype not in ("bool", "uint8"):  # flags, and pixels
        raise ValueError(
            "`inputs` must be given if the valid integers of an input are unknown. "
            f"Received: model={model.name!r}, with the input {tensor.name!r} of {dtype}. Give "
            f"`inputs=x[:{rows}]`, some rows of your data."
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


def take_rows(arrays: Any, rows: int) -> Any:
    """The first rows of arrays in any structure; `None` stays `None`.

    Shorter NumPy arrays, as `make_inputs` makes, are repeated.
    """

    def take(part: Any) -> Any:
        is_short = isinstance(part, np.ndarray) and len(part) < rows
        return np.resize(part, (rows, *part.shape[1:])) if is_short else part[:rows]

    return map_arrays(take, arrays)


def map_arrays(function: Callable[[Any], Any], arrays: Any) -> Any:
    """What a function makes of each array in any structure; `None` stays `None`."""
    return keras.tree.map_structure(lambda one: None if one is None else function(one), arrays)


def check_graph(model: keras.Model) -> None:
    """Refuses a model that runs eagerly: the reports are about steps that are graphs."""
    if model.compiled and model.run_eagerly:
        raise ValueError(
            "`model` must not run eagerly: what is counted and predicted are steps that are "
            f"graphs. Received: model={model.name!r}, compiled with `run_eagerly=True`. Compile it "
            "with `run_eagerly=False`."
        )


def needs_targets(model: keras.Model) -> bool:
    """Whether a model is compiled with a loss, which its class does not replace by a step."""
    own = engines.own_steps(getattr(model, "template", model))
    return getattr(model, "loss", None) is not None and not {"train_step", "compute_loss"} & {*own}


def check_batch(batch: Any, model: keras.Model, *, training: bool = True) -> Batch:
    """The parts of a batch: inputs, or a tuple of inputs, targets and sample weights."""
    given = batch if isinstance(batch, tuple) else (batch,)
    if len(given) > 3 or (training and len(given) < 2 and needs_targets(model)):
        length = f" of {len(batch)}" if isinstance(batch, (tuple, list, dict)) else ""
        raise ValueError(
            "`batch` must be a tuple of inputs, targets and, optionally, sample weights, because "
            f"the model is compiled with a loss. Received: {type(batch).__name__}{length}. Give "
            "`(x, y)`."
        )
    check_rows(given)
    inputs, targets, weights = [*given, None, None][:3]
    return inputs, targets, weights


def check_rows(given: Any) -> None:
    """Raises a `ValueError` if arrays have no rows, or differ in their number."""
    leaves = [one for one in keras.tree.flatten(given) if one is not None]
    shapes = [tuple(getattr(one, "shape", None) or ()) for one in leaves]
    if not shapes or {one[:1] for one in shapes} != {shapes[0][:1]} or not sum(shapes[0][:1]):
        found = [shape or type(one).__name__ for one, shape in zip(leaves, shapes)]
        raise ValueError(
            "Inputs, targets and sample weights must be arrays with the same number of rows, at "
            f"least one. Received, as shapes: {found}. Give `(x[:32], y[:32])`, for example."
        )


def check_given(name: str, arrays: Any, model: keras.Model, batch_size: int) -> None:
    """Enough rows of inputs or targets, and a loss for targets."""
    shapes = [tuple(np.shape(part)) for part in keras.tree.flatten(arrays)]
    if not shapes or any(not shape or shape[0] < batch_size for shape in shapes):
        raise ValueError(
            f"`{name}` must have at least batch_size={number_of(batch_size, 'row')}, to time a "
            f"step on a whole batch. Received: {name} of the shapes {shapes}. Give "
            f"{number_of(batch_size, 'row')} or more."
        )
    if name == "targets" and not model.compiled:
        raise ValueError(
            "`targets` are compared by the loss that a model is compiled with. Received: "
            f"`targets`, and model={model.name!r}, which is not compiled. Compile it, or leave "
            "`targets` out: then it is trained by the mean squared error."
        )


@contextlib.contextmanager
def targets_asked_for(model: keras.Model, targets: Any) -> Iterator[None]:
    """Scope of a model's steps: says so if one of its own fails because it gets no targets."""
    try:
        yield
    except Exception as error:  # a user's step may raise anything; our error says it
        own = [one for one in ("train_step", "compute_loss") if one in engines.own_steps(model)]
        if targets is not None or not own:
            raise
        why = engines.reason_of(error).partition(". ")[0]
        raise ValueError(
            f"`targets` must be given if the model has its own `{own[0]}` that takes them. "
            f"Received: targets=None, and model={model.name!r}, whose `{own[0]}` fails without "
            f"them ({type(error).__name__}: {why}). Give `targets=y[:n]`, as many rows of your "
            "targets as `batch_size`."
        ) from error


def first_batch(data: Any) -> Any:
    """A source's first batch; `None` if only a whole pass over it may begin one."""
    if isinstance(data, keras.utils.PyDataset):
        return data[0]
    return next(iter(data), None) if hasattr(data, "element_spec") else None


def rows_of_first_batch(data: Any) -> int | None:
    """The rows of a source's first batch; `None` if only a whole pass over it may begin one."""
    batch = first_batch(data)
    leaves = [one for one in keras.tree.flatten(batch) if one is not None]
    shape: Any = getattr(leaves[0], "shape", ()) if leaves else ()
    return int(shape[0]) if len(shape) else None


def _is_endless(data: Any) -> bool:
    """Whether a `tf.data.Dataset`, or a `keras.utils.PyDataset`, says that it has no end."""
    if hasattr(data, "cardinality"):
        return int(data.cardinality()) == -1  # `tf.data.INFINITE_CARDINALITY`
    return isinstance(data, keras.utils.PyDataset) and data.num_batches is None


def check_data(
    data: Any, batch_size: int | None, steps: int | None, weak: bool, *, with_targets: bool
) -> None:
    """Arrays in a tuple, or a source of batches that every run can read from its start."""
    if isinstance(data, Iterator):
        raise TypeError(
            "`data` must be something that every run can read from its start: arrays, a "
            f"`tf.data.Dataset` or a `keras.utils.PyDataset`. Received: data={data!r}, "
            "which can be read only once. Make a Dataset or a PyDataset from it."
        )
    expected = "`data` must be a tuple of inputs, targets and weights, or a source of batches."
    if isinstance(data, tuple) and not 1 <= len(data) <= 3:
        raise ValueError(
            f"{expected} Received: a tuple of {len(data)}. Put several inputs into a list: "
            "`([a, b], y)`."
        )
    if isinstance(data, tuple):
        check_rows(data)
        if len(data) == 1 and with_targets:
            raise ValueError(f"{expected} Received: a tuple of inputs only. Give `(x, y)`.")
    if data is None or isinstance(data, (list, dict)) or hasattr(data, "shape"):
        cure = "Give `(x, y)`." if with_targets else "Give `(x,)`."
        raise ValueError(f"{expected} Received: data of type {type(data).__name__}. {cure}")
    if weak and batch_size is None:
        raise ValueError(
            "`weak=True` needs the rows of each device. Received: batch_size=None. Give "
            "`batch_size`, and arrays as `data`."
        )
    kind = type(data).__name__
    if batch_size is not None and not isinstance(data, tuple):
        raise ValueError(
            f"`batch_size` is for arrays. Received: batch_size={batch_size!r}, and data that come "
            f"in batches: {kind}. Leave `batch_size` out."
        )
    if steps is None and _is_endless(data):
        raise ValueError(
            "`steps` must say how many batches an epoch has if the data are endless. Received: "
            f"steps=None, and data of type {kind} without an end. Give `steps=100`, for example."
        )
