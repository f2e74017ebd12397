"""What is in a template: its layers and how they are built, its metrics, the steps of its class."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

_STEPS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")


def all_layers(model: keras.Model) -> list[keras.Layer]:
    """A model and its layers, including nested ones."""
    return model._flatten_layers()  # Keras has no public walk over them


def is_built(model: keras.Model) -> bool:
    """Whether a model's weights exist.

    Keras takes a Sequential model for built if it has an input shape, even where Keras can't infer
    the shapes of the layers within: their weights are made when they are called.
    """
    half = [one for one in all_layers(model) if isinstance(one, keras.Sequential) and one.built]
    return model.built and all(layer.built for one in half for layer in one.layers)


@contextlib.contextmanager
def built_in(
    scope: Callable[[], contextlib.AbstractContextManager[Any]], models: Iterable[keras.Layer]
) -> Iterator[None]:
    """While open, layers are built in a scope of their own.

    In a trace, constants that `build` makes would be tensors of the trace. Layers that a layer
    makes in its `build` are included.
    """
    known: dict[int, keras.Layer] = {}

    def replace(model: keras.Layer) -> None:
        for layer in all_layers(model):
            if not layer.built and id(layer) not in known:
                known[id(layer)] = layer
                replaced.enter_context(having_method(layer, "build", outside(layer, layer.build)))

    def outside(layer: keras.Layer, own: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(own)
        def build(*args: Any, **kwargs: Any) -> None:
            with scope():
                own(*args, **kwargs)
            replace(layer)

        return build

    with contextlib.ExitStack() as replaced:
        for model in models:
            replace(model)
        yield


@contextlib.contextmanager
def having_method(layer: keras.Layer, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Scope in which a layer has another method; what replaces that in turn stays."""
    own, is_set = getattr(layer, name), name in vars(layer)
    # Not by Keras's `__setattr__`, which would track the value.
    object.__setattr__(layer, name, method)
    try:
        yield
    finally:
        if vars(layer).get(name) is method:
            vars(layer).pop(name)
            if is_set:
                object.__setattr__(layer, name, own)


def metrics_of(model: keras.Model) -> list[keras.Metric]:
    """The metrics in a model, in Keras's list: that of the class may be what `compile` makes."""
    of_keras: Any = keras.Model.metrics
    return of_keras.fget(model)


def metrics_variables(model: keras.Model) -> list[keras.Variable]:
    """The variables of the metrics in a model."""
    return [variable for metric in metrics_of(model) for variable in metric.variables]


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


def warn_of_direct_calls(template: keras.Model) -> None:
    """Warns if a custom step of the template calls layers directly, not through the replicas."""
    if direct := direct_calls(template):
        warnings.warn(
            f"{type(template).__name__} calls layers directly: {direct}. Only `self(...)` runs on "
            "all devices; these calls run on one. Call them from `call`.",
            stacklevel=6,  # the caller of `make_parallel`
        )


def direct_calls(template: keras.Model) -> str:
    """The layers that custom steps of a template call themselves, as a text; `""` if none."""
    direct: dict[str, str] = {}
    for name in own_steps(template):
        function = vars(template).get(name, inspect.getattr_static(type(template), name))
        called = [node.attr for node in _nodes_on_self(function, called=True)]
        layers = [one for one in called if isinstance(vars(template).get(one), keras.Layer)]
        direct |= dict.fromkeys(layers, name)
    return ", ".join(f"`self.{layer}(...)` in `{step}`" for layer, step in direct.items())


def state_read(template: keras.Model, step: str) -> list[str]:
    """The names of weights and layers that a step method reads as `self.name`.

    Methods that it calls as `self.method(...)` count, but for `call` and `compute_loss`.
    """
    found: list[str] = []
    names, seen = [step], {"call", *_STEPS}
    while names:
        name = names.pop()
        seen.add(name)
        function = vars(template).get(name, inspect.getattr_static(type(template), name, None))
        for node in _nodes_on_self(function):
            value = vars(template).get(node.attr)
            if isinstance(value, (keras.Layer, keras.Variable)):
                found.append(node.attr)
            elif node.attr not in seen and _is_users(type(template), node.attr):
                names.append(node.attr)
    return list(dict.fromkeys(found))


def _is_users(cls: type, name: str) -> bool:
    """Whether a class gets a name from a class of the user's."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    return owner is not None and not owner.__module__.startswith("keras.")


def _nodes_on_self(function: Any, called: bool = False) -> list[ast.Attribute]:
    """Where a method names an attribute of `self`; with `called`, where it calls one.

    `self.part.stateless_call(...)` calls the part.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return []  # no source, in an interactive session, say
    nodes: list[ast.AST] = list(ast.walk(tree))
    own = next((one.args.args[:1] for one in nodes if isinstance(one, ast.FunctionDef)), [])
    names = {"self", *(one.arg for one in own)}
    if called:
        nodes = [node.func for node in nodes if isinstance(node, ast.Call)]
        nodes += [
            node.value
            for node in nodes
            if isinstance(node, ast.Attribute) and node.attr in ("stateless_call", "call")
        ]
    return [
        node
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in names
    ]
