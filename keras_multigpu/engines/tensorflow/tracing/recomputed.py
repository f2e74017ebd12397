"""Makes `keras.remat` and `keras.RematScope` keep the gradients of a replica's weights.

TensorFlow's `recompute_grad` differentiates a function by its arguments and by `tf.Variable`s. In a
replica, weights are tensors, so here they become arguments.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.attributes import get_attributes, set_attributes, with_attributes
from keras_multigpu.engines.shared import SEED, active_scope
from keras_multigpu.engines.tensorflow.tracing.scope import HiddenStateError, ReplicaScope
from keras_multigpu.engines.values import Tensor

_recompute_grad = tf.recompute_grad


def recompute_grad(function: Callable[..., Any]) -> Any:
    """TensorFlow's `recompute_grad`; in a replica, also for the weights."""
    plain = _recompute_grad(function)

    @functools.wraps(function, updated=())
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        scope = active_scope()
        if not isinstance(scope, (ReplicaScope, _Reading, _Again)):
            return plain(*args, **kwargs)
        if isinstance(scope, ReplicaScope) and not scope.is_differentiated:
            # Like TensorFlow's, without what Keras attached to the results, such as a mask.
            return _identity(function(*args, **kwargs))
        return _run(scope, functools.partial(function, **kwargs), args)

    return recomputed


class _Again(keras.StatelessScope):
    """The scope in which a function is computed again."""


def _run(scope: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    mapping = scope.state_mapping
    found = {id(v): (v, scope.get_current_value(v)) for v in _variables_read(scope, function, args)}
    # Of this graph: the gradient's function can't refer to tensors of another one.
    values = {key: tf.identity(one) for key, (_, one) in found.items() if one is not None}
    args = tuple(with_attributes(_identity, one) if tf.is_tensor(one) else one for one in args)
    weights = {key: one for key, one in values.items() if _is_watched(found[key][0], one)}

    def explicit(*given: Tensor) -> Any:
        own, rest = dict(zip(weights, given)), given[len(weights) :]
        if active_scope() is scope:
            with _replaced(mapping, own), _constant_losses(scope):
                return function(*rest)
        again = _Again(collect_losses=True)  # what it assigns and adds is known
        again.state_mapping.update({**values, **own})
        with again:
            return function(*rest)

    return _recompute_grad(explicit)(*weights.values(), *args)


def _identity(tensor: Any) -> Any:
    return tf.nest.map_structure(tf.identity, tensor, expand_composites=True)


def _is_watched(variable: keras.Variable, value: Tensor) -> bool:
    """Whether tapes watch a variable by themselves: they don't know that Keras has frozen it."""
    return variable._value.trainable and value.dtype.is_floating


@contextlib.contextmanager
def _replaced(mapping: dict[int, Tensor], values: dict[int, Tensor]) -> Iterator[None]:
    """Values of a mapping, replaced for a time; those that are assigned meanwhile are kept."""
    before = {key: mapping[key] for key in values if key in mapping}
    mapping.update(values)
    try:
        yield
    finally:
        for key, value in values.items():
            if mapping[key] is value:
                mapping.pop(key)
                mapping.update({key: before[key]} if key in before else {})


@contextlib.contextmanager
def _constant_losses(scope: keras.StatelessScope) -> Iterator[None]:
    """Losses that are added meanwhile have no gradient: no tape sees a function's first run."""
    count = len(scope.losses)
    yield
    scope.losses[count:] = map(tf.stop_gradient, scope.losses[count:])


def _variables_read(
    scope: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> list[keras.Variable]:
    """The variables that a function reads, found by running it once more."""
    reading = _Reading(scope)

    def run(*given: Any) -> None:
        with reading:
            function(*map(_like, given, args))

    if tf.executing_eagerly():
        run(*args)
    else:
        tf.function(run, autograph=False).get_concrete_function(*args)
    return list(reading.read.values())


def _like(value: Any, original: Any) -> Any:
    """A value with what Keras attached to the original."""
    return set_attributes(value, get_attributes(original)) if tf.is_tensor(value) else value


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


def install() -> None:
    """Puts ours where Keras looks it up, in each call of `keras.remat`."""
    tf.recompute_grad = recompute_grad
