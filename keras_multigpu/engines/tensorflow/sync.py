"""BatchNormalization over the whole batch: its statistics are summed over the replicas.

The formula is that of pairwise updates of mean and variance (Chan, Golub, LeVeque 1979): each
replica has a count, a mean and a variance; all of them are exchanged, and combined in each. The
exchange is a collective operation, whose gradient is the same exchange of the gradients.
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
    """Which replica a call is for.

    Attributes:
        number: its place among the replicas, from 0; an integer, or a scalar tensor.
        size: the rows of the batch that are its own: 0 for one beyond the last row.
        count: how many replicas there are.
    """

    number: Any
    size: Any
    count: int


def batch_normalizations(template: keras.Model, which: str) -> list[keras.Layer]:
    """The template's layers whose statistics are to be those of the whole batch.

    Args:
        template: the model.
        which: `"all"`, `"none"`, or `"marked"`: those with `synchronized=True`.
    """
    if which == "none":
        return []
    # Keras has no public walk over the layers within layers.
    return [
        layer
        for layer in template._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
        and (which == "all" or getattr(layer, "synchronized", False))
    ]


@contextlib.contextmanager
def synchronized(layers: list[keras.Layer], replica: Replica) -> Iterator[None]:
    """A scope in which some `BatchNormalization` layers see the whole batch."""
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

    is_own = tf.cast(replica.size > 0, x.dtype)
    place = tf.one_hot(replica.number, replica.count, dtype=x.dtype)[:, None, None]
    mine = place * tf.stack([count * is_own, mean, variance])[None]
    counts, means, variances = tf.unstack(_all_reduce(mine, replica.count, group), axis=1)
    total = tf.reduce_sum(counts, axis=0)
    mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, axis=0), total)
    spread = variances + (means - mean) ** 2
    return mean, tf.math.divide_no_nan(tf.reduce_sum(counts * spread, axis=0), total)


def _all_reduce(value: Tensor, count: int, group: int) -> Tensor:
    """The sum of the replicas' values, in each of them; backwards likewise."""

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
    """A scope in which layers have another `call`.

    Args:
        layers: the layers.
        make: gives the new `call` of a layer, from the layer and the `call` that it has.
    """
    before = [(layer, vars(layer).get("call")) for layer in layers]
    try:
        for layer, _ in before:
            # The instance's own attribute: Keras would track what is set the ordinary way.
            object.__setattr__(layer, "call", make(layer, layer.call))
        yield
    finally:
        for layer, own in before:
            vars(layer).pop("call", None)
            if own is not None:
                object.__setattr__(layer, "call", own)
