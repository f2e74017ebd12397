"""Raises a `ClusterError` if a machine that a model uses fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from keras_multigpu.engines.cluster.errors import ClusterError
from keras_multigpu.engines.runners import TrainedModel
from keras_multigpu.engines.tensorflow.cluster.remote import REMOTE
from keras_multigpu.engines.tensorflow.names import local_name, short_name
from keras_multigpu.engines.tensorflow.weights.divided import parts_of


class Watched:
    """Watches the machines that a parallel model computes on."""

    def __init__(self, model: TrainedModel):
        self._model = model
        self._used_in: int | None = None  # the connection's number

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Scope for a call that computes on the model's devices."""
        with REMOTE.watch(self._model.devices):
            self._follow_connection()
            yield

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        """Scope for using the weights outside a step: needs only the workers that have weights."""
        try:
            with REMOTE.explained():
                yield
        except tf.errors.OpError:
            self._check_weights()
            raise

    def _follow_connection(self) -> None:
        """Drops step functions from an earlier connection: they would fail in this one."""
        model = self._model
        is_remote = any("/" in name for name in model.devices)
        if not is_remote or self._used_in == REMOTE.serial:
            return
        if self._used_in is not None:
            self._check_weights()
            model.train_function = model.test_function = model.predict_function = None
        self._used_in = REMOTE.serial

    def _check_weights(self) -> None:
        """Raises a `ClusterError` if a weight was stored on a worker."""
        for variable in self._model.variables:
            # `value` would read them from the lost worker.
            devices = [part.device for part in parts_of(variable)]
            device = next((one for one in devices if local_name(one) is None), None)
            if device is not None:
                raise ClusterError(
                    short_name(device).partition("/")[0],
                    f"The worker stored the weight {variable.path!r}, and was disconnected.",
                    "Create the model and its parallel model again, and load their last file.",
                )
