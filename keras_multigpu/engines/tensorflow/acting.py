"""A committee's template in place of one of its members: with the member's own state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from keras_multigpu.engines.shared import unique, value_of
from keras_multigpu.engines.templates import forget_losses, metrics_variables
from keras_multigpu.engines.tensorflow.scope import ReplicaScope
from keras_multigpu.engines.values import Tensor


@contextlib.contextmanager
def acting(
    template: keras.Model, member: keras.Model, losses: Sequence[Tensor], *, keep: bool
) -> Iterator[None]:
    """Scope in which the template has the variables' values and the losses of a member.

    With `keep`, what is assigned goes to the member.
    """
    if member is template and keep:  # it may create variables here: those of Keras's losses
        with _having_losses(template, losses):
            yield
        return
    in_metrics = {id(variable) for variable in metrics_variables(template)}
    pairs = zip(unique(template.variables), unique(member.variables))
    own = {id(one): (one, other) for one, other in pairs if id(one) not in in_metrics}
    values = [(one, tf.convert_to_tensor(value_of(other))) for one, other in own.values()]
    with ReplicaScope(values, 0) as scope, _having_losses(template, losses):
        yield
    for variable in scope.assigned.values() if keep else ():
        _, counterpart = own.get(id(variable), (variable, variable))
        counterpart.assign(scope.new_value(variable))


@contextlib.contextmanager
def _having_losses(template: keras.Model, losses: Sequence[Tensor]) -> Iterator[None]:
    """Scope in which a model has the losses of a call, the last of which are penalties."""
    forget_losses(template)
    weights = template.trainable_weights  # Keras adds their penalties
    penalties = sum(variable.regularizer is not None for variable in weights)
    for loss in losses[: len(losses) - penalties]:
        # Not `template.add_loss`: a functional model has it for symbolic losses only.
        keras.Layer.add_loss(template, loss)
    try:
        yield
    finally:
        forget_losses(template)
