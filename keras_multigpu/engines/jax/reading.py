"""Steps of `evaluate` and `predict`, which read the weights: what is unchanged stays where it is.

Keras's step functions donate the state to XLA and return all of it, so that every weight would be a
new array after each step, even if it is unchanged. Here the weights go to XLA beside the batch,
which is not donated, and the step returns a `Given` in place of each value that it did not change.
The model's variables then get back the very arrays that they had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from keras_multigpu.engines.jax.placement import Placement


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Given:
    """In a state: the weight with this number, unchanged."""

    number: int


class WithWeights(NamedTuple):
    """A batch, and the weights that its step reads."""

    batch: Any
    weights: list[Any]


def read(
    function: Callable[..., Any], state: Any, batches: Iterator[Any], where: Placement
) -> tuple[Any, Any]:
    """Calls Keras's function of a step, `(state, batches) -> (outputs, state)`.

    The first two parts of the state are the weights; Keras donates the others, the metrics' state.
    """
    weights, others = jax.tree.leaves(state[:2]), state[2:]
    numbers = iter(range(len(weights)))
    given = jax.tree.map(lambda _: Given(next(numbers)), state[:2])
    copies = [where.copies.of(weight) for weight in weights]
    laden = (WithWeights(batch, copies) for batch in batches)
    outputs, new = function((*given, *where.put_state(others, read=weights)), laden)
    return outputs, _filled(new, weights)


def reading(step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A `test_step` or `predict_step` for `read`; called otherwise, it is as it was."""

    def filled_step(state: Any, data: Any) -> Any:
        if not isinstance(data, WithWeights):
            return step(state, data)
        given = {id(weight): Given(number) for number, weight in enumerate(data.weights)}
        outputs, new = step(_filled(state, data.weights), data.batch)
        return outputs, jax.tree.map(lambda value: given.get(id(value), value), new)

    return filled_step


def _filled(state: Any, weights: list[Any]) -> Any:
    """A state with the weights in place of their numbers."""

    def is_given(value: Any) -> bool:
        return isinstance(value, Given)

    return jax.tree.map(
        lambda value: weights[value.number] if is_given(value) else value, state, is_leaf=is_given
    )
