"""Numbers that keep the members of a committee apart, where the model's code fixes them.

A clone has different seeds wherever the template's configuration has them (`modes/committee.py`).
A class that passes fixed numbers on, as in `Dropout(0.5, seed=3)` or `GlorotUniform(seed=1)`, gives
all members the same ones. Here each member gets its own from its number.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu.engines import SEED, SEED_STEP, all_layers

_SEEDS = 2**31
_SHOWN = 3  # layers that a warning names


def seed_of(seed: int, number: int) -> int:
    """The seed of a member in place of the template's."""
    return (seed + number * SEED_STEP) % _SEEDS


def set_apart(template: keras.Model, clone: keras.Model, number: int) -> None:
    """Gives a member its own seeds where they are the template's.

    Weights that such a seed has made are made again.
    """
    for layer, own in zip(all_layers(template), all_layers(clone)):
        for name, initializer in _seeded(own).items():
            theirs = vars(layer).get(name)
            if getattr(theirs, "seed", None) != initializer.seed:
                continue
            other = copy.copy(initializer)
            other.seed = seed_of(initializer.seed, number)
            setattr(own, name, other)
            for variable in own.variables:
                if variable.trainable and _has_made(initializer, variable):
                    variable.assign(other(variable.shape, dtype=variable.dtype))
    for variable, own in zip(template.variables, clone.variables):
        if own.name == SEED:
            seed, state = int(_value(variable)[0]), _value(own)
            if state[0] == seed:
                own.assign(np.array([seed_of(seed, number), *state[1:]], state.dtype))


def warn_of_equal(members: Sequence[keras.Model]) -> None:
    """Warns if members with separate weights have equal ones, as if not drawn."""
    equal = list(dict.fromkeys(_equal_layers(members) or _all_equal_layers(members)))
    if equal:
        more = f" and {len(equal) - _SHOWN} more" if len(equal) > _SHOWN else ""
        warnings.warn(
            "The members of a committee need different weights to learn different things. "
            f"Received: {len(members)} members with equal weights in "
            f"{', '.join(map(repr, equal[:_SHOWN]))}{more}: an initializer in the model's code "
            "makes the same numbers each time, or `set_weights` gave them. Use one of Keras that "
            "draws, without a fixed seed, or give each of `parallel.replicas` other weights by "
            "`set_weights` before training.",
            stacklevel=3,
        )


def _equal_layers(members: Sequence[keras.Model]) -> list[str]:
    """The layers whose weights seem drawn, and are equal in two members."""
    found = []
    for layer, values in _trained(members):
        drawn = [value.tobytes() for value in values if _is_drawn(value)]
        if len(set(drawn)) < len(drawn):
            found.append(layer)
    return found


def _all_equal_layers(members: Sequence[keras.Model]) -> list[str]:
    """The layers with weights, if no member has other ones than the first."""
    found = list(_trained(members))
    is_equal = all(np.array_equal(one, first) for _, (first, *rest) in found for one in rest)
    return [layer for layer, _ in found] if is_equal else []


def _trained(members: Sequence[keras.Model]) -> Iterator[tuple[str, list[np.ndarray]]]:
    """The layer of each trained weight, and its value in each member."""
    owners = {id(v): layer.name for layer in all_layers(members[0]) for v in layer.variables}
    for variables in zip(*(model.variables for model in members)):
        if variables[0].trainable:
            yield owners[id(variables[0])], [_value(variable) for variable in variables]


def _seeded(layer: keras.Layer) -> dict[str, Any]:
    """A layer's initializers with a seed, by the names of its attributes."""
    return {
        name: value
        for name, value in vars(layer).items()
        if isinstance(value, keras.initializers.Initializer)
        and isinstance(getattr(value, "seed", None), int)
    }


def _has_made(initializer: Any, variable: keras.Variable) -> bool:
    if not _is_drawn(_value(variable)):
        return False
    try:
        made = initializer(variable.shape, dtype=variable.dtype)
    except Exception:  # a shape that it refuses (`Orthogonal` takes no vector) is not its own
        return False
    return np.array_equal(np.asarray(made), _value(variable))


def _is_drawn(value: np.ndarray) -> bool:
    """Whether values may be drawn: zeros, ones, and both (identities, forget gates) are not."""
    return len(np.unique(value)) > 2


def _value(variable: keras.Variable) -> np.ndarray:
    return np.asarray(variable.value)
