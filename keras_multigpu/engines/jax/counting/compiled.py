"""Keras's steps, compiled to be looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled step, and the arrays that it was compiled for.

    Attributes:
        program: the program.
        state: the values of trainable and other variables, and, in training, of the optimizer's and
            the metrics' variables.
        data: the batch.
    """

    program: jax.stages.Compiled
    state: tuple[list[jax.Array], ...]
    data: Any


def state_of(model: Any, training: bool) -> tuple[list[Any], ...]:
    """The state that Keras's step takes of a model."""
    groups = [model.trainable_variables, model.non_trainable_variables]
    if training:
        groups += [model.optimizer.variables, model.metrics_variables]
    return tuple([variable.value for variable in group] for group in groups)


def compile_step(
    step: Callable[..., Any], state: tuple[Any, ...], data: Any, training: bool
) -> CompiledStep:
    """Compiles a step; in training, it may write the new state over the old one, as in Keras."""
    donated = (0,) if training else ()
    program = jax.jit(step, donate_argnums=donated).lower(state, data).compile()
    return CompiledStep(program, state, data)
