"""A user's own step on JAX must not assign variables: they would keep values of the trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras

from keras_multigpu.engines.functions import named_in
from keras_multigpu.engines.jax.arguments import with_arguments_told
from keras_multigpu.engines.jax.placement import Placement
from keras_multigpu.engines.jax.spreading import spread_function
from keras_multigpu.engines.values import Tensor


def pure(step: Callable[..., Any], model: keras.Model) -> Callable[..., Any]:
    """The step, which fails while it is traced if it assigns variables, and leaves these alone."""

    @functools.wraps(step)
    def traced(*args: Any, **kwargs: Any) -> Any:
        known = {id(one): (one, one._value) for one in _variables(step, model)}
        changed = []
        try:
            result = step(*args, **kwargs)
        finally:
            for one, value in known.values():
                # Another value that stays was moved there: members' weights are stacked.
                if one._value is not value and isinstance(one._value, jax.core.Tracer):
                    one._value = value
                    changed.append(one.path)
        if changed:
            raise ValueError(
                "On JAX a step is a pure function: weights, slots and other state are among its "
                "arguments, and it returns their new values. Received: a step that assigns "
                f"{', '.join(changed[:3])}{', ...' if len(changed) > 3 else ''}. Use "
                "`stateless_call` and `optimizer.stateless_apply`, and assign what the step "
                "returns; or give the model a `train_step`, and call `fit`."
            )
        return result

    return traced


def _variables(step: Callable[..., Any], model: keras.Model) -> Iterator[keras.Variable]:
    """The variables of the model, and of what the step names."""
    for part in keras.tree.flatten([model, *named_in(step).values()]):
        if isinstance(part, keras.Variable):
            yield part
        elif isinstance(part, (keras.Layer, keras.Metric, keras.Optimizer)):
            yield from part.variables
        if isinstance(getattr(part, "optimizer", None), keras.Optimizer):
            yield from part.optimizer.variables


class NotingScope(keras.StatelessScope):
    """A stateless scope that notes which variables are assigned."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.assigned: list[keras.Variable] = []

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        self.assigned.append(update[0])
        super().add_update(update)


class JaxRunner:
    """What `JaxSteps` needs from a runner: by default nothing is spread, and steps stay."""

    where: Placement
    """Where the batch and the state are during a step."""

    _template: keras.Model

    spreads_state = False
    """Whether a device keeps only a part of the state, also between loops."""

    def function(
        self, step: Callable[..., Any], jit_compile: bool | None, rows: Any
    ) -> Callable[..., Any]:
        """A user's own step, compiled."""
        run = spread_function(pure(step, self._template), self.where, 0, self.spreads_state)
        return with_arguments_told(step, jax.jit(run))

    def around(self, step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """What runs in place of Keras's step."""
        return step

    def seen(self, variables: list[keras.Variable]) -> list[keras.Variable]:
        """The variables as a step sees them."""
        return variables

    def place(self) -> None:
        """Nothing: each loop spreads the state when it begins."""

    def spread(self, optimizer: Any) -> None:
        """Spreads weights and slots again that were assigned since, from a file, say."""

    def rest(self, optimizer: Any) -> None:
        """Lays out weights and slots for the time when no step runs."""

    def kept(self, variables: list[keras.Variable], optimizer: Any) -> set[int]:
        """The `id`s of the variables that stay on the devices between two loops."""
        return set()
