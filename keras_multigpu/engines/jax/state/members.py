"""An optimizer of stacked variables that updates each replica as if it were alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import keras

from keras_multigpu.engines.jax.state.stacked import StackedVariable, as_one
from keras_multigpu.engines.optimizers import clip_by
from keras_multigpu.engines.values import Tensor

_AXIS = "members"


class Members:
    """Maps an optimizer's update over the replicas.

    The optimizer is built for variables of one replica's shape, and its `apply` runs under
    `jax.vmap`. So what it computes from a whole weight (a norm, a factored moment, the choice of a
    method by the shape) it computes for each replica. Its slots have a first axis of replicas,
    like the weights.

    Args:
        optimizer: the optimizer, not built yet.
        apart: train each replica separately; otherwise they are one model, and a global norm
            covers all their gradients.
    """

    def __init__(self, optimizer: keras.Optimizer, apart: bool):
        self._optimizer = optimizer
        self._original_build, self._original_apply = optimizer.build, optimizer.apply
        self._slots: set[int] = set()
        self._mixed_slots: set[int] = set()
        optimizer.build, optimizer.apply = self.build, self.apply
        if optimizer.global_clipnorm and not apart:
            clip_by(optimizer, self._clip_together)

    def is_stacked(self, variable: keras.Variable) -> bool:
        """Whether a weight or slot has an axis of replicas."""
        return isinstance(variable, StackedVariable) or id(variable) in self._slots

    def build(self, variables: list[keras.Variable]) -> None:
        """Builds the optimizer, with slots for all replicas."""
        optimizer = self._optimizer
        stacked = [one for one in variables if isinstance(one, StackedVariable)]
        for variable in stacked:
            _exclude_as_its_parts(optimizer, variable)
        add, add_by_reference = optimizer.add_variable, optimizer.add_variable_from_reference
        references: list[keras.Variable] = []

        def add_by_noted_reference(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
            references.append(reference_variable)
            return add_by_reference(reference_variable, *args, **kwargs)

        def add_stacked(shape: Sequence[int], *args: Any, **kwargs: Any) -> keras.Variable:
            if references and not isinstance(references.pop(), StackedVariable):
                slot = add(shape, *args, **kwargs)
                self._mixed_slots.add(id(slot))
                return slot
            slot = add((len(stacked[0].parts), *shape), *args, **kwargs)
            slot.assign(jax.device_put(slot.value, stacked[0]._layout))
            self._slots.add(id(slot))
            return slot

        if stacked:
            optimizer.add_variable = add_stacked
            optimizer.add_variable_from_reference = add_by_noted_reference
        try:
            with as_one(stacked):
                self._original_build(variables)
        finally:
            optimizer.add_variable = add
            optimizer.add_variable_from_reference = add_by_reference

    def apply(
        self,
        grads: Sequence[Tensor | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """Updates all replicas."""
        optimizer = self._optimizer
        variables = list(trainable_variables or optimizer._trainable_variables)
        if not optimizer.built:
            optimizer.build(variables)
        trained, others = optimizer._trainable_variables, optimizer.variables
        state = {id(one): one for one in (*trained, *others)}
        stacked = [one for one in state.values() if self.is_stacked(one)]
        if not stacked:  # all replicas are frozen: only the mix is trained
            self._original_apply(grads, variables)
            return
        # A mix's weights have no axis of replicas, but some of Adafactor's slots for them do:
        # `vmap` returns them once for each replica, all equal.
        in_mix = self._mixed_slots | set(map(id, trained))
        unstacked = [one for one in state.values() if not self.is_stacked(one)]
        mixed = [one for one in unstacked if id(one) in in_mix]
        common = [one for one in unstacked if id(one) not in in_mix]
        unmapped = [(one, one.value) for one in (*mixed, *common)]

        def apply_one(values: list[Tensor], grads: list[Tensor | None]) -> Any:
            with as_one(stacked), keras.StatelessScope([*zip(stacked, values), *unmapped]) as scope:
                self._original_apply(grads, variables)
            parts = (stacked, mixed, common)
            return [[scope.get_current_value(one) for one in part] for part in parts]

        axes = [0 if self.is_stacked(one) else None for one in variables]
        # JAX refuses a step in which counters differ between replicas.
        new_stacked, new_mixed, new_common = jax.vmap(
            apply_one, (0, axes), [0, 0, None], axis_name=_AXIS
        )([one.value for one in stacked], list(grads))
        values = [*new_stacked, *(value[0] for value in new_mixed), *new_common]
        for variable, value in zip([*stacked, *mixed, *common], values):
            variable.assign(value)

    def _clip_together(
        self, grads: Sequence[Tensor], variables: Sequence[keras.Variable]
    ) -> list[Tensor]:
        """Clips by the norm of all replicas' gradients together, as Keras does."""
        square = keras.ops.convert_to_tensor(0.0, grads[0].dtype)
        for grad, variable in zip(grads, variables):
            own = jax.numpy.sum(jax.numpy.square(grad))
            square += jax.lax.psum(own, _AXIS) if self.is_stacked(variable) else own
        norm, limit = jax.numpy.sqrt(square), self._optimizer.global_clipnorm
        # An infinite norm or NaN spreads to all gradients.
        scale = limit * jax.numpy.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        return [grad * scale for grad in grads]


def _exclude_as_its_parts(optimizer: keras.Optimizer, variable: StackedVariable) -> None:
    """Excludes a stacked variable from weight decay if a replica's variable was."""
    excluded: set[Any] = getattr(optimizer, "_exclude_from_weight_decay", set())
    if any(optimizer._var_key(part) in excluded for part in variable.parts):
        excluded.add(optimizer._var_key(variable))
