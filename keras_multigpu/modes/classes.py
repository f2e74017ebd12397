"""The classes of parallel models, each a subclass of its mode's and its template's class."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from typing import Any

import keras

from keras_multigpu.modes.one_model import PER_COMPILED, PER_LAYER, OneModel, computing, kept_apart

# Keras's steps, in which the template has its parallel model's optimizer.
_KERAS_STEPS = ("train_step", "test_step", "predict_step")
_STEPS = (*_KERAS_STEPS, "stateless_call")
# Methods of a mode, which no attribute of the template may replace.
_MODES_OWN = ("call", "compute_loss", "get_config", *_STEPS)


@functools.cache
def parallel_class(mode: Any, template_class: Any) -> Any:
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
    _keep_apart(made)
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


def _keep_apart(made: Any) -> None:
    """Adds properties for the attributes that a parallel model doesn't share with its template."""
    for name in PER_COMPILED | PER_LAYER:
        inherited = inspect.getattr_static(made, name, kept_apart)
        if inherited is kept_apart:
            setattr(made, name, kept_apart(name))
        elif not hasattr(inherited, "__set__"):  # not a user's property
            setattr(made, name, kept_apart(name, inherited))
    for name in _MODES_OWN:
        definer = next(cls for cls in made.__mro__ if name in vars(cls))
        function = vars(definer)[name] if definer is made or issubclass(definer, OneModel) else None
        if function is not None or name in _STEPS:
            setattr(made, name, _method(name, function, getattr(made, name)))
    ours = [cls for cls in made.__mro__ if issubclass(cls, OneModel)]
    made._parallel_properties = frozenset(
        name for cls in ours for name, value in vars(cls).items() if isinstance(value, property)
    )


class _Method(property):
    """A method that no attribute of an instance can replace; a plain function on the class."""

    of_class: Any

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self.of_class if instance is None else super().__get__(instance, owner)


def _method(name: str, function: Any, of_class: Any) -> property:
    """A method that no attribute of an instance can replace.

    `function` is the mode's; `None` for the template's, from the instance or its class. `of_class`
    is the value on the class.
    """

    def get(self: Any) -> Any:
        bound = types.MethodType(function, self) if function else self._parallel_inherited(name)
        if name not in _STEPS:
            return bound
        is_step = name in _KERAS_STEPS
        if is_step:
            bound = self._parallel_steps.around(bound, name)

        @functools.wraps(bound)
        def step(*args: Any, **kwargs: Any) -> Any:
            within = self._parallel_in_step() if is_step else contextlib.nullcontext()
            with computing(self), within:
                return bound(*args, **kwargs)

        return step

    def put(self: Any, value: Any) -> None:
        vars(self)[name] = value

    method = _Method(get, put)
    method.of_class = of_class
    return method


def _forward(name: str) -> Any:
    """A method that changes the template, and then traces the replicas again."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._parallel_check_change(name)
        result = getattr(self.template, name)(*args, **kwargs)
        self._parallel_retrace()
        return result

    return method
