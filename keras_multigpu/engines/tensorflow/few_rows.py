"""Tells of batches that have fewer rows than there are devices."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.names import first, full_name

_SAID_AFTER = 10  # steps, so that a few incomplete ones don't count


class FewRows:
    """Counts the rows of steps, wherever these come from, and warns once if all have too few.

    Args:
        count: the parts of a batch: one for each device, or group of devices.
        kind: which of the two.
    """

    def __init__(self, count: int, kind: str):
        self._count, self._kind, self._is_over = count, kind, count < 2
        self._seen: tf.Variable | None = None  # the most rows of a step, and how many steps
        if not self._is_over:
            with tf.init_scope(), tf.device(full_name(first("cpu"))):
                self._seen = tf.Variable([0, 0], dtype=tf.int64, trainable=False)

    def note(self, rows: Any) -> None:
        """In a graph: a step has so many rows."""
        if self._seen is not None:
            most, steps = tf.unstack(self._seen)
            self._seen.assign([tf.maximum(most, tf.cast(rows, tf.int64)), steps + 1])

    def forget(self) -> None:
        """A loop begins."""
        if self._seen is not None:
            self._seen.assign([0, 0])

    def warn(self) -> None:
        """Warns if several steps all had fewer rows than parts."""
        rows, steps = (0, 0) if self._seen is None else map(int, self._seen.numpy())
        if self._is_over or not 0 < rows < self._count or steps < 2:
            return
        self._is_over = True
        warnings.warn(
            f"Batches of {rows} row{'s' if rows > 1 else ''} leave {self._count - rows} of "
            f"{self._count} {self._kind} without work. Give at least {self._count} rows.",
            stacklevel=2,
        )

    def told_by(
        self, function: Callable[..., Any], then: Callable[[], None] = lambda: None
    ) -> Callable[..., Any]:
        """A function of steps that warns after its first calls; `then` is called."""
        left = iter(range(_SAID_AFTER))

        @functools.wraps(function)
        def step(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if next(left, None) == _SAID_AFTER - 1 and tf.executing_eagerly():
                self.warn()
                then()
            return result

        return step
