"""Copies of a model's state on all its devices."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class Copies:
    """Copies of arrays on all devices of a model, kept while the originals exist.

    JAX's arrays are immutable, so a copy stays right; a variable that is assigned has another
    array. On the first device a copy shares the original's memory, so that no device has more than
    that one.

    Args:
        put: copies an array to all devices; returns it as it is if it is there already.
    """

    def __init__(self, put: Callable[[Any], Any]):
        self._put = put
        self._kept: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def of(self, value: Any) -> Any:
        """The copy of an array, to be read."""
        key = id(value)
        if key in self._kept:
            return self._kept[key][1]
        copy = self._put(value)
        if copy is not value:
            self._kept[key] = weakref.ref(value, lambda _: self._kept.pop(key, None)), copy
        return copy

    def clear(self) -> None:
        """Frees all copies."""
        self._kept.clear()

    def take(self, value: Any) -> Any:
        """A copy of an array, to be donated."""
        _, copy = self._kept.pop(id(value), (None, None))
        return self._put(value) if copy is None else copy
