"""Whether a scalar given to `add_loss` is a mean over the rows of a batch, or a sum."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.engines.values import Call

_ROWS = (3, 2)
_UNKNOWN_AXIS = 16


def find_sums(template: keras.Model, call: Call, count: int) -> list[bool]:
    """Tells the losses that are sums from those that are means.

    A loss is a number by then, and does not show how it came about. So the template is tried
    on two small made-up batches and on both together: a sum is the sum of the two, a mean their
    mean weighted by the rows. What is neither is taken for a mean, with a warning.

    Args:
        template: a built model.
        call: the arguments of a call, of which the types count.
        count: how many losses the call adds.

    Returns:
        For each loss whether it is a sum.
    """
    with tf.init_scope():
        rng = np.random.default_rng(0)
        parts = [
            tf.nest.map_structure(lambda value, n=rows: _make_up(value, n, rng), call)
            for rows in _ROWS
        ]
        whole = tf.nest.map_structure(_join, *parts)
        try:
            first, second, both = (_losses(template, one) for one in (*parts, whole))
        except Exception as error:  # whatever the template raises on made-up inputs: it is told
            _warn(template, repr(error))
            return [False] * count
    if not len(first) == len(second) == len(both) == count:
        _warn(template, f"it added {len(both)} losses instead of {count}")
        return [False] * count
    return [_is_sum(template, *values) for values in zip(first, second, both)]


def _is_sum(template: keras.Model, first: float, second: float, both: float) -> bool:
    mean = (_ROWS[0] * first + _ROWS[1] * second) / sum(_ROWS)
    close = 1e-3 * max(abs(first), abs(second), abs(both))
    if abs(both - mean) <= close:
        return False
    if abs(both - (first + second)) <= close:
        return True
    _warn(template, f"{first:.6g} and {second:.6g} for 3 and 2 rows became {both:.6g} for all 5")
    return False


def _warn(template: keras.Model, problem: str) -> None:
    warnings.warn(
        f"A loss that {template.name!r} adds with `add_loss` is taken for a mean over the rows of "
        f"the batch. Tried on made-up rows, it showed itself neither mean nor sum: {problem}. "
        "Where it is not a mean, results differ from those of one device: add a value for each "
        "row, or compute it in the loss, which sees the whole batch.",
        stacklevel=2,
    )


def _losses(template: keras.Model, call: Call) -> list[float]:
    args, kwargs = call
    with keras.StatelessScope(collect_losses=True) as scope:
        template(*args, **kwargs)
    return [float(tf.reduce_sum(loss)) for loss in scope.losses]


def _make_up(value: Any, rows: int, rng: np.random.Generator) -> Any:
    """Some rows of a tensor's type; anything else as it is."""
    if not tf.is_tensor(value):
        return value
    shape = [_UNKNOWN_AXIS if axis is None else axis for axis in value.shape]
    shape[:1] = [rows] * len(shape[:1])
    if value.dtype.is_floating:
        dense = tf.cast(rng.normal(size=shape), value.dtype)
    elif value.dtype == tf.string:
        dense = tf.fill(shape, "a")
    else:
        dense = tf.cast(tf.ones(shape), value.dtype)
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.from_dense(dense)
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensor.from_tensor(dense, ragged_rank=value.ragged_rank)
    return dense


def _join(first: Any, second: Any) -> Any:
    if isinstance(first, tf.SparseTensor):
        return tf.sparse.concat(0, [first, second])
    if not tf.is_tensor(first) or not first.shape.rank:
        return first
    return tf.concat([first, second], axis=0)
