"""What joined processes exchange in a step, by TensorFlow's collective operations.

Every process has replicas for some slices of the batch. It gathers the results of all slices, so
that the loss sees the whole batch; the gradients of the weights are summed over the processes.

All processes must make the same operations in the same order. So all of them share one ordering
token, which TensorFlow lets no two operations use at a time. An operation's key is its type and
size: TensorFlow keeps what it finds out about a key, so keys are few. Sizes that are not known
before the step are rounded up.
"""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.joint import COMPARED
from keras_multigpu.engines.tensorflow.results import LocalResult, tensors_of
from keras_multigpu.engines.tensorflow.tensors import gradient_order, has_gradient, map_tensors
from keras_multigpu.engines.values import Tensor

# The types that cross as they are; others cross as one of these.
_WIRES = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64)
_AS_BITS = {tf.uint32: tf.int32, tf.uint64: tf.int64, tf.complex64: tf.int64}
_AS_NUMBERS = (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16)
# A size has 64 steps below each power of two: at most 1/32 of what is sent is filling.
_POWERS = [2**power for power in range(6, 31)]
_STEPS = 65
_ROUNDING = 1e-3  # of the norm of a weight
_BUCKET = 4 * 2**20  # bytes of gradients in one operation, at least
_MOST_BUCKETS = 24


class Peers:
    """The processes that share a model's replicas, as one of them sees them.

    Args:
        owners: the process that has each replica.
        number: this process.
        count: how many processes there are.
        device: this process's device that sends and receives.
        token: the ordering token, on that device.
        digests: keeps the checksums of all processes' data.
        batches: counts the batches that have come.

    Attributes:
        own: the replicas of this process.
    """

    def __init__(
        self,
        owners: Sequence[int],
        number: int,
        count: int,
        device: str,
        token: tf.Variable,
        digests: tf.Variable,
        batches: tf.Variable,
    ):
        self.own = [place for place, owner in enumerate(owners) if owner == number]
        self._owners, self._number, self._count = tuple(owners), number, count
        self._device, self._token, self._digests = device, token, digests
        self._batches = batches
        self._is_gpu = "GPU" in device

    def pick(self, values: Sequence[Any]) -> list[Any]:
        """The values of this process's replicas, from those of all."""
        return [values[place] for place in self.own]

    def check_rows(self, data: Any, step: str = "") -> Any:
        """The data of a step, which fails if another process has other data: see `differing`.

        It also fails if the other process makes another step: `step` is its name.
        """
        with tf.device(self._device):
            digest = _digest(data) + zlib.crc32(step.encode())
        with tf.control_dependencies([digest]):
            come = self._batches.assign_add(1)
        with tf.device(self._device), tf.control_dependencies([come]):
            digest = tf.identity(digest)
            every = self._reduce(
                tf.stack([digest if k == self._number else 0 * digest for k in range(self._count)])
            )
            with tf.control_dependencies([self._digests.assign(every)]):
                check = tf.debugging.Assert(tf.reduce_all(every == every[0]), [every])
        # In eager mode the check is done already.
        with tf.control_dependencies([] if check is None else [check]):
            return map_tensors(tf.identity, data)

    @property
    def arrived(self) -> int:
        """How many batches have come to steps of this process; a thread may ask."""
        return int(self._batches.numpy())

    def differing(self) -> int | None:
        """The first process whose data differ from those of process 0 in the latest step."""
        digests = self._digests.numpy().tolist()
        return next((k for k, one in enumerate(digests) if one != digests[0]), None)

    def share(self, tensors: list[Tensor]) -> list[Tensor]:
        """Inputs of all replicas, whose gradients are summed over the processes."""
        if not tensors or not gradient_order(tensors):
            return tensors

        @tf.custom_gradient
        def identity(*values: Tensor) -> Any:
            def backward(*upstream: Tensor) -> list[Tensor | None]:
                with tf.name_scope("gradients"):
                    return self.sum([tf.convert_to_tensor(one) for one in upstream])

            return [tf.identity(one) for one in values], backward

        return list(identity(*tensors))

    def results(self, own: Sequence[LocalResult], keys: Sequence[str]) -> list[LocalResult]:
        """The results of all replicas, from those of this process's.

        `keys` are the updates' in the order of the trace, which is the same in all processes; as
        identities of variables the keys themselves are not.
        """
        keys = [key for key in keys if key in own[0].updates]
        structures = [(one.differentiable, [one.updates[key] for key in keys]) for one in own]
        flat = [tf.nest.flatten(one, expand_composites=True) for one in structures]
        made = []
        for replica, tensors in enumerate(self._gather(flat, self._owners)):
            if replica not in self.own and not tf.executing_eagerly():
                for one, known in zip(tensors, flat[0]):
                    one.set_shape([None, *known.shape[1:]] if known.shape.rank else [])
            (outputs, attributes, losses), updates = tf.nest.pack_sequence_as(
                structures[0], tensors, expand_composites=True
            )
            for key, value in zip(keys, updates):
                value.set_shape(own[0].updates[key].shape)
            made.append(LocalResult(outputs, attributes, losses, dict(zip(keys, updates))))
        return made

    def complete(self, own: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of all replicas, all of one shape, from those of this process's."""
        gathered = self._gather([[one] for one in own], self._owners, alike=True)
        return [tensor for (tensor,) in gathered]

    def of_first(self, own: Sequence[Tensor]) -> list[Tensor] | None:
        """The tensors of process 0; `None` if some differ by more than rounding in any process."""
        every = self.of_processes(own)
        is_close = all(_are_close(*pair) for tensors in every for pair in zip(tensors, every[0]))
        return every[0] if is_close else None

    def of_processes(self, own: Sequence[Tensor]) -> list[list[Tensor]]:
        """The tensors of all processes, process by process, from those of this one."""
        return self._gather([list(own)], range(self._count))

    def sum(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The sums of dense tensors over all processes, several in one operation."""
        found = list(tensors)
        for places in _buckets(tensors):
            parts: list[Any] = [tensors[place] for place in places]
            with tf.device(self._device):
                total = self._reduce(tf.concat([tf.reshape(one, [-1]) for one in parts], axis=0))
                pieces = tf.split(total, [_size(one) for one in parts], num=len(parts))
            for place, part, piece in zip(places, parts, pieces):
                shaped = tf.reshape(piece, tf.shape(part))
                shaped.set_shape(part.shape)
                found[place] = shaped
        return found

    def _gather(
        self, own: Sequence[Sequence[Tensor]], owners: Sequence[int], alike: bool = False
    ) -> list[list[Tensor]]:
        """The tensors of all owners; with `alike` they have the same shapes everywhere.

        An owner's place is filled with zeros by all others, and the places are summed.
        """
        owned = iter(own)
        given = [next(owned) if owner == self._number else None for owner in owners]
        found: list[list[Any]] = [list(one or [None] * len(own[0])) for one in given]
        with tf.device(self._device):
            shapes = self._shapes(own[0], given, alike)
            for wire in _WIRES:
                places = [k for k, one in enumerate(own[0]) if _wire(one) == wire]
                if not places:
                    continue
                sizes = [tf.reduce_prod(row[k]) for row in shapes for k in places]
                lengths = iter(sizes)
                parts = [
                    _wired(one[k], next(lengths)) if one else tf.zeros([next(lengths)], wire)
                    for one in given
                    for k in places
                ]
                pieces = iter(tf.split(self._reduce(tf.concat(parts, 0)), sizes, num=len(sizes)))
                for one, row, shape in zip(given, found, shapes):
                    for k in places:
                        piece = next(pieces)
                        if one is None:
                            row[k] = tf.reshape(_unwired(piece, own[0][k].dtype), shape[k])
        return found

    def _shapes(
        self, example: Sequence[Tensor], given: Sequence[Sequence[Tensor] | None], alike: bool
    ) -> list[list[Tensor]]:
        """The shapes of all owners' tensors."""
        ranks = [_rank(one) for one in example]
        if alike or not sum(ranks):
            return [[tf.shape(one) for one in example]] * len(given)
        rows = [
            tf.concat([tf.shape(one) for one in tensors], axis=0)
            if tensors
            else tf.zeros([sum(ranks)], tf.int32)
            for tensors in given
        ]
        known = self._reduce(tf.concat(rows, axis=0))
        return [tf.split(row, ranks) for row in tf.split(known, len(rows))]

    def _reduce(self, flat: Tensor) -> Tensor:
        """The sum of a vector over all processes."""
        size, filled, key = _room(flat)
        filled_up = tf.concat([flat, tf.zeros([filled - size], flat.dtype)], axis=0)
        total = tf.raw_ops.CollectiveReduceV2(
            input=filled_up,
            group_size=self._count,
            group_key=2 if self._is_gpu else 1,
            instance_key=key * len(_WIRES) + _WIRES.index(flat.dtype) + 1,
            ordering_token=[self._token.handle],
            merge_op="Add",
            final_op="Id",
            communication_hint="nccl" if self._is_gpu else "ring",
        )
        return total[:size]


def _are_close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal but for rounding, and what rounding may become in a call."""
    if not one.dtype.is_floating:
        return bool(tf.reduce_all(one == other))
    gap, size = tf.cast(one - other, tf.float64), tf.cast(other, tf.float64)
    return bool(tf.reduce_all(tf.abs(gap) <= _ROUNDING * tf.norm(size)))


def _digest(data: Any) -> Tensor:
    """A checksum of a batch: shapes, types, and about `COMPARED` values of each tensor."""
    digest = tf.constant(0, tf.int64)
    for one in tensors_of(data):
        step = tf.maximum(1, tf.size(one) // COMPARED)
        some = tf.reshape(one, [-1])[::step]
        for part in (tf.shape(one), some):
            text = tf.strings.join([tf.strings.as_string(digest), tf.io.serialize_tensor(part)])
            digest = tf.strings.to_hash_bucket_fast(text, 2**31)
    return digest


def _room(flat: Tensor) -> tuple[Any, Any, Any]:
    """A vector's size, the size that it is filled up to, and a number for the latter."""
    if flat.shape[0] is not None:
        size: Any = flat.shape[0]
        power: Any = bisect.bisect_left(_POWERS, size)
        step, largest = 2**power, max(size, 1)
    else:
        size = tf.size(flat)
        power = tf.searchsorted(_POWERS, [size])[0]
        step, largest = tf.bitwise.left_shift(1, power), tf.maximum(size, 1)
    steps = (largest + step - 1) // step
    return size, steps * step, power * _STEPS + steps


def _buckets(tensors: Sequence[Tensor | None]) -> list[list[int]]:
    """Which tensors go into one operation: the last first, whose gradients are there first."""
    sizes = [_bytes(one) for one in tensors]
    least = max(_BUCKET, sum(sizes) // _MOST_BUCKETS)
    buckets: list[list[int]] = []
    latest: dict[Any, list[int]] = {}
    for place in reversed(range(len(tensors))):
        one = tensors[place]
        if one is None:
            continue
        bucket = latest.get(one.dtype)
        if bucket is None or sum(sizes[k] for k in bucket) + sizes[place] > least:
            latest[one.dtype] = bucket = []
            buckets.append(bucket)
        bucket.append(place)
    return buckets


def _bytes(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def _size(tensor: Tensor) -> Any:
    known = tensor.shape.num_elements()
    return tf.size(tensor) if known is None else known


def _rank(tensor: Tensor) -> int:
    if tensor.shape.rank is None:
        raise ValueError(
            "Joined processes exchange tensors whose numbers of axes are known before a step. "
            f"Received: {tensor}. Give the tensor its shape (`tf.ensure_shape`)."
        )
    return tensor.shape.rank


def _wire(tensor: Tensor) -> tf.DType:
    """The type as which a tensor crosses."""
    dtype = tensor.dtype
    if dtype in _WIRES:
        return dtype
    if dtype in _AS_BITS:
        return _AS_BITS[dtype]
    if dtype in _AS_NUMBERS:
        return tf.int32
    raise ValueError(
        "Joined processes exchange numbers and flags. Received: an output or a state of type "
        f"{dtype.name!r}. Leave it out of the model's outputs."
    )


def _wired(tensor: Tensor, size: Tensor) -> Tensor:
    flat, wire = tf.reshape(tensor, [size]), _wire(tensor)
    return tf.bitcast(flat, wire) if tensor.dtype in _AS_BITS else tf.cast(flat, wire)


def _unwired(flat: Tensor, dtype: tf.DType) -> Tensor:
    return tf.bitcast(flat, dtype) if dtype in _AS_BITS else tf.cast(flat, dtype)


def _refuse_gradient(operation: Any, *upstream: Tensor) -> None:
    raise ValueError(
        "Over joined processes, TensorFlow models have first derivatives only. Received: a "
        "gradient of a gradient. Use `tf.stop_gradient`, or devices of one process."
    )


if not has_gradient("CollectiveReduceV2"):  # this module may be loaded again
    tf.RegisterGradient("CollectiveReduceV2")(_refuse_gradient)
