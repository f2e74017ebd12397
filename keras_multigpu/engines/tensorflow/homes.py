"""Homes: the device on which each weight of a data-parallel model is stored, with its slots.

The homes are balanced by bytes, so each of n devices keeps and updates an nth of the weights and of
the optimizer's slots. Every step sends each weight from its home to all devices, and sums its
gradient there (`exchange.py`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from keras_multigpu.engines.shared import unique
from keras_multigpu.engines.tensorflow.names import full_name
from keras_multigpu.engines.tensorflow.placing import move_variables

# What a trained weight takes at home, in its own bytes: the weight and two slots, as Adam has.
_WITH_SLOTS = 3
# A weight that is too large for its share is worth a warning from this size on, in bytes.
_NOTABLE = 2**20


class Homes:
    """Which device each weight of a model is stored on.

    Args:
        devices: the devices to spread the weights over.
    """

    def __init__(self, devices: Sequence[str]):
        self._loads = dict.fromkeys(map(full_name, devices), 0)
        self._homes: dict[int, tuple[keras.Variable, str]] = {}
        self._sizes: dict[int, int] = {}

    def put(self, model: keras.Model) -> None:
        """Moves the weights of a model home; those that it has no longer have no home."""
        known = set(map(id, model.weights))
        for key in self._homes.keys() - known:
            _, home = self._homes.pop(key)
            self._loads[home] -= self._sizes.pop(key)
        self._find(model.weights)
        move_variables([*self._homes.values()], model)

    def _find(self, weights: Iterable[keras.Variable]) -> None:
        """Chooses homes for weights that have none: each, the largest first, where least is."""
        new = [one for one in unique(list(weights)) if id(one) not in self._homes]
        for weight in sorted(new, key=_bytes_at_home, reverse=True):
            home = min(self._loads, key=self._loads.__getitem__)
            self._sizes[id(weight)] = _bytes_at_home(weight)
            self._loads[home] += self._sizes[id(weight)]
            self._homes[id(weight)] = weight, home
        if new:
            self._warn_of_large()

    @property
    def placement(self) -> dict[str, tuple[int, ...]]:
        """How many elements each device keeps of a weight, by the weight's path."""
        return {
            weight.path: tuple(
                math.prod(weight.shape) if device == home else 0 for device in self._loads
            )
            for weight, home in self._homes.values()
        }

    def _warn_of_large(self) -> None:
        """Warns of weights with more than an even share: a home keeps them whole."""
        sizes = {weight.path: _bytes_at_home(weight) for weight, _ in self._homes.values()}
        total, count = sum(sizes.values()), len(self._loads)
        large = {path: size for path, size in sizes.items() if size * count > 1.05 * total}
        if count == 1 or max(large.values(), default=0) < _NOTABLE * _WITH_SLOTS:
            return
        path = max(large, key=large.__getitem__)
        others = f", and {len(large) - 1} more" if len(large) > 1 else ""
        warnings.warn(
            "On TensorFlow `shard` keeps each weight whole on one device, and a weight has more "
            f"than an even share of the bytes. Received: {path!r} with {large[path] / total:.0%} "
            f"of the bytes{others}, on {count} devices: one device keeps "
            f"{max(self._loads.values()) / total:.0%}. To spread it evenly, use the backend 'jax', "
            "fewer devices, or several smaller layers.",
            stacklevel=4,
        )


def fullest_home(weights: Iterable[keras.Variable], count: int) -> float:
    """The share of all bytes that the fullest of `count` homes would have."""
    loads = [0] * count
    for size in sorted(map(_bytes_at_home, unique(list(weights))), reverse=True):
        loads[loads.index(min(loads))] += size
    return max(loads) / max(1, sum(loads))


def _bytes_at_home(weight: keras.Variable) -> int:
    size = math.prod(weight.shape) * tf.as_dtype(weight._value.dtype).size
    return size * _WITH_SLOTS if weight.trainable else size
