"""What data mode can't do exactly is refused before anything is built, or as soon as it is seen."""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

import keras

from keras_multigpu import engines

_OWN_NAMES = ("template", "devices", "mode", "options", "place", "least_bytes")
_STEPS = ("train_step", "test_step", "predict_step", "compute_loss")


def check_names(template: keras.Model, mode_names: Sequence[str] = ()) -> None:
    """Refuses names that mean one thing to the template and another to a parallel model.

    Args:
        template: the model.
        mode_names: the attributes that a mode has beside those of all parallel models.
    """
    own_names = (*_OWN_NAMES, *mode_names)
    clashes = [name for name in own_names if hasattr(template, name)]
    if clashes:
        raise ValueError(
            f"A parallel model has the attributes {', '.join(own_names)} of its own. Received: "
            f"a model with attributes of the same names: {', '.join(clashes)}. Rename them in "
            f"{type(template).__name__}."
        )
    for layer in _all_layers(template):
        if hasattr(layer, "template") and hasattr(layer, "devices"):
            raise ValueError(
                "A parallel model can't be a part of another one. Received: a model with the "
                f"parallel model {layer.name!r} in it. Build it with `.template` instead, and "
                "make the whole parallel."
            )


def check_wire_dtype(wire_dtype: Any) -> None:
    """Refuses a type that weights can't cross in."""
    if wire_dtype is not None and not (
        isinstance(wire_dtype, str) and wire_dtype in ("bfloat16", "float16")
    ):
        raise ValueError(
            '`wire_dtype` must be None, "bfloat16" or "float16". '
            f"Received: wire_dtype={wire_dtype!r}."
        )
    engine = engines.current()
    if wire_dtype is not None and engine.partitions:
        raise ValueError(
            f"`wire_dtype` must be None on the Keras backend {engine.name!r}, whose compiler "
            "chooses what crosses between devices, and in which type. Received: "
            f"wire_dtype={wire_dtype!r}. Leave it out; the dtype policy 'mixed_bfloat16' halves "
            "the bytes of activations."
        )


def check_flag(name: str, value: Any) -> None:
    """Refuses a value that is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be True or False. Received: {name}={value!r}.")


def check_choice(name: str, value: Any, *choices: str) -> None:
    """Refuses a value that is none of the choices."""
    if not isinstance(value, str) or value not in choices:
        expected = " or ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"`{name}` must be {expected}. Received: {name}={value!r}.")


def check_count(name: str, value: Any) -> None:
    """Refuses what is neither a number of things nor `None`."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if value is not None and not is_count:
        raise ValueError(
            f"`{name}` must be a positive integer, or None for one per device. "
            f"Received: {name}={value!r}."
        )


def check_graph(template: keras.Model, is_graph: bool) -> None:
    """Refuses a model whose layers can't be told apart without running its code."""
    if not is_graph:
        raise ValueError(
            "Model mode places the layers of a graph: of a Sequential or functional model without "
            f"a `call` of its own. Received: {template.name!r}, of class "
            f"{type(template).__name__}, which has one. Rebuild it as "
            "`keras.Model(inputs, outputs)`, or use `mode='data'`."
        )
    for layer in _all_layers(template):
        if isinstance(layer, keras.layers.InputLayer) and getattr(layer, "optional", False):
            raise ValueError(
                "Every input of a model in mode 'model' must be given. Received: a model with the "
                f"input {layer.name!r}, which has optional=True. Give zeros in its place, or use "
                "`mode='data'`."
            )


def check_chosen_only(placement: Any) -> None:
    """Refuses a placement where the backend has one program for all devices."""
    if placement is not None:
        raise ValueError(
            f"`placement` must be None on the Keras backend {engines.current().name!r}, which runs "
            "one program on all devices: a layer can't be on one of them, and large layers are "
            f"spread over all. Received: placement={placement!r}. Leave it out, or use "
            "TensorFlow."
        )


def check_any_batch_size(template: keras.Model) -> None:
    """Refuses a template whose batch size is fixed."""
    for tensor in keras.tree.flatten(getattr(template, "inputs", None)):
        if tensor is not None and tensor.shape[0] is not None:
            shape, name = tuple(tensor.shape), tensor.name
            raise ValueError(
                "Data mode slices the batch, so the template must take any batch size. "
                f"Received: a model whose input {name!r} has the fixed batch_shape={shape}. "
                f"Rebuild it with `keras.Input(shape={shape[1:]}, name={name!r})`, without a "
                "batch size, and copy the weights with `set_weights`."
            )


def check_stateless(template: keras.Model) -> None:
    """Refuses recurrent layers that keep a state for each row of the batch."""
    for layer in _all_layers(template):
        if getattr(layer, "stateful", False):
            raise ValueError(
                "Data mode slices the batch, and a recurrent layer with `stateful=True` keeps a "
                "state for each row of a batch of fixed size. "
                f"Received: layer {layer.name!r} (of type {type(layer).__name__}) with "
                "stateful=True. Rebuild the model with `stateful=False`."
            )


def check_sync_batch_norm(template: keras.Model, sync_batch_norm: bool) -> None:
    """Refuses batch normalization that can't be made that of the whole batch."""
    for layer in _all_layers(template):
        asked_for = sync_batch_norm or getattr(layer, "synchronized", False)
        is_norm = isinstance(layer, keras.layers.BatchNormalization)
        if not (is_norm and asked_for):
            continue
        own_call = type(layer).call is not keras.layers.BatchNormalization.call
        if own_call or getattr(layer, "renorm", False):
            reason = "a `call` of its own" if own_call else "renorm=True"
            raise ValueError(
                "BatchNormalization over the whole batch is exact for Keras's own layer without "
                f"renormalization. Received: layer {layer.name!r} with {reason}, and "
                f"synchronized={layer.synchronized}, sync_batch_norm={sync_batch_norm}. Use "
                "`keras.layers.BatchNormalization(synchronized=True)`, or leave both False to "
                "have each slice normalized by its own statistics."
            )


def warn_of_direct_calls(template: keras.Model) -> None:
    """Tells the steps of a template's own that go round the replicas."""
    direct = {}
    for name in _STEPS:
        function = inspect.getattr_static(type(template), name, None)
        if function is not inspect.getattr_static(keras.Model, name):
            direct.update(dict.fromkeys(_layers_called(template, function), name))
    if direct:
        calls = ", ".join(f"`self.{layer}(...)` in `{step}`" for layer, step in direct.items())
        warnings.warn(
            f"{type(template).__name__} calls layers directly: {calls}. Only `self(...)` runs on "
            "all devices; these calls run on one. Call them from `call` to have them sliced.",
            stacklevel=5,
        )


def _layers_called(template: keras.Model, function: Any) -> list[str]:
    """Names of the template's layers that a method's source calls on `self`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return []  # defined where there is no source to read: an interactive session, say
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [
        func.attr
        for func in called
        if isinstance(func, ast.Attribute)
        and isinstance(func.value, ast.Name)
        and func.value.id == "self"
    ]
    return [name for name in names if isinstance(vars(template).get(name), keras.Layer)]


def _all_layers(template: keras.Model) -> list[keras.Layer]:
    """The template and the layers in it, also those within other layers."""
    return template._flatten_layers()  # Keras has no public walk over them
