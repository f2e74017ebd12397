"""The bytes of a model: of its weights, its optimizer's state, its activations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from keras_multigpu.graphs.costs import row_bytes, variables_bytes
from keras_multigpu.reports.workload import Sizes


def find_sizes(model: keras.Model, outputs: Any, inputs: Any = ()) -> Sizes:
    """The bytes of a model that have to be kept, or moved.

    The optimizer's are those that it keeps for one value, times the values that are trained; for a
    model that is not compiled, those of Adam. The activations are all outputs of the layers and
    operations of a Functional or Sequential model, layer by layer and each once: an estimate, for a
    backend forgets some, and keeps others besides.

    Args:
        model: a model that is built.
        outputs: its outputs for one row, in any structure.
        inputs: its inputs for one row, in any structure.

    Example:
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        >>> find_sizes(model, model.outputs)
        Sizes(weights=32, gradients=32, tensors=2, slots=64, outputs=8, activations=20, inputs=0)
    """
    trainable = model.trainable_variables
    return Sizes(
        weights=variables_bytes(model.variables),
        gradients=variables_bytes(trainable),
        tensors=len(model.variables),
        slots=_count_slots(model) * variables_bytes(trainable),
        outputs=sum(map(row_bytes, keras.tree.flatten(outputs))),
        activations=_count_activations(model),
        inputs=sum(map(row_bytes, keras.tree.flatten(inputs))),
    )


def _count_slots(model: keras.Model) -> int:
    """How many values the optimizer keeps for each value that is trained."""
    optimizer: Any = getattr(model, "optimizer", None) or keras.optimizers.Adam()
    copy = type(optimizer).from_config(optimizer.get_config())
    before = len(copy.variables)
    copy.build([keras.Variable([[0.0]], name="one")])
    # An optimizer around another one (loss scaling) has counters of its own.
    return sum(len(one.shape) == 2 for one in copy.variables[before:])


def _count_activations(model: keras.Model) -> int | None:
    tensors = {id(tensor): tensor for tensor in _outputs_within(model)}
    return sum(map(row_bytes, tensors.values())) or None


def _outputs_within(model: Any) -> Iterable[Any]:
    """The symbolic outputs of a model's operations, of models within it too."""
    if isinstance(model, keras.Sequential):
        parts = [model.inputs, *model.layers] if model.inputs else []
    else:
        parts = getattr(model, "operations", [])  # what a Functional model is made of
    for part in parts:
        if isinstance(part, list):
            yield from part
        elif isinstance(part, keras.Model):
            yield from _outputs_within(part)
        else:
            yield from keras.tree.flatten(part.output)
