"""Whether a scalar given to `add_loss` is a mean over the rows of a batch, or a sum."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.base import Call

_ROWS = 4
_UNKNOWN_AXIS = 16


def find_sums(template: keras.Model, call: Call, count: int) -> list[bool]:
    """Tells the losses that are sums from those that are means.

    A loss is a number by then, and does not show how it came about. So the template is tried
    once on a small made-up batch and on the same rows twice: a sum doubles, a mean does not.

    Args:
        template: a built model.
        call: the arguments of a call, of which the types count.
        count: how many losses the call adds.

    Returns:
        For each loss whether it is a sum.
    """
    with tf.init_scope():
        rows = tf.nest.map_structure(_make_up, call)
        twice = tf.nest.map_structure(_double, rows)
        try:
            once, doubled = _losses(template, rows), _losses(template, twice)
        except Exception as error:  # whatever the template raises on made-up inputs: it is told
            return _all_means(template, count, repr(error))
    if len(once) != count or len(doubled) != count:
        return _all_means(template, count, f"it added {len(once)} losses instead of {count}")
    return [abs(two) > 1.5 * abs(one) for one, two in zip(once, doubled)]


def _all_means(template: keras.Model, count: int, problem: str) -> list[bool]:
    warnings.warn(
        f"The losses that {template.name!r} adds with `add_loss` are taken for means over the "
        "rows of the batch. Whether one is a sum could not be tried on a made-up batch: "
        f"{problem}. Where one is a sum, add a value for each row instead of the total.",
        stacklevel=2,
    )
    return [False] * count


def _losses(template: keras.Model, call: Call) -> list[float]:
    args, kwargs = call
    with keras.StatelessScope(collect_losses=True) as scope:
        template(*args, **kwargs)
    return [float(tf.reduce_sum(loss)) for loss in scope.losses]


def _make_up(value: Any) -> Any:
    """A few rows of a tensor's type; anything else as it is."""
    if not tf.is_tensor(value):
        return value
    shape = [_UNKNOWN_AXIS if axis is None else axis for axis in value.shape]
    shape[:1] = [_ROWS] * len(shape[:1])
    if value.dtype.is_floating:
        numbers = tf.reshape(tf.linspace(0.1, 1.0, tf.reduce_prod(shape)), shape)
        dense = tf.cast(numbers, value.dtype)
    elif value.dtype == tf.string:
        dense = tf.fill(shape, "a")
    else:
        dense = tf.cast(tf.ones(shape), value.dtype)
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.from_dense(dense)
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensor.from_tensor(dense, ragged_rank=value.ragged_rank)
    return dense


def _double(value: Any) -> Any:
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.concat(0, [value, value])
    if not tf.is_tensor(value) or not value.shape.rank:
        return value
    return tf.concat([value, value], axis=0)
