"""Makes `keras.remat` and `keras.RematScope` keep the gradients of a replica's weights.

TensorFlow's `recompute_grad` differentiates a function by its arguments and by `tf.Variable`s. In a
replica, weights are tensors, so here they become arguments.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.shared import SEED
from keras_multigpu.engines.tensorflow.scope import HiddenStateError
from keras_multigpu.engines.tensorflow.tensors import map_tensors
from keras_multigpu.engines.values import Tensor

_THREAD = threading.local()
_recompute_grad = tf.recompute_grad


@contextlib.contextmanager
def recomputing_in(scope: keras.StatelessScope) -> Iterator[None]:
    """While open, functions recomputed in this thread get their weights from a scope."""
    outer = _current()
    _THREAD.scope = scope
    try:
        with scope:
            yield
    finally:
        _THREAD.scope = outer


def recompute_grad(function: Callable[..., Any]) -> Any:
    """TensorFlow's `recompute_grad`; in a replica, also for the weights."""
    if _current() is None:
        return _recompute_grad(function)

    @functools.wraps(function, updated=())
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        scope = _current()
        if scope is None:
            return _recompute_grad(function)(*args, **kwargs)
        return _run(scope, functools.partial(function, **kwargs), args)

    return recomputed


def _current() -> keras.StatelessScope | None:
    return getattr(_THREAD, "scope", None)


def _run(scope: keras.StatelessScope, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    mapping, used = scope.state_mapping, _variables_read(scope, function, args)
    found = {id(variable): scope.get_current_value(variable) for variable in used}
    # Of this graph: the gradient's function can't refer to tensors of another one.
    values = {key: tf.identity(value) for key, value in found.items() if value is not None}
    args = map_tensors(tf.identity, args)
    weights = {key: value for key, value in values.items() if value.dtype.is_floating}

    def explicit(*given: Tensor) -> Any:
        own = dict(zip(weights, given))
        if scope is _current():
            with _replaced(mapping, own):
                return function(*given[len(own) :])
        again = keras.StatelessScope(collect_losses=True)  # what it assigns and adds is known
        again.state_mapping.update({**values, **own})
        with recomputing_in(again):
            return function(*given[len(own) :])

    return _recompute_grad(explicit)(*weights.values(), *args)


@contextlib.contextmanager
def _replaced(mapping: dict[int, Tensor], values: dict[int, Tensor]) -> Iterator[None]:
    """Values of a mapping, replaced for a time; those that are assigned meanwhile are kept."""
    before = {key: mapping[key] for key in values if key in mapping}
    mapping.update(values)
    yield
    for key, value in values.items():
        if mapping[key] is value:
            mapping.pop(key)
            mapping.update({key: before[key]} if key in before else {})


def _variables_read(
    scope: keras.StatelessScope, function: Callable[..., Any], args: tuple[Any, ...]
) -> list[keras.Variable]:
    """The variables that a function reads, found by tracing it once more."""
    reading = _Reading(scope)

    def run(*given: Tensor) -> Any:
        with recomputing_in(reading):
            return function(*given)

    tf.function(run, autograph=False).get_concrete_function(*args)
    return list(reading.read.values())


class _Reading(keras.StatelessScope):
    """Notes which variables are read. Changes nothing in the scope outside.

    Raises:
        HiddenStateError: if a variable other than a generator's seed is assigned: Keras assigns it
            once more when it recomputes.
    """

    def __init__(self, outer: keras.StatelessScope):
        super().__init__(collect_losses=True)
        self._outer = outer.state_mapping
        self.read: dict[int, keras.Variable] = {}

    def get_current_value(self, variable: keras.Variable) -> Tensor | None:
        value = super().get_current_value(variable)
        if value is None:
            self.read[id(variable)] = variable
            value = self._outer.get(id(variable))
        return value

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        if update[0].name != SEED:
            raise HiddenStateError(
                f"The variable {update[0].path!r} is assigned in a function that is recomputed for "
                "its gradient (`keras.remat`), where a replica's state can't be followed. Call its "
                "layer outside of the function."
            )
        super().add_update(update)


# Where Keras looks it up, in each call.
tf.recompute_grad = recompute_grad
