"""The methods of a model that compute on its devices, which may be those of other machines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_multigpu.engines.tensorflow.cluster import REMOTE


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with REMOTE.watch(self.devices):
            return getattr(super(WatchedSteps, self), method.__name__)(*args, **kwargs)

    return run


class WatchedSteps(keras.Model):
    """A parallel model that tells what goes wrong on other machines as a `ClusterError`."""

    fit = _watched(keras.Model.fit)
    evaluate = _watched(keras.Model.evaluate)
    predict = _watched(keras.Model.predict)
    train_on_batch = _watched(keras.Model.train_on_batch)
    test_on_batch = _watched(keras.Model.test_on_batch)
    predict_on_batch = _watched(keras.Model.predict_on_batch)
