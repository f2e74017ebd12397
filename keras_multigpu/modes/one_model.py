"""A parallel model and its template: one model to the user.

The rule: both have one `__dict__`, the template's; only what Keras keeps for each compiled model
(`PER_COMPILED`), what makes the parallel model a layer around its template (`PER_LAYER`) and the
mode's own names, which begin with `_parallel_`, are the parallel model's alone.

So whatever is set on either of the two, in whatever way (an attribute, a property, a method of the
class, `vars(model)`), both have it: settings, layers, metrics, functions, a `train_step`. The names
that are kept apart are properties of the parallel model's class. While the parallel model computes,
the template has them too: its `call`, which runs with `self` = the template, reads the optimizer
with which the training is done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import keras

# What Keras's trainers keep: an optimizer, what was compiled, traced, and where a run stands.
PER_COMPILED = frozenset(
    {
        "_compile_config",
        "_compile_loss",
        "_compile_metrics",
        "_compiled_trainable_state",
        "_distribute_reduction_method",
        "_distribute_strategy",
        "_distributed_dataset",
        "_eval_epoch_iterator",
        "_initial_epoch",
        "_jax_state",
        "_jax_state_synced",
        "_jit_compile",
        "_loss_tracker",
        "_run_eagerly",
        "compiled",
        "history",
        "loss",
        "optimizer",
        "predict_function",
        "steps_per_execution",
        "stop_evaluating",
        "stop_predicting",
        "stop_training",
        "test_function",
        "train_function",
        "unrolled_steps_per_execution",
    }
)

# What a Keras layer needs to be called and built as itself. The parallel model has no variables
# beside those of the layers in it: the template, and what the mode adds.
PER_LAYER = frozenset(
    {
        "_build_shapes_dict",
        "_compute_loss_has_training_arg",
        "_convert_input_args",
        "_loss_ids",
        "_losses",
        "_losses_override",
        "_non_trainable_variables",
        "_remat_mode",
        "_seed_generators",
        "_trainable_variables",
        "autocast",
        "build",
        "quantize",
    }
)

PREFIX = "_parallel_"
_NOTHING: Any = object()


@dataclasses.dataclass
class _Own:
    """What a parallel model has of its own.

    Attributes:
        mode: what the mode keeps, by names that begin with `_parallel_`.
        keras: what Keras keeps, by names of `PER_COMPILED` and `PER_LAYER`.
        computing: how many scopes `computing` are open.
        in_call: whether Keras's `__call__` is running.
        templates: the template's own values of `PER_COMPILED` while it has this model's.
    """

    mode: dict[str, Any] = dataclasses.field(default_factory=dict)
    keras: dict[str, Any] = dataclasses.field(default_factory=dict)
    computing: int = 0
    in_call: bool = False
    templates: dict[str, Any] = dataclasses.field(default_factory=dict)


class OneModel(keras.Model):
    """A model that shares its `__dict__` with another one, its template.

    Args:
        template: the other model.
    """

    __slots__ = ("_parallel_own",)
    _parallel_properties: frozenset[str]
    _parallel_template: keras.Model
    # Kept from Keras's walk over a model's parts, whose paths name the weights in a file.
    _parallel_hidden = frozenset({"template"})

    def __init__(self, template: keras.Model):
        # What Keras sets here goes into a `__dict__` that is then left: the template's is taken.
        # The template casts its inputs itself, each to the type that it declares.
        keras.Model.__init__(self, name=template.name, dtype=template.dtype_policy, autocast=False)
        object.__setattr__(self, "__dict__", vars(template))
        self._parallel_template = template

    @property
    def template(self) -> keras.Model:
        """The model that was made parallel. It is one model with this one."""
        return self._parallel_template

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(PREFIX):
            mode = own(self).mode
            return mode[name] if name in mode else super().__getattribute__(name)
        return rebound(self, super().__getattribute__(name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith(PREFIX):
            own(self).mode[name] = value
        elif name in self._parallel_properties:
            object.__setattr__(self, name, value)  # untracked: Keras's trackers are the template's
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        names = {name for name in super().__dir__() if not name.startswith(PREFIX)}
        return sorted(names - self._parallel_hidden)

    @property
    def activity_regularizer(self) -> Any:
        """The template's. In a call the template applies it, so Keras must not do it once more."""
        return None if own(self).in_call else vars(self).get("activity_regularizer")

    @activity_regularizer.setter
    def activity_regularizer(self, value: Any) -> None:
        attributes: Any = vars(self)
        attributes["activity_regularizer"] = value

    @property
    def _layers(self) -> list[keras.Layer]:
        """The layers in this one: Keras has no other way to be told of them."""
        template = own(self).mode.get("_parallel_template")
        if template is None:
            return []
        # Keras looks for a model's input in the first place.
        first = [one for one in template._layers[:1] if isinstance(one, keras.layers.InputLayer)]
        return [*first, template, *self._parallel_layers()]

    @_layers.setter
    def _layers(self, value: Any) -> None:
        pass  # Keras's new list, when the parallel model is made

    def _parallel_layers(self) -> list[keras.Layer]:
        """The layers that the mode has beside the template."""
        return []

    def _parallel_inherited(self, name: str) -> Any:
        """The template's method: set on the instance, or its class's; bound to this model."""
        if name in vars(self):
            return rebound(self, vars(self)[name])
        return getattr(super(), name)


def own(model: Any) -> _Own:
    """What a parallel model has of its own."""
    slot = vars(OneModel)["_parallel_own"]
    try:
        return slot.__get__(model)
    except AttributeError:  # Keras sets attributes before any `__init__` runs
        slot.__set__(model, _Own())
        return slot.__get__(model)


def rebound(model: OneModel, value: Any) -> Any:
    """What is a method of the template's becomes one of the parallel model."""
    if type(value) is types.MethodType and value.__self__ is own(model).mode.get(
        "_parallel_template"
    ):
        return types.MethodType(value.__func__, model)
    return value


def kept_apart(name: str, inherited: Any = _NOTHING) -> property:
    """A property of a name whose value is the parallel model's own.

    Args:
        name: the name.
        inherited: what a class below has by that name: the value while nothing is set.
    """

    def place(self: Any) -> dict[str, Any]:
        is_shown = name in PER_COMPILED and _shown.get(id(vars(self))) is own(self)
        return vars(self) if is_shown else own(self).keras

    def get(self: Any) -> Any:
        found = place(self).get(name, inherited)
        if found is _NOTHING:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        is_set = found is not inherited
        return found if is_set or not hasattr(found, "__get__") else found.__get__(self, type(self))

    def put(self: Any, value: Any) -> None:
        place(self)[name] = value

    def remove(self: Any) -> None:
        if place(self).pop(name, _NOTHING) is _NOTHING:
            raise AttributeError(name)

    return property(get, put, remove)


_lock = threading.RLock()
_shown: dict[int, _Own] = {}  # whose values a template has now, by the `id` of its `__dict__`


@contextlib.contextmanager
def computing(model: OneModel) -> Iterator[None]:
    """A scope in which the template has its parallel model's values of `PER_COMPILED`.

    They are moved into the `__dict__` that both have, for the parallel model to find there too. If
    several parallel models of a template compute at a time, it has those of the first.
    """
    mine: _Own = own(model)
    shared: Any = vars(model)
    with _lock:
        mine.computing += 1
        if id(shared) not in _shown:
            _shown[id(shared)] = mine
            templates = _move(shared, {})
            _move(mine.keras, shared)
            mine.templates = templates
    try:
        yield
    finally:
        with _lock:
            mine.computing -= 1
            if not mine.computing and _shown.get(id(shared)) is mine:
                del _shown[id(shared)]
                _move(shared, mine.keras)
                shared.update(mine.templates)


@contextlib.contextmanager
def calling(model: OneModel) -> Iterator[None]:
    """A scope in which Keras's `__call__` finds nothing to do that the template's does as well."""
    mine = own(model)
    before, mine.in_call = mine.in_call, True
    try:
        yield
    finally:
        mine.in_call = before


@contextlib.contextmanager
def lent(model: OneModel, others: Sequence[keras.Model]) -> Iterator[None]:
    """A scope, within `computing`, in which other models have the template's values too."""
    values: Any = {name: vars(model)[name] for name in PER_COMPILED & vars(model).keys()}
    attributes: list[Any] = [vars(other) for other in others]
    before = [_move(one, {}) for one in attributes]
    for one in attributes:
        one.update(values)
    try:
        yield
    finally:
        for one, kept in zip(attributes, before):
            _move(one, {})
            one.update(kept)


def _move(source: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """Moves what is `PER_COMPILED` from one dictionary into another, and gives that."""
    target.update({name: source.pop(name) for name in PER_COMPILED & source.keys()})
    return target
