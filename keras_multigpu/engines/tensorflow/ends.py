"""The end of the data, found before a step begins."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.runners import TrainedModel
from keras_multigpu.engines.tensorflow.names import first, full_name


def found_before(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keras's function of a training or evaluation step, which gets a batch from an iterator.

    Keras's takes the batch in the graph of the step. A part that XLA compiles for one device does
    not begin without it; of the step's parts on several devices some would: a step is counted, and
    numbers are drawn, that on one device are not.
    """

    @tf.function(autograph=False, reduce_retracing=True)
    def with_batch(batch: tf.experimental.Optional) -> Any:
        with tf.device(full_name(first("cpu"))):
            data = batch.get_value()
        return function(iter([data]))

    @functools.wraps(function)
    def step(batches: Any) -> Any:
        if not isinstance(batches, tf.data.Iterator):  # of a single step
            return function(batches)
        batch = batches.get_next_as_optional()
        if not batch.has_value():
            raise StopIteration
        return with_batch(batch)

    return step


def begins_late(model: TrainedModel, name: str) -> bool:
    """Whether Keras's step of one device begins when the batch is there: compiled, and one by one.

    Without XLA an optimizer counts one step too many at the end of data of unknown length, and so
    do several devices.
    """
    if name == "predict_function" or not model.jit_compile:  # the first gets the batch itself
        return False
    maker = f"make_{name}"
    made_by = getattr(getattr(model.template, maker), "__func__", None)
    is_keras = made_by is getattr(keras.Model, maker)
    return is_keras and model.steps_per_execution == 1 and not model.run_eagerly
