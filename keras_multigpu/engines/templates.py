"""Templates that replicas can't serve: errors and warnings before anything is built."""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from typing import Any

import keras

_STEPS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")


def all_layers(model: keras.Model) -> list[keras.Layer]:
    """A model and its layers, including nested ones."""
    return model._flatten_layers()  # Keras has no public walk over them


def own_steps(template: keras.Model) -> list[str]:
    """The names of the step methods that a template, or its class, defines."""
    return [
        name
        for name in _STEPS
        if name in vars(template)
        or inspect.getattr_static(type(template), name, None)
        is not inspect.getattr_static(keras.Model, name)
    ]


def forget_losses(template: keras.Model) -> None:
    """Forgets the losses of an earlier trace.

    Keras finds a layer's losses by their `id`, which a new one of another layer may have by chance.
    """
    template._clear_losses()


def input_of_fixed_rows(layer: keras.Layer) -> keras.KerasTensor | None:
    """A symbolic input of a model whose batch size is fixed, or `None`."""
    inputs = keras.tree.flatten(getattr(layer, "inputs", None))
    return next((one for one in inputs if one is not None and one.shape[0] is not None), None)


def check_any_batch_size(template: keras.Model) -> None:
    """Refuses a template whose batch size is fixed."""
    tensor = input_of_fixed_rows(template)
    if tensor is not None:
        shape, name = tuple(tensor.shape), tensor.name
        raise ValueError(
            "Data mode slices the batch, so the template must take any batch size. "
            f"Received: a model whose input {name!r} has the fixed batch_shape={shape}. "
            f"Rebuild it with `keras.Input(shape={shape[1:]}, name={name!r})`, without a "
            "batch size, and copy the weights with `set_weights`."
        )


def check_stateless(template: keras.Model) -> None:
    """Refuses recurrent layers that keep a state for each row of the batch."""
    for layer in all_layers(template):
        if getattr(layer, "stateful", False):
            raise ValueError(
                "Data mode slices the batch, and a recurrent layer with `stateful=True` keeps a "
                "state for each row of a batch of fixed size. "
                f"Received: layer {layer.name!r} (of type {type(layer).__name__}) with "
                "stateful=True. Rebuild the model with `stateful=False`."
            )


def warn_of_direct_calls(template: keras.Model) -> None:
    """Warns if a custom step of the template calls layers directly, not through the replicas."""
    direct = {}
    for name in own_steps(template):
        function = vars(template).get(name, inspect.getattr_static(type(template), name))
        direct.update(dict.fromkeys(_layers_called(template, function), name))
    if direct:
        calls = ", ".join(f"`self.{layer}(...)` in `{step}`" for layer, step in direct.items())
        warnings.warn(
            f"{type(template).__name__} calls layers directly: {calls}. Only `self(...)` runs on "
            "all devices; these calls run on one. Call them from `call`.",
            stacklevel=6,  # the caller of `make_parallel`
        )


def _layers_called(template: keras.Model, function: Any) -> list[str]:
    """The names of the template's layers that a method calls as `self.name(...)`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return []  # no source, in an interactive session, say
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [
        func.attr
        for func in called
        if isinstance(func, ast.Attribute)
        and isinstance(func.value, ast.Name)
        and func.value.id == "self"
    ]
    return [name for name in names if isinstance(vars(template).get(name), keras.Layer)]
