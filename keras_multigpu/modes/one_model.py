"""A parallel model and its template: one model to the user.

The rule: both share one `__dict__`, the template's. Three groups of names belong to the parallel
model alone: what Keras keeps for each compiled model (`PER_COMPILED`), what makes the parallel
model a layer around its template (`PER_LAYER`), and the mode's names (`_parallel_...`).

So what is set on one of the two is set on both, in any way (an attribute, a property, a method of
the class, `vars(model)`): settings, layers, metrics, functions, a `train_step`. The names of the
parallel model alone are properties of its class. While it computes, the template has the values of
`PER_COMPILED` too: its `call`, which runs with `self` = the template, reads the training's
optimizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import keras

# State of Keras's trainers: the optimizer, compiled settings, traced functions, progress of a run.
PER_COMPILED = frozenset(
    """
    _compile_config _compile_loss _compile_metrics _compiled_trainable_state
    _distribute_reduction_method _distribute_strategy _distributed_dataset _eval_epoch_iterator
    _initial_epoch _jax_state _jax_state_synced _jit_compile _loss_tracker _run_eagerly compiled
    history loss optimizer predict_function steps_per_execution stop_evaluating stop_predicting
    stop_training test_function train_function unrolled_steps_per_execution
    """.split()
)

# What a Keras layer needs for its own calls and build. The parallel model's only variables are
# those of its sub-layers: the template, and what the mode adds.
PER_LAYER = frozenset(
    """
    _build_shapes_dict _compute_loss_has_training_arg _convert_input_args _loss_ids _losses
    _losses_override _non_trainable_variables _remat_mode _seed_generators _trainable_variables
    autocast build quantize
    """.split()
)

KERAS_STEPS = frozenset({"train_step", "test_step", "predict_step"})
# Methods of a mode, and steps, which no attribute of the template replaces.
_MODES_OWN = KERAS_STEPS | {"call", "compute_loss", "get_config", "stateless_call"}

PREFIX = "_parallel_"


@dataclasses.dataclass
class _Own:
    """The attributes of a parallel model alone."""

    mode: dict[str, Any] = dataclasses.field(default_factory=dict)  # by `_parallel_...`
    keras: dict[str, Any] = dataclasses.field(default_factory=dict)  # of both groups above
    in_call: bool = False  # whether Keras's `__call__` is running
    computing: int = 0  # how many scopes `computing` are open
    # The template's values of `PER_COMPILED`, while it has this model's instead.
    templates: dict[str, Any] = dataclasses.field(default_factory=dict)


class OneModel(keras.Model):
    """A model that shares its `__dict__` with another one, its template."""

    __slots__ = ("_parallel_own",)
    _parallel_template: keras.Model
    # Hidden from Keras's walk over a model's parts, whose paths name the weights in a file.
    _parallel_hidden = frozenset({"template"})

    def __init__(self, template: keras.Model):
        # Keras fills a `__dict__` here that the template's then replaces. No autocast: the template
        # casts its inputs itself, each to its declared type.
        keras.Model.__init__(self, name=template.name, dtype=template.dtype_policy, autocast=False)
        object.__setattr__(self, "__dict__", vars(template))
        self._parallel_template = template

    @property
    def template(self) -> keras.Model:
        """The model that was made parallel; it shares its attributes with this one."""
        return self._parallel_template

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(PREFIX):
            mode = own(self).mode
            return mode[name] if name in mode else super().__getattribute__(name)
        if name in _MODES_OWN:
            return self._parallel_method(name)
        return rebound(self, super().__getattribute__(name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith(PREFIX):
            own(self).mode[name] = value
        elif isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)  # untracked: Keras's trackers are the template's
            if name == "optimizer" and hasattr(value, "_trackable_children"):
                # A checkpoint of TensorFlow's that was read before may have its state.
                self._handle_deferred_dependencies(name, value)
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        names = {name for name in super().__dir__() if not name.startswith(PREFIX)}
        return sorted(names - self._parallel_hidden)

    @property
    def activity_regularizer(self) -> Any:
        """The template's; `None` in a call, because the template applies it there."""
        return None if own(self).in_call else vars(self).get("activity_regularizer")

    @activity_regularizer.setter
    def activity_regularizer(self, value: Any) -> None:
        attributes: Any = vars(self)
        attributes["activity_regularizer"] = value

    @property
    def _layers(self) -> list[keras.Layer]:
        """The sub-layers, which Keras reads from this attribute."""
        template = own(self).mode.get("_parallel_template")
        if template is None:
            return []
        # Keras expects a model's input layer first.
        first = [one for one in template._layers[:1] if isinstance(one, keras.layers.InputLayer)]
        return [*first, template, *self._parallel_layers()]

    @_layers.setter
    def _layers(self, value: Any) -> None:
        pass  # Keras's new list, when the parallel model is made

    @property
    def trainable(self) -> bool:
        """Whether the template is trainable."""
        return self.template.trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        # The two share this value. Set here first, TensorFlow would take it for the template's own,
        # and leave the layers within as they are.
        self.template.trainable = value

    def _parallel_layers(self) -> list[keras.Layer]:
        """The mode's layers beside the template."""
        return []

    def _trackable_children(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What `tf.train.Checkpoint` writes: the template's parts, and what this model has."""
        children = super()._trackable_children(*args, **kwargs)
        children |= {f"parallel_{n}": layer for n, layer in enumerate(self._parallel_layers())}
        optimizer = getattr(self, "optimizer", None)
        is_tracked = hasattr(optimizer, "_trackable_children")
        return {**children, "optimizer": optimizer} if is_tracked else children

    def _parallel_method(self, name: str) -> Any:
        """The method of this model's mode; else the template's."""
        definer = next(cls for cls in type(self).__mro__ if name in vars(cls))
        if issubclass(definer, OneModel):
            return types.MethodType(vars(definer)[name], self)
        return self._parallel_inherited(name)

    def _parallel_inherited(self, name: str) -> Any:
        """The template's method, from its instance or its class, bound to this model."""
        if name in vars(self):
            return rebound(self, vars(self)[name])
        return getattr(super(), name)


def own(model: Any) -> _Own:
    """The attributes of a parallel model alone."""
    slot = vars(OneModel)["_parallel_own"]
    try:
        return slot.__get__(model)
    except AttributeError:  # Keras sets attributes before any `__init__` runs
        slot.__set__(model, _Own())
        return slot.__get__(model)


def rebound(model: OneModel, value: Any) -> Any:
    """Binds a method of the template to the parallel model; returns other values unchanged."""
    if type(value) is types.MethodType and value.__self__ is own(model).mode.get(
        "_parallel_template"
    ):
        return types.MethodType(value.__func__, model)
    return value


def kept_apart(name: str, inherited: Any) -> property:
    """A property whose value belongs to the parallel model alone.

    `inherited` is a base class's value, used while nothing is set; `...` if there is none.
    """

    def place(self: Any) -> dict[str, Any]:
        is_shown = name in PER_COMPILED and _shown.get(id(vars(self))) is own(self)
        return vars(self) if is_shown else own(self).keras

    def get(self: Any) -> Any:
        values = place(self)
        if name in values:
            return values[name]
        if inherited is ...:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        bind = getattr(inherited, "__get__", None)
        return inherited if bind is None else bind(self, type(self))

    def put(self: Any, value: Any) -> None:
        place(self)[name] = value

    def remove(self: Any) -> None:
        if name not in place(self):
            raise AttributeError(name)
        del place(self)[name]

    return property(get, put, remove)


_lock = threading.RLock()
_shown: dict[int, _Own] = {}  # the model whose values a template has, by the `id` of its `__dict__`


@contextlib.contextmanager
def computing(model: OneModel) -> Iterator[None]:
    """Scope in which the template has its parallel model's values of `PER_COMPILED`.

    They move into the common `__dict__`, where the parallel model finds them too. If several
    parallel models of a template compute at the same time, it has the first one's values.
    """
    mine: _Own = own(model)
    shared: Any = vars(model)
    with _lock:
        mine.computing += 1
        if id(shared) not in _shown:
            _shown[id(shared)] = mine
            mine.templates = _move(shared, {})
            _move(mine.keras, shared)
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
def lent(model: OneModel, others: Sequence[keras.Model]) -> Iterator[None]:
    """Scope, within `computing`, in which other models also have the template's values."""
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
    """Moves the values of `PER_COMPILED` from one dictionary into another, and returns that."""
    target.update({name: source.pop(name) for name in PER_COMPILED & source.keys()})
    return target
