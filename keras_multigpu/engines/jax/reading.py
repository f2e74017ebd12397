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


def reading(step: Callable[[Any, Any], Any], name: str) -> Callable[[Any, Any], Any]:
    """A `test_step` or `predict_step` for `read`; called otherwise, it is as it was."""
    is_partial = name == "predict_step"  # it returns the second part of the state only

    def filled_step(state: Any, data: Any) -> Any:
        if not isinstance(data, WithWeights):
            return step(state, data)
        outputs, new = step(_filled(state, data.weights), data.batch)
        first = len(jax.tree.leaves(state[0], is_leaf=_is_given)) if is_partial else 0
        return outputs, _marked(new, data.weights, first)

    return filled_step


def _marked(state: Any, weights: list[Any], first: int) -> Any:
    """A state with numbers in place of the weights that a step did not change.

    It begins with the weight of number `first`. What a step has assigned to two variables is
    copied for the second: JAX can't donate one array twice.
    """
    leaves, structure = jax.tree.flatten(state)
    seen = set(map(id, weights))
    marked: list[Any] = []
    for number, value in enumerate(leaves, first):
        if number < len(weights) and value is weights[number]:
            marked.append(Given(number))
        else:
            marked.append(jax.numpy.copy(value) if id(value) in seen else value)
            seen.add(id(value))
    return structure.unflatten(marked)


def _filled(state: Any, weights: list[Any]) -> Any:
    """A state with the weights in place of their numbers."""
    return jax.tree.map(
        lambda value: weights[value.number] if _is_given(value) else value, state, is_leaf=_is_given
    )


def _is_given(value: Any) -> bool:
    return isinstance(value, Given)
