"""Reads a model's graph: the calls of its layers, in order."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras


@dataclasses.dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer, or of an operation of `keras.ops`, on symbolic tensors.

    Attributes:
        layer: the layer or operation.
        path: the names of the models around it, then its own.
        arguments: `(args, kwargs)` of the call.
        result: the call's result.
        turn: its index in the order of the model itself.
    """

    layer: Any
    path: tuple[str, ...]
    arguments: Any
    result: Any
    turn: int

    @functools.cached_property
    def inputs(self) -> tuple[keras.KerasTensor, ...]:
        """The tensors that the call takes."""
        return _tensors(self.arguments)

    @functools.cached_property
    def outputs(self) -> tuple[keras.KerasTensor, ...]:
        """The tensors that it returns."""
        return _tensors(self.result)

    @property
    def variables(self) -> list[keras.Variable]:
        """The layer's variables; an operation has none."""
        return list(getattr(self.layer, "variables", ()))


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """A model as calls of its layers; nested models that are graphs are expanded.

    Attributes:
        inputs: the model's inputs.
        outputs: its outputs, in order.
        calls: the calls in depth-first order: a call follows those whose outputs it takes, and a
            branch is finished before the next begins.
    """

    inputs: tuple[keras.KerasTensor, ...]
    outputs: tuple[keras.KerasTensor, ...]
    calls: tuple[LayerCall, ...]

    def producers(self) -> dict[int, int]:
        """The index of the call that returns a tensor, by the tensor's `id`."""
        return {id(tensor): n for n, call in enumerate(self.calls) for tensor in call.outputs}


def is_graph(model: Any) -> bool:
    """Whether a model is a plain Sequential or functional model, with Keras's own `call`."""
    if isinstance(model, keras.Sequential):
        if model.built and not hasattr(model, "inputs"):
            return False  # Keras can't infer its shapes, so that it has no symbolic tensors
        kind: Any = keras.Sequential
    else:
        kind = _functional_class()
    names = ("call", "__call__")
    return isinstance(model, kind) and all(
        getattr(type(model), name) is getattr(kind, name) for name in names
    )


def symbolic_ends(model: keras.Model) -> tuple[Any, Any]:
    """The symbolic inputs and outputs of a graph, in the structures that calls use."""
    if isinstance(model, keras.Sequential):
        return model.inputs[0], model.outputs[0]
    return model.input, model.output


def read_graph(model: keras.Model) -> Graph:
    """Reads the graph of a built model for which `is_graph` holds.

    Calls the layers again on symbolic inputs, because Keras has no public list of the calls. What
    they warn of they have said when the model was made.
    """
    calls: list[LayerCall] = []
    inputs = keras.tree.map_structure(fresh_input, symbolic_ends(model)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = keras.tree.flatten(_call_layers(model, inputs, (), calls))
    return Graph(tuple(keras.tree.flatten(inputs)), tuple(outputs), _depth_first(outputs, calls))


def _call_layers(
    model: keras.Model, inputs: Any, path: tuple[str, ...], calls: list[LayerCall]
) -> Any:
    """Calls a model's layers on symbolic inputs, and records the calls."""

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        own_path = (*path, layer.name)
        if _is_seen_through(layer, args, kwargs):
            return _call_layers(layer, args[0], own_path, calls)
        outputs = layer(*args, **kwargs)
        calls.append(LayerCall(layer, own_path, (args, kwargs), outputs, len(calls)))
        return outputs

    return _call_functional(model, inputs, call)


def _call_functional(model: keras.Model, inputs: Any, call: Callable[..., Any]) -> Any:
    """Calls the layers of a graph, and what computes their masks, in order by a function.

    Identity layers after the outputs capture them; an exception then stops cloning before Keras
    builds a model, which would fail unless the inputs are new.
    """
    own_inputs, own_outputs = symbolic_ends(model)
    # Named explicitly, so as not to shift Keras's automatic numbering of the user's layers.
    ends = [
        keras.layers.Identity(name=f"end_{place}")
        for place in range(len(keras.tree.flatten(own_outputs)))
    ]
    places = {id(layer): place for place, layer in enumerate(ends)}
    reached: dict[int, keras.KerasTensor] = {}

    def call_or_take(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if id(layer) not in places:
            return call(layer, *args, **kwargs)
        reached[places[id(layer)]] = args[0]
        if len(reached) == len(ends):
            raise _AllReachedError
        return layer(*args, **kwargs)

    behind = [layer(tensor) for layer, tensor in zip(ends, keras.tree.flatten(own_outputs))]
    plain = keras.Model(own_inputs, behind, name="plain")  # Keras's own class, not compiled
    with contextlib.suppress(_AllReachedError):
        keras.models.clone_model(
            plain,
            input_tensors=inputs,
            clone_function=lambda layer: layer,
            call_function=call_or_take,
        )
    outputs = [reached[place] for place in range(len(ends))]
    return keras.tree.pack_sequence_as(own_outputs, outputs)


class _AllReachedError(Exception):
    """All outputs of a model have been captured: stop cloning."""


def _is_seen_through(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a layer is a graph whose inputs match the arguments, so that it can be expanded."""
    is_plain = len(args) == 1 and not any(part is not None for part in keras.tree.flatten(kwargs))
    if not is_plain or not is_graph(layer):
        return False
    given, own = args[0], symbolic_ends(layer)[0]
    try:
        keras.tree.assert_same_structure(given, own)
    except ValueError:
        return False
    pairs = zip(keras.tree.flatten(given), keras.tree.flatten(own))
    return all(
        isinstance(one, keras.KerasTensor)
        and (len(one.shape), one.dtype) == (len(other.shape), other.dtype)
        for one, other in pairs
    )


def _depth_first(
    outputs: Sequence[keras.KerasTensor], calls: Sequence[LayerCall]
) -> tuple[LayerCall, ...]:
    """Orders calls depth first: those that the outputs need, then the others.

    The others are kept, because they may change the state of their layers.
    """
    producers = {id(tensor): call for call in calls for tensor in call.outputs}
    ordered: dict[int, LayerCall] = {}
    needed = [producers[id(tensor)] for tensor in outputs if id(tensor) in producers]
    waiting = [*needed, *calls][::-1]
    while waiting:
        call = waiting[-1]
        makers = [producers[id(tensor)] for tensor in call.inputs if id(tensor) in producers]
        missing = [maker for maker in makers if id(maker) not in ordered]
        if missing:
            waiting += reversed(missing)
        else:
            ordered.setdefault(id(waiting.pop()), call)
    return tuple(ordered.values())


@functools.cache
def _functional_class() -> type[keras.Model]:
    """The class of functional models, which has no public name in Keras."""
    tensor = keras.Input((1,), name="tensor")
    # A layer, because some versions of Keras refuse a model without any.
    return type(keras.Model(tensor, keras.layers.Identity(name="same")(tensor), name="any"))


def fresh_input(tensor: keras.KerasTensor) -> keras.KerasTensor:
    """A new symbolic input of the same kind."""
    return keras.Input(
        batch_shape=tensor.shape, dtype=tensor.dtype, sparse=tensor.sparse, name=tensor.name
    )


def _tensors(structure: Any) -> tuple[keras.KerasTensor, ...]:
    flat: Sequence[Any] = keras.tree.flatten(structure)
    return tuple(part for part in flat if isinstance(part, keras.KerasTensor))
