"""The methods of a parallel model that may compute on other machines' devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.errors import ClusterError
from keras_multigpu.engines.tensorflow.cluster.remote import REMOTE
from keras_multigpu.engines.tensorflow.names import REMOTE_JOB, short_name


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with REMOTE.watch(self.devices):
            self._parallel_follow_connection()
            return getattr(super(WatchedSteps, self), method.__name__)(*args, **kwargs)

    return run


def _explained(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with REMOTE.explained():
                return getattr(super(WatchedSteps, self), method.__name__)(*args, **kwargs)
        except tf.errors.OpError:
            self._parallel_check_weights()
            raise

    return run


class WatchedSteps(keras.Model):
    """A parallel model that raises a `ClusterError` when something fails on another machine."""

    devices: tuple[str, ...]
    _parallel_used_in: int | None = None

    fit = _watched(keras.Model.fit)
    evaluate = _watched(keras.Model.evaluate)
    predict = _watched(keras.Model.predict)
    train_on_batch = _watched(keras.Model.train_on_batch)
    test_on_batch = _watched(keras.Model.test_on_batch)
    predict_on_batch = _watched(keras.Model.predict_on_batch)

    # These need a worker only where it has weights, so they don't ask the workers beforehand.
    get_weights = _explained(keras.Model.get_weights)
    set_weights = _explained(keras.Model.set_weights)
    save_weights = _explained(keras.Model.save_weights)
    load_weights = _explained(keras.Model.load_weights)
    save = _explained(keras.Model.save)

    def _parallel_follow_connection(self) -> None:
        """Drops step functions that were traced in an earlier connection: they fail in this one."""
        is_remote = any("/" in name for name in self.devices)
        if not is_remote or self._parallel_used_in == REMOTE.serial:
            return
        if self._parallel_used_in is not None:
            self._parallel_check_weights()
            self.train_function = self.test_function = self.predict_function = None
        self._parallel_used_in = REMOTE.serial

    def _parallel_check_weights(self) -> None:
        """Raises a `ClusterError` if a weight was stored on a worker."""
        for variable in self.variables:
            device = variable._value.device  # `value` would read it, and it is lost
            if tf.DeviceSpec.from_string(device).job == REMOTE_JOB:
                raise ClusterError(
                    short_name(device).partition("/")[0],
                    f"The worker had the weight {variable.path!r}, in a connection that is over.",
                    "Make the model and its parallel model again, and load the last file of them.",
                )
