"""Synchronized BatchNormalization: statistics of the whole batch, across replicas.

The replicas exchange counts, means and variances, and each combines them (Chan, Golub, LeVeque
1979). The exchange is a collective all-reduce; its gradient is an all-reduce too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from keras_multigpu.engines.values import Tensor

_keys = itertools.count(1)
_TIMEOUT_SECONDS = 600.0


@dataclasses.dataclass(frozen=True)
class Replica:
    """The replica that a call is for.

    Attributes:
        number: its index, an integer or a scalar tensor.
        size: its number of rows; 0 for a replica beyond the last row of the batch.
        count: the number of replicas.
    """

    number: Any
    size: Any
    count: int


def batch_normalizations(template: keras.Model, which: str) -> list[keras.Layer]:
    """The `BatchNormalization` layers: `"all"`, `"none"`, or `"marked"` (`synchronized=True`)."""
    if which == "none":
        return []
    # Keras has no public list of nested layers.
    return [
        layer
        for layer in template._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
        and (which == "all" or getattr(layer, "synchronized", False))
    ]


@contextlib.contextmanager
def synchronized(layers: list[keras.Layer], replica: Replica) -> Iterator[None]:
    """Scope in which `BatchNormalization` layers see the whole batch."""
    if replica.count == 1:
        yield
        return
    group = next(_keys)
    with replaced_calls(layers, lambda layer, call: _call(layer, call, replica, group)):
        yield


def _call(layer: Any, plain_call: Callable[..., Any], replica: Replica, group: int) -> Any:
    def call(inputs: Tensor, training: bool | None = None, mask: Tensor | None = None) -> Tensor:
        if not training or not layer.trainable:
            return plain_call(inputs, training=training, mask=mask)
        if tf.executing_eagerly():
            raise RuntimeError(
                f"The synchronized BatchNormalization {layer.name!r} needs its replicas to run "
                "at the same time, and eagerly they run one after the other. Compile with "
                "`run_eagerly=False`, or call the model in a `tf.function`."
            )
        x = ops.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        mean, variance = _moments(layer, x, mask, replica, group)
        for moving, value in [(layer.moving_mean, mean), (layer.moving_variance, variance)]:
            kept = ops.cast(moving, x.dtype) * layer.momentum
            moving.assign(kept + value * (1.0 - layer.momentum))
        outputs = ops.batch_normalization(
            x,
            mean,
            variance,
            layer.axis,
            offset=ops.cast(layer.beta, x.dtype) if layer.center else None,
            scale=ops.cast(layer.gamma, x.dtype) if layer.scale else None,
            epsilon=layer.epsilon,
        )
        return ops.cast(outputs, layer.compute_dtype)

    return call


def _moments(
    layer: Any, x: Tensor, mask: Tensor | None, replica: Replica, group: int
) -> tuple[Tensor, Tensor]:
    """Mean and variance over the rows of all replicas."""
    channel = layer.axis % len(x.shape)
    axes = [axis for axis in range(len(x.shape)) if axis != channel]
    weight = tf.ones_like(x) if mask is None else tf.cast(mask[..., None], x.dtype) + 0 * x
    count = tf.reduce_sum(weight, axes)
    mean = tf.math.divide_no_nan(tf.reduce_sum(weight * x, axes), count)
    shape = [1] * len(x.shape)
    shape[channel] = -1
    deviation = x - tf.reshape(mean, shape)
    variance = tf.math.divide_no_nan(tf.reduce_sum(weight * deviation**2, axes), count)

    # A replica beyond the last row runs on a copy of that row, which must not count.
    is_own = tf.cast(replica.size > 0, x.dtype)
    # Each replica fills its own row of the matrix, so the sum is an all-gather.
    place = tf.one_hot(replica.number, replica.count, dtype=x.dtype)[:, None, None]
    mine = place * tf.stack([count * is_own, mean, variance])[None]
    counts, means, variances = tf.unstack(_all_reduce(mine, replica.count, group), axis=1)
    total = tf.reduce_sum(counts, axis=0)
    mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, axis=0), total)
    spread = variances + (means - mean) ** 2
    return mean, tf.math.divide_no_nan(tf.reduce_sum(counts * spread, axis=0), total)


def _all_reduce(value: Tensor, count: int, group: int) -> Tensor:
    """All-reduces (sums) a value over the replicas, and its gradient too."""

    @tf.custom_gradient
    def reduce(value: Tensor) -> Any:
        return (
            _collective(value, count, group),
            lambda upstream: _collective(upstream, count, group),
        )

    return reduce(value)


def _collective(value: Tensor, count: int, group: int) -> Tensor:
    return tf.raw_ops.CollectiveReduce(
        input=value,
        group_size=count,
        group_key=group,
        instance_key=next(_keys),
        merge_op="Add",
        final_op="Id",
        subdiv_offsets=[0],
        timeout_seconds=_TIMEOUT_SECONDS,
    )


@contextlib.contextmanager
def replaced_calls(
    layers: Iterable[keras.Layer], make: Callable[[keras.Layer, Any], Any]
) -> Iterator[None]:
    """Scope in which layers use the `call` that `make(layer, call)` returns."""
    before = [(layer, vars(layer).get("call")) for layer in layers]
    try:
        for layer, _ in before:
            # Bypasses Keras's `__setattr__`, which would track the value.
            object.__setattr__(layer, "call", make(layer, layer.call))
        yield
    finally:
        for layer, own in before:
            vars(layer).pop("call", None)
            if own is not None:
                object.__setattr__(layer, "call", own)
