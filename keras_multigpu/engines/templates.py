"""Templates that replicas can't serve: errors and warnings before anything is built."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import warnings
from typing import Any

import keras

from keras_multigpu.engines.shared import reason_of

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


def forget_losses(template: keras.Layer) -> None:
    """Forgets the losses of an earlier trace.

    Keras finds a layer's losses by their `id`, which a new one of another layer may have by chance.
    """
    template._clear_losses()


class _Called(keras.Layer):
    """Calls a model, so that Keras traces the whole call for symbolic inputs."""

    def __init__(self, model: keras.Layer):
        super().__init__(autocast=False)
        self._model = model

    def call(self, inputs: Any) -> Any:
        return self._model(inputs)


def input_of_noted_rows(model: keras.Layer) -> keras.KerasTensor | None:
    """A symbolic input of a model whose shape has a number of rows, or `None`."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None))
    return next((one for one in inputs if one is not None and one.shape[0] is not None), None)


def fixed_rows(model: keras.Layer) -> str | None:
    """Why a model takes batches of one size only, or `None`.

    Keras notes the shape of the first batch, and then takes batches of any size. So a model with
    such a shape is traced with one row more.
    """
    fixed = input_of_noted_rows(model)
    if fixed is None:
        return None
    inputs: Any = model.inputs
    known = inputs[0] if isinstance(model, keras.Sequential) else model.input
    more = fixed.shape[0] + 1
    other = keras.tree.map_structure(functools.partial(_with_rows, rows=more), known)
    try:
        _Called(model).compute_output_spec(other)
    except Exception as error:  # any layer's or user's error: it comes with other rows only
        reason = reason_of(error)
        return (
            f"its input {fixed.name!r} has the fixed batch_shape={tuple(fixed.shape)}, and a call "
            f"with {more} rows fails ({reason})"
        )
    finally:
        forget_losses(model)
    return None


def _with_rows(tensor: Any, rows: int) -> Any:
    """A symbolic tensor like another one, with so many rows."""
    if tensor is None:
        return None
    shape = (rows, *tensor.shape[1:])
    kind = {"sparse": tensor.sparse, "ragged": tensor.ragged}
    return keras.KerasTensor(shape, tensor.dtype, **kind, name=tensor.name)


def check_any_batch_size(template: keras.Model) -> None:
    """Refuses a template whose layers or operations contain the size of a batch."""
    reason = fixed_rows(template)
    if reason is not None:
        raise ValueError(
            "Data mode slices the batch, so the template must take any batch size. "
            f"Received: {template.name!r}: {reason}. Take the number of rows from "
            "`keras.ops.shape(x)[0]` in layers and functions, build the model without a batch size "
            "(`keras.Input(shape=...)`, or `build((None, ...))`), and copy the weights with "
            "`set_weights`."
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
