"""What reports need of a model: inputs to run it with, its sizes, and its state kept meanwhile."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

from keras_multigpu.graphs.costs import row_bytes, variables_bytes
from keras_multigpu.graphs.graph import Graph, LayerCall, is_graph, read_graph
from keras_multigpu.layers import MultiHotDense
from keras_multigpu.reports.prediction import Sizes

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
# Operations whose outputs contain the integers of their inputs.
_PASS_ON = (
    *("BroadcastTo", "Cast", "Concatenate", "Copy", "ExpandDims", "Flatten", "GetItem"),
    *("Identity", "InputLayer", "Permute", "Repeat", "RepeatVector", "Reshape", "Split"),
    *("Squeeze", "Stack", "SwapAxes", "Tile", "Transpose"),
)
# Operations that index a table of unknown length.
_LOOK_UP = frozenset({"Take", "TakeAlongAxis", "Scatter", "ScatterUpdate", "Slice"})
_VALUES = 256  # integers that are no indices are drawn from 0 to 255


class Snapshot:
    """Copies of variables' values in host memory."""

    def __init__(self, variables: Iterable[keras.Variable]):
        self._values: dict[int, tuple[keras.Variable, np.ndarray]] = {}
        self.add(variables)

    def add(self, variables: Iterable[keras.Variable]) -> None:
        """Copies further variables; the values of known ones are kept."""
        for variable in variables:
            if id(variable) not in self._values:
                # np.array copies: the backend may return the variable's own memory.
                value = np.array(keras.ops.convert_to_numpy(variable))
                self._values[id(variable)] = (variable, value)

    def restore(self) -> None:
        """Assigns the copied values."""
        for variable, value in self._values.values():
            variable.assign(value)


def state_of(model: keras.Model) -> list[keras.Variable]:
    """All that training changes in a built model: weights, seeds, metrics, optimizer state."""
    optimizer: Any = getattr(model, "optimizer", None)
    slots = [] if optimizer is None else optimizer.variables
    return list({id(v): v for v in [*model.variables, *model.metrics_variables, *slots]}.values())


def build_optimizer(model: keras.Model) -> None:
    """Makes the optimizer's state, if a model has an optimizer, so that it can be kept."""
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restores Python's and NumPy's random state on exit: new layers draw their seeds from it."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def check_batch(batch: Any, *, with_targets: bool) -> Batch:
    """The parts of a batch: inputs, or a tuple of inputs, targets and sample weights.

    Raises:
        ValueError: if targets are needed, and there are none.
    """
    given = batch if isinstance(batch, tuple) else (batch,)
    if with_targets and not 2 <= len(given) <= 3:
        raise ValueError(
            "`batch` must be a tuple of inputs, targets and, optionally, sample weights, because "
            f"the model is compiled. Received: {type(batch).__name__} of {len(given)}. "
            "Give `(x, y)`."
        )
    inputs, targets, weights = [*given, None, None][:3]
    return inputs, targets, weights


@contextlib.contextmanager
def step_prepared(model: keras.Model, batch: Batch, training: bool) -> Iterator[None]:
    """Scope for a look at one step of a model; its state and its functions are restored.

    All that the first step would make exists already: weights, slots, metrics.
    """
    if not model.built:
        model.predict_on_batch(batch[0])
    before = Snapshot(state_of(model))
    functions = model.train_function, model.predict_function
    try:
        if training:
            build_optimizer(model)
            before.add(model.optimizer.variables)
            model.test_on_batch(*batch)
            model.reset_metrics()
        yield
    finally:
        model.train_function, model.predict_function = functions
        model.reset_metrics()
        steps = getattr(model, "_parallel_steps", None)
        # Spread state is not whole on one device in between.
        with steps.using_weights() if steps is not None else contextlib.nullcontext():
            before.restore()


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


def find_sizes(model: keras.Model, outputs: Any, inputs: Any = ()) -> Sizes:
    """The bytes of a built model, given its outputs and inputs for one row.

    For a model that is not compiled, the optimizer is taken to be Adam. The activations are an
    estimate: all outputs of the layers and operations of a Functional or Sequential model. A
    backend frees some of them early, and keeps others besides.
    """
    trainable = model.trainable_variables
    within = {id(tensor): tensor for tensor in _outputs_within(model)}
    return Sizes(
        weights=variables_bytes(model.variables),
        gradients=variables_bytes(trainable),
        tensors=len(model.variables),
        slots=_count_slots(model) * variables_bytes(trainable),
        outputs=sum(map(row_bytes, keras.tree.flatten(outputs))),
        activations=sum(map(row_bytes, within.values())) or None,
        inputs=sum(map(row_bytes, keras.tree.flatten(inputs))),
    )


def _count_slots(model: keras.Model) -> int:
    """The number of values that the optimizer keeps for each trained value."""
    optimizer: Any = getattr(model, "optimizer", None) or keras.optimizers.Adam()
    copy = type(optimizer).from_config(optimizer.get_config())
    before = len(copy.variables)
    copy.build([keras.Variable([[0.0]], name="one")])
    # Counters are scalars: those of loss scaling come after the build, too.
    return sum(len(one.shape) == 2 for one in copy.variables[before:])


def _outputs_within(model: Any) -> Iterable[Any]:
    """The symbolic outputs of a model's operations, nested models included."""
    if isinstance(model, keras.Sequential):
        yield from model.inputs or []
        parts = model.layers if model.inputs else []
    else:
        parts = getattr(model, "operations", [])  # what a Functional model is made of
    for part in parts:
        if isinstance(part, keras.Model):
            yield from _outputs_within(part)
        else:
            yield from keras.tree.flatten(part.output)
