"""How many rows batches have: what is expected of a loop, and what its steps have seen."""

from __future__ import annotations

import collections
import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.arguments import number_of
from keras_multigpu.engines.cluster.joint import arguments
from keras_multigpu.engines.shared import LARGE_BATCH
from keras_multigpu.engines.tensorflow.names import first, full_name
from keras_multigpu.engines.tensorflow.partition.forms import Expected

_SAID_AFTER = 10  # steps, so that a few incomplete ones don't count


class BatchRows:
    """Expects rows, and counts those of steps; warns once if all have too few for the devices.

    Args:
        count: the parts of a batch: one for each device, or group of devices.
        kind: which of the two.

    Attributes:
        expected: for how many rows a step was planned, by `"train"`, `"test"` or `"predict"`.
    """

    def __init__(self, count: int, kind: str):
        self._count, self._kind, self._is_over = count, kind, count < 2
        self.expected: dict[str, Expected] = collections.defaultdict(Expected)
        self._of_loop: int | None = None  # if known
        self._seen: tf.Variable | None = None  # the most rows of a step, and how many steps
        if not self._is_over:
            with tf.init_scope(), tf.device(full_name(first("cpu"))):
                self._seen = tf.Variable([0, 0], dtype=tf.int64, trainable=False)

    def note(self, rows: Any) -> None:
        """In a graph: a step has so many rows."""
        if self._seen is not None:
            most, steps = tf.unstack(self._seen)
            self._seen.assign([tf.maximum(most, tf.cast(rows, tf.int64)), steps + 1])

    @contextlib.contextmanager
    def of_loop(self, loop: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[None]:
        """Scope of a loop, whose rows are counted; those of arrays are expected."""
        before, self._of_loop = self._of_loop, _find_rows(**arguments(loop, args, kwargs))
        if self._seen is not None:
            self._seen.assign([0, 0])
        try:
            yield
        finally:
            self._of_loop = before
        self.warn()

    def expect(self, kind: str, is_planned: bool) -> bool:
        """A loop uses a step: whether this is to be planned again, because there are more rows."""
        if is_planned and (self._of_loop or 0) <= self.expected[kind].most:
            return False
        self.expected[kind] = Expected(self._of_loop or LARGE_BATCH)
        return is_planned

    def warn(self) -> None:
        """Warns if several steps all had fewer rows than parts."""
        rows, steps = (0, 0) if self._seen is None else map(int, self._seen.numpy())
        if self._is_over or not 0 < rows < self._count or steps < 2:
            return
        self._is_over = True
        warnings.warn(
            f"Batches of {number_of(rows, 'row')} leave {self._count - rows} of "
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


def _find_rows(x: Any = None, batch_size: Any = None, **others: Any) -> int | None:
    """The rows of the batches of a loop over arrays; `None` for other data."""
    size = batch_size if isinstance(batch_size, int) and batch_size > 0 else 32  # Keras checks it
    shape = getattr(next(iter(keras.tree.flatten(x)), None), "shape", None)
    return min(shape[0], size) if shape and shape[0] else None
