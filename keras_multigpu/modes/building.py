"""Makes a parallel model: checks the request, makes the model, compiles it like its template."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.engines import Request
from keras_multigpu.modes.forgotten import compilation
from keras_multigpu.modes.one_model import PER_COMPILED, PER_LAYER, computing, kept_apart


def build_parallel(mode: Any, request: Request, asked: Any = None) -> Any:
    """A mode's parallel model, compiled if its template is.

    `asked`: the devices, as the user asked for them; see `devices.choose_again`.

    Requests of users and of files both come through here, and are checked before anything is built.
    """
    check(mode, request)
    template = request.template
    classes: Any = (mode, type(template))
    parallel = _parallel_class(*classes)(template, request.devices, **request.options)
    parallel._parallel_asked = asked
    if template.compiled and parallel._parallel_keeps_outputs():
        compile_like(parallel, template)
        parallel._parallel_compilation = compilation(parallel)
    return parallel


@functools.cache
def _parallel_class(mode: Any, template_class: Any) -> Any:
    """The class of a mode's parallel models of templates of one class."""
    bases = (mode, template_class)

    @functools.wraps(template_class.call)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with computing(self):
            return self._parallel_call_replicas(*_with_keywords(template_class.call, args, kwargs))

    def fill(namespace: dict[str, Any]) -> None:
        namespace.update(call=call, __module__=mode.__module__, __doc__=mode.__doc__)
        namespace["mode"] = property(lambda self: mode.mode)
        if issubclass(template_class, keras.Sequential):
            namespace.update({name: _forward(name) for name in ("add", "pop")})

    made = types.new_class(mode.__name__, bases, exec_body=fill)
    for name in PER_COMPILED | PER_LAYER:  # a parallel model doesn't share them with its template
        inherited = inspect.getattr_static(made, name, ...)
        if not hasattr(inherited, "__set__"):  # not a user's property
            setattr(made, name, kept_apart(name, inherited))
    # Register both classes: Keras saves by class -> name, and loads by name -> the mode's class,
    # which recreates the combined one.
    for cls in (made, mode):
        keras.saving.register_keras_serializable(package="keras_multigpu")(cls)
    return made


def _with_keywords(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call's arguments; by name from `training` or `mask` on, which Keras passes by name."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = inspect.signature(call).parameters.values()
    names = [one.name for one in known if one.kind in kinds][1:]  # all but `self`
    first = min((names.index(name) for name in ("training", "mask") if name in names), default=None)
    if first is None or len(args) > len(names):
        return args, kwargs
    return args[:first], dict(zip(names[first:], args[first:]), **kwargs)


def _forward(name: str) -> Any:
    """A method that changes the template, and then traces the replicas again."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._parallel_check_change(name)
        result = getattr(self.template, name)(*args, **kwargs)
        self._parallel_retrace()
        return result

    return method


@contextlib.contextmanager
def making_template(
    mode: Any, devices: Sequence[str], options: Mapping[str, Any]
) -> Iterator[bool]:
    """Scope in which a template is made: in the host's memory if its weights will be moved.

    Yields whether they will.
    """
    is_moved = mode._parallel_runner_class().moves_weights(devices, options)
    with engines.current().on_host() if is_moved else contextlib.nullcontext():
        yield is_moved


def compile_like(model: keras.Model, compiled: keras.Model) -> None:
    """Compiles a model with the arguments that another one was compiled with.

    The optimizer is a copy, with the state if both train the same weights; metrics are new. What
    a custom `compile` of the class has set otherwise (further optimizers, say) both have in common
    already, as all attributes.
    """
    # Keras keeps the arguments here that reached its own `compile`; `get_compile_config` serializes
    # them, and custom functions and losses don't survive that.
    config = getattr(compiled, "_compile_config", None)
    if config is None:
        warnings.warn(
            f"The `compile` of {type(compiled).__name__} does not call Keras's, so that the "
            f"parallel model can't be compiled like {compiled.name!r}. Call "
            "`parallel.compile(...)` with your arguments before `fit`.",
            stacklevel=4,
        )
        return
    arguments = dict(config.config)
    try:
        for name in ("metrics", "weighted_metrics"):
            arguments[name] = keras.tree.map_structure(_copy_metric, arguments[name])
        arguments["optimizer"] = _copy_optimizer(compiled, model)
    except Exception as error:  # a user's class may raise anything; the warning says it
        warnings.warn(
            f"{compiled.name!r} is compiled with an optimizer or a metric that can't be copied by "
            f"its configuration: {error!r}. Its parallel model is not compiled: compile that one, "
            "or give the class a `get_config` from which `from_config` makes it again.",
            stacklevel=4,
        )
        return
    # Not `model.compile`: the class may have a custom one, with arguments that nobody kept.
    keras.Model.compile(model, **arguments)
    if type(compiled).compile is not keras.Model.compile:
        model.loss = compiled.loss  # it may have been set after Keras's `compile`


def _copy_metric(metric: Any) -> Any:
    is_object = isinstance(metric, keras.Metric)
    return type(metric).from_config(metric.get_config()) if is_object else metric


def _copy_optimizer(compiled: keras.Model, model: keras.Model) -> Any:
    optimizer = compiled.optimizer
    if optimizer is None:
        return None
    copy = type(optimizer).from_config(optimizer.get_config())
    # No configuration contains the exclusions from weight decay.
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(optimizer, name):
            setattr(copy, name, getattr(optimizer, name))
    if optimizer.built:
        _copy_slots(optimizer, copy, model)
    return copy


def _copy_slots(optimizer: keras.Optimizer, copy: keras.Optimizer, model: keras.Model) -> None:
    """Copies an optimizer's state, if it was built with all variables that the model trains.

    The copy is built with the same variables, including ones frozen since, so that every slot
    belongs to the same variable in both.
    """
    known = optimizer._trainable_variables  # Keras has no public list of them
    if not set(map(id, model.trainable_variables)) <= set(map(id, known)):
        return
    copy.build(known)
    shapes = [[tuple(slot.shape) for slot in one.variables] for one in (optimizer, copy)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the copy has state of the shapes {shapes[1]} in place of {shapes[0]}")
    for own, other in zip(copy.variables, optimizer.variables):
        own.assign(keras.ops.copy(other))  # JAX donates a variable's array to its step


_OWN_NAMES = ("template", "devices", "mode")


def check(mode: Any, request: engines.Request) -> None:
    """Checks a request for a mode (a subclass of `ParallelModel`) before anything is built.

    Raises:
        ValueError: if the process, the template, the options or the backend don't allow it.
    """
    engines.current().check(request)
    _check_names(request.template, mode)
    mode._parallel_check(request.options)
    mode._parallel_runner_class().check(request)


def _check_names(template: keras.Model, mode: Any) -> None:
    """Refuses templates with attributes that a parallel model defines, or with parallel parts.

    A method gives way to an attribute that is set on the model: its own code may read it.
    """
    own_names = (*_OWN_NAMES, *mode._parallel_names, *mode._parallel_methods)
    clashes = [
        name
        for name in own_names
        if hasattr(type(template) if name in mode._parallel_methods else template, name)
    ]
    if clashes:
        raise ValueError(
            f"A parallel model defines the attributes {', '.join(own_names)}. Received: "
            f"a model with attributes of the same names: {', '.join(clashes)}. Rename them in "
            f"{type(template).__name__}."
        )
    for layer in engines.all_layers(template):
        if hasattr(type(layer), "_parallel_call_replicas"):
            raise ValueError(
                "A parallel model can't be a part of another one. Received: a model with the "
                f"parallel model {layer.name!r} in it. Build it with `.template` instead, and "
                "make the whole parallel."
            )
