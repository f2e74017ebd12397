"""BatchNormalization in training by TensorFlow's fused kernel.

Keras computes the mean, the variance and the normalized values one after the other, each by
operations that go through the whole batch, and so do their gradients. XLA fuses them; without
XLA this kernel does, to the same results, and the same first derivative, but for rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.tensorflow.calls import replaced_calls
from keras_multigpu.engines.tensorflow.tensors import gradient_order
from keras_multigpu.engines.values import Tensor

# cuDNN refuses less than 1e-5.
_LEAST_EPSILON = 1.001e-5


def fusible(template: keras.Model) -> list[keras.Layer]:
    """The template's layers that are as Keras made them, and that the kernel can do."""
    # Keras has no public walk over the layers within layers.
    return [
        layer
        for layer in template._flatten_layers()
        if type(layer) is keras.layers.BatchNormalization
        and layer.epsilon >= _LEAST_EPSILON
        # Not every version of Keras has these.
        and not getattr(layer, "synchronized", False)
        and not getattr(layer, "renorm", False)
    ]


def fused(layers: Sequence[keras.Layer], tapes: int) -> contextlib.AbstractContextManager[None]:
    """A scope in which some `BatchNormalization` layers train by the kernel.

    They do where so many tapes watch, and no others: Keras's own second derivative of a variance
    is not that of the kernel (`tf.nn.moments` takes the mean in it for a constant).

    Args:
        layers: the layers.
        tapes: how many tapes are around the call, of those that can be seen there.
    """
    return replaced_calls(layers, lambda layer, call: _call(layer, call, tapes))


def _call(layer: Any, plain_call: Callable[..., Any], tapes: int) -> Any:
    def call(inputs: Tensor, training: bool | None = None, mask: Tensor | None = None) -> Tensor:
        x = tf.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        trains = training and layer.trainable and mask is None
        if not trains or x.dtype != tf.float32 or layer.axis not in (-1, x.shape.rank - 1):
            return plain_call(inputs, training=training, mask=mask)
        gamma = tf.cast(layer.gamma, x.dtype) if layer.scale else tf.ones(layer.moving_mean.shape)
        beta = tf.cast(layer.beta, x.dtype) if layer.center else tf.zeros(layer.moving_mean.shape)
        if gradient_order([x, gamma, beta]) != tapes:
            return plain_call(inputs, training=training)
        outputs, mean, variance = tf.compat.v1.nn.fused_batch_norm(
            x if x.shape.rank == 4 else tf.reshape(x, [-1, 1, 1, gamma.shape[0]]),
            gamma,
            beta,
            epsilon=layer.epsilon,
        )
        # The kernel's variance is that of a sample, divided by the count less one.
        count = tf.reduce_prod(tf.cast(tf.shape(x)[:-1], x.dtype))
        variance *= tf.maximum(count - 1.0, 1.0) / count
        for moving, value in [(layer.moving_mean, mean), (layer.moving_variance, variance)]:
            kept = tf.cast(moving, x.dtype) * layer.momentum
            moving.assign(kept + value * (1.0 - layer.momentum))
        outputs = outputs if x.shape.rank == 4 else tf.reshape(outputs, tf.shape(x))
        return tf.cast(outputs, layer.compute_dtype)

    return call
