"""Operations that joined processes make together, by TensorFlow's collectives.

All processes must make the same operations in the same order. So all of them share one ordering
token, which TensorFlow lets no two operations use at a time. An operation's key is its kind, type
and size: TensorFlow keeps what it finds out about a key, so keys are few. Sizes that are not known
before the step are rounded up.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.values import Tensor

TYPES = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64)
"""The types that cross as they are; others cross as one of these."""
_AS_BITS = {tf.uint32: tf.int32, tf.uint64: tf.int64, tf.complex64: tf.int64}
_AS_NUMBERS = dict.fromkeys([tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16], tf.int32)
_CROSSES_AS = {**{dtype: dtype for dtype in TYPES}, **_AS_BITS, **_AS_NUMBERS}
# A size has 64 steps below each power of two: at most 1/32 of what is sent is filling.
_POWERS = [2**power for power in range(6, 31)]
_STEPS = 65
_BUCKET = 4 * 2**20  # bytes of gradients in one operation, at least
MOST_BUCKETS = 24
"""About how many operations send all gradients."""
_SUM, _EXCHANGE = range(2)  # the kinds of operations


class Collectives:
    """The operations, as one process makes them.

    Args:
        number: this process.
        count: how many processes there are.
        device: this process's device that sends and receives.
        token: the ordering token, on that device.

    Attributes:
        number, count, device: the arguments.
    """

    def __init__(self, number: int, count: int, device: str, token: tf.Variable):
        self.number, self.count, self.device = number, count, device
        self._token = token
        self._is_gpu = "GPU" in device

    def sum(self, flat: Tensor) -> Tensor:
        """The sum of a vector over all processes."""
        size = size_of(flat)
        filled, key = room(size)
        total = tf.raw_ops.CollectiveReduceV2(
            input=tf.concat([flat, tf.zeros([filled - size], flat.dtype)], axis=0),
            instance_key=_key(key, flat.dtype, _SUM),
            merge_op="Add",
            final_op="Id",
            communication_hint="nccl" if self._is_gpu else "ring",
            **self._common(),
        )
        return total[:size]

    def sum_narrow(self, flat: Tensor, dtype: tf.DType) -> Tensor:
        """The sum of a vector over all processes, sent in a type of fewer bits.

        Each process sums a part of the vector, in the vector's own type, and sends the sum to all.
        So each addend and each sum is rounded once, however many processes there are.
        """
        size = size_of(flat)
        filled, key = room((size + self.count - 1) // self.count)
        padding = tf.zeros([filled * self.count - size], flat.dtype)
        parts = tf.reshape(tf.concat([flat, padding], axis=0), [self.count, filled])
        own = self._exchange(tf.cast(parts, dtype), key)
        total = tf.cast(tf.reduce_sum(tf.cast(own, flat.dtype), axis=0), dtype)
        sums = self._exchange(tf.tile(total[None], [self.count, 1]), key)
        return tf.cast(tf.reshape(sums, [-1])[:size], flat.dtype)

    def of_all(self, own: Tensor) -> Tensor:
        """The vectors of all processes, from that of this one: a row for each."""
        rows = [own if k == self.number else tf.zeros_like(own) for k in range(self.count)]
        return tf.reshape(self.sum(tf.concat(rows, axis=0)), [self.count, -1])

    def exchange(self, vectors: Sequence[Tensor], most: int) -> list[Tensor]:
        """Sends vector `i` to process `i`; what all have sent to this one, each filled up.

        None of all processes' vectors has more than `most` elements.
        """
        filled, key = room(most)
        rows = [tf.pad(one, [[0, filled - size_of(one)]]) for one in vectors]
        return tf.unstack(self._exchange(tf.stack(rows), key), num=self.count)

    def _exchange(self, parts: Tensor, key: Any) -> Tensor:
        """Sends part `i` to process `i`; the parts that all processes have sent to this one."""
        return tf.raw_ops.CollectiveAllToAllV2(
            input=parts,
            instance_key=_key(key, parts.dtype, _EXCHANGE),
            communication_hint="nccl" if self._is_gpu else "auto",
            **self._common(),
        )

    def _common(self) -> dict[str, Any]:
        return {
            "group_size": self.count,
            "group_key": 2 if self._is_gpu else 1,
            "ordering_token": [self._token.handle],
        }


def room(size: Any) -> tuple[Any, Any]:
    """The size that a vector is filled up to, and a number for it."""
    if isinstance(size, int):
        power: Any = bisect.bisect_left(_POWERS, size)
        step, largest = 2**power, max(size, 1)
    else:
        power = tf.searchsorted(_POWERS, [size])[0]
        step, largest = tf.bitwise.left_shift(1, power), tf.maximum(size, 1)
    steps = (largest + step - 1) // step
    return steps * step, power * _STEPS + steps


def _key(key: Any, dtype: tf.DType, kind: int) -> Any:
    return (key * len(TYPES) + TYPES.index(dtype)) * 2 + kind + 1


def buckets(tensors: Sequence[Any]) -> list[list[int]]:
    """Which tensors go into one operation: the last first, whose gradients are there first."""
    sizes = [(one.shape.num_elements() or 0) * one.dtype.size for one in tensors]
    least = max(_BUCKET, sum(sizes) // MOST_BUCKETS)
    found: list[list[int]] = []
    latest: dict[Any, list[int]] = {}
    for place in reversed(range(len(tensors))):
        one = tensors[place]
        bucket = latest.get(one.dtype)
        if bucket is None or sum(sizes[k] for k in bucket) + sizes[place] > least:
            latest[one.dtype] = bucket = []
            found.append(bucket)
        bucket.append(place)
    return found


def size_of(tensor: Tensor) -> Any:
    """The number of elements: an `int` if known, else a scalar tensor."""
    known = tensor.shape.num_elements()
    return tf.size(tensor) if known is None else known


def can_cross(dtype: tf.DType) -> bool:
    """Whether tensors of a type can cross."""
    return dtype in _CROSSES_AS


def crosses_as(tensor: Tensor) -> tf.DType:
    """The type as which a tensor crosses.

    Raises:
        ValueError: if it can't cross.
    """
    if tensor.dtype not in _CROSSES_AS:
        raise ValueError(
            "Joined processes exchange numbers and flags. Received: an output or a state of type "
            f"{tensor.dtype.name!r}. Leave it out of the model's outputs."
        )
    return _CROSSES_AS[tensor.dtype]


def packed(tensor: Tensor, size: Tensor) -> Tensor:
    """A tensor of a known size as a vector of the type as which it crosses."""
    flat, dtype = tf.reshape(tensor, [size]), crosses_as(tensor)
    return tf.bitcast(flat, dtype) if tensor.dtype in _AS_BITS else tf.cast(flat, dtype)


def unpacked(flat: Tensor, dtype: tf.DType) -> Tensor:
    """A vector that has crossed, in its own type."""
    return tf.bitcast(flat, dtype) if dtype in _AS_BITS else tf.cast(flat, dtype)
