"""What both engines need to know about Keras's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_multigpu.engines.values import Tensor

Clip = Callable[[Sequence[Tensor], Sequence[keras.Variable]], list[Tensor]]
"""Clips gradients, given the variables that they belong to."""


def inner_optimizers(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """The optimizers that an optimizer passes its gradients to; none for most."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return [optimizer.inner_optimizer]
    return list(getattr(optimizer, "optimizers", ()))  # of a `MultiOptimizer`


def slots_of(optimizer: keras.Optimizer) -> Iterator[tuple[keras.Variable, keras.Variable]]:
    """Slots that were made before, each with its variable.

    Keras names a slot after its variable, and keeps no other trace of it.
    """
    known = sorted(optimizer._trainable_variables, key=lambda one: len(one.path), reverse=True)
    taken = set()  # of weights with the same path, each has its own slots
    for slot in optimizer.variables:
        for variable in known:
            is_named = slot.name.startswith(f"{variable.path.replace('/', '_')}_")
            is_free = (id(variable), slot.name) not in taken
            if is_named and is_free and slot.shape == variable.shape:
                taken.add((id(variable), slot.name))
                yield slot, variable
                break


def claim(optimizer: keras.Optimizer, use: Any) -> bool:
    """Notes what an optimizer is made to do; returns whether that is new.

    Raises:
        ValueError: if another parallel model uses it otherwise.
    """
    before = vars(optimizer).get("parallel_use", use)
    if before != use:
        raise ValueError(
            "An optimizer of independent replicas, or of mode 'model', belongs to one parallel "
            f"model. Received: {optimizer.name!r}, which another parallel model uses already. Give "
            "each model a new optimizer."
        )
    is_new = "parallel_use" not in vars(optimizer)
    vars(optimizer)["parallel_use"] = use  # untracked
    return is_new


def clip_by(optimizer: keras.Optimizer, clip: Clip) -> None:
    """Makes an optimizer clip its gradients with another function.

    Keras clips after it has accumulated gradients and dropped the missing ones (`None`), and has
    no public method for it.
    """
    apply, noted = optimizer._backend_apply_gradients, list[keras.Variable]()

    def apply_noting(grads: Sequence[Tensor], variables: Sequence[keras.Variable]) -> None:
        noted[:] = variables
        apply(grads, variables)

    optimizer._backend_apply_gradients = apply_noting
    optimizer._clip_gradients = lambda grads: clip(grads, noted)
