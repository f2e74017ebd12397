"""Processes that run the same steps on TensorFlow."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import tensorflow as tf

from keras_multigpu.engines.cluster import group
from keras_multigpu.engines.cluster.board import BEAT
from keras_multigpu.engines.cluster.errors import ClusterError
from keras_multigpu.engines.shared import unchanged
from keras_multigpu.engines.tensorflow.cluster.runtime import abort_collectives


class Group(group.Group):
    """A group whose collective operations end when a process is lost.

    Attributes:
        is_in_step: whether this process is in a step, which all make together.
    """

    is_in_step = False
    _is_exchanging = False

    failures = (
        tf.errors.AbortedError,
        tf.errors.CancelledError,
        tf.errors.DeadlineExceededError,
        tf.errors.InternalError,
        tf.errors.UnavailableError,
        tf.errors.UnknownError,
    )

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Scope of steps: they end with a `ClusterError` if another process is lost, or fails.

        A thread looks at the others meanwhile: in a collective operation TensorFlow waits for them
        for ever.
        """
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(BEAT):
                try:
                    self.check(heeds_failures=not self._computes_alone())
                except ClusterError:  # kept in `broken`, and raised by `explained`
                    abort_collectives()
                    return
                except Warning:  # that a filter makes an error: it is told once, and no failure
                    continue

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            with self.explained():
                yield
        finally:
            is_over.set()
            thread.join()

    def _computes_alone(self) -> bool:
        """Whether this process waits for no other: it traces a step, or is between two steps.

        An error of another one may then be its own too, a moment later: all may go on after it.
        """
        if self.is_in_step:
            return not self.call.coming()
        return self.call.is_loop and not self._is_exchanging

    def exchanging(self) -> contextlib.AbstractContextManager[None]:
        """Scope of what all processes compute together between two steps."""
        return unchanged(self, "_is_exchanging", True)

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """Scope of a step. Between two steps, in callbacks, each process computes by itself."""
        return unchanged(self, "is_in_step", True)
