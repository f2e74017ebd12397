"""BatchNormalization over the whole batch.

In training, each replica computes the count, mean and variance of its rows. They are merged over
the replicas (Chan, Golub, LeVeque 1979), and every replica goes on with the merged ones.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.templates import all_layers
from keras_multigpu.engines.values import Tensor

Merge = Callable[[Sequence[Tensor]], Tensor]
"""Merges what the replicas hand over at an exchange, one tensor from each."""

Exchange = Callable[[Tensor, Merge, tf.TensorSpec], Tensor]
"""Called with a replica's tensor, the merge and the result's type; returns the merged tensor."""


def batch_normalizations(
    template: keras.Model, which: str
) -> tuple[list[keras.Layer], list[keras.Layer]]:
    """The `BatchNormalization` layers that see the whole batch, and those that see their slice.

    `which` is `"all"`, `"none"`, or `"marked"` (`synchronized=True`). A layer that should see the
    whole batch, but computes its statistics in its own way, is in neither list.
    """
    exact, apart = [], []
    for layer in all_layers(template):
        if not isinstance(layer, keras.layers.BatchNormalization):
            continue
        is_marked = which == "marked" and getattr(layer, "synchronized", False)
        if which != "all" and not is_marked:
            apart.append(layer)
        elif type(layer)._moments is keras.layers.BatchNormalization._moments:
            exact.append(layer)
    return exact, apart


@contextlib.contextmanager
def synchronized(
    layers: Iterable[keras.Layer], size: Tensor, exchange: Exchange, is_differentiated_twice: bool
) -> Iterator[None]:
    """Scope in which layers normalize with the statistics of all replicas.

    `size` is the number of rows of this replica: 0 for one beyond the last row of the batch.
    """

    def statistics(layer: Any, x: Tensor, mask: Tensor | None) -> list[Tensor]:
        local = _local(layer, x, mask, is_differentiated_twice)
        # A replica beyond the last row runs on a copy of that row, which must not count.
        is_own = tf.cast(tf.stack([size > 0, True, True]), x.dtype)
        merge = functools.partial(_merge, is_masked=mask is not None)
        spec = tf.TensorSpec([2, local.shape[1]], x.dtype)
        return tf.unstack(exchange(local * is_own[:, None], merge, spec))

    with replaced_statistics(layers, statistics):
        yield


@contextlib.contextmanager
def replaced_statistics(
    layers: Iterable[keras.Layer], statistics: Callable[[Any, Tensor, Tensor | None], Any]
) -> Iterator[None]:
    """Scope in which layers in training use the mean and variance that a function returns.

    It gets the layer, its inputs in float32 at least, and their mask. Everything else that the
    layers do stays their own.
    """
    # Bypasses Keras's `__setattr__`, which would track the value.
    before = [(layer, vars(layer).get("_moments")) for layer in layers]
    try:
        for layer, _ in before:
            object.__setattr__(layer, "_moments", functools.partial(statistics, layer))
        yield
    finally:
        for layer, own in before:
            vars(layer).pop("_moments", None)
            if own is not None:
                object.__setattr__(layer, "_moments", own)


def of_no_rows(layer: Any, x: Tensor, mask: Tensor | None) -> Any:
    """Statistics that don't depend on the rows."""
    return [keras.ops.cast(v, x.dtype) for v in (layer.moving_mean, layer.moving_variance)]


def _local(layer: Any, x: Tensor, mask: Tensor | None, is_differentiated_twice: bool) -> Tensor:
    """The count, mean and variance of this replica's rows, of shape `(3, channels)`."""
    channel = layer.axis % len(x.shape)
    axes = [axis for axis in range(len(x.shape)) if axis != channel]
    if mask is None:
        count = tf.cast(tf.size(x, tf.int64) // layer.moving_mean.shape[0], x.dtype)
        counts = tf.fill([layer.moving_mean.shape[0]], count)
        means = tf.reduce_mean(x, axes, keepdims=True)
        # The gradient through the mean is zero, but not the second derivative.
        about = means if is_differentiated_twice else tf.stop_gradient(means)
        variances = tf.reduce_mean(tf.math.squared_difference(x, about), axes)
    else:
        is_kept = tf.broadcast_to(tf.cast(mask, "bool")[..., None], tf.shape(x))
        counts = tf.reduce_sum(tf.cast(is_kept, x.dtype), axes, keepdims=True)
        sums = tf.reduce_sum(tf.where(is_kept, x, tf.zeros_like(x)), axes, keepdims=True)
        means = tf.math.divide_no_nan(sums, counts)
        deviations = tf.where(is_kept, x - means, tf.zeros_like(x))
        counts = tf.reshape(counts, [-1])
        variances = tf.math.divide_no_nan(tf.reduce_sum(deviations**2, axes), counts)
    return tf.stack([tf.stop_gradient(counts), tf.reshape(means, [-1]), variances])


def _merge(local: Sequence[Tensor], is_masked: bool) -> Tensor:
    """The mean and variance over the rows of all replicas, of shape `(2, channels)`."""
    counts, means, variances = tf.unstack(tf.stack(local), axis=1)
    # Keras adds an epsilon to the count of rows that are not masked.
    total = tf.reduce_sum(counts, axis=0) + (keras.config.epsilon() if is_masked else 0.0)
    mean = tf.reduce_sum(counts * means, axis=0) / total
    # As on one device, where the second derivative of the variance leaves out the mean's.
    about = mean if is_masked else tf.stop_gradient(mean)
    spread = variances + (means - about) ** 2
    return tf.stack([mean, tf.reduce_sum(counts * spread, axis=0) / total])
