"""What crosses between devices: gathers, sums, copies and scatters, each made here alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.program import (
    ALL,
    EACH,
    Crossing,
    Item,
    Node,
    Program,
)
from keras_multigpu.engines.tensorflow.partition.sizes import BATCH, symbols_of
from keras_multigpu.engines.tensorflow.weights.hubs import Part, divide, shares_back, shares_out

LEAST = 1024  # elements of what goes through hubs

_PAIRS = {
    "max": tf.maximum,
    "min": tf.minimum,
    "prod": tf.multiply,
    "any": tf.logical_or,
    "all": tf.logical_and,
}


def gather(program: Program, item: Item, axis: int) -> Item:
    """All slices, one after the other, on the first device."""

    def emit(devices: Any, parts: list[Any]) -> list[Any]:
        with tf.device(devices.names[0]):
            return [tf.concat(parts, axis)]

    return program.add(emit, [item], ALL, [item.dtype], name="gather", gives=0)[0]


def reduce(program: Program, item: Item, kind: str, what: Crossing) -> Item:
    """The addends' sum, or other reduction, on the first device."""

    def emit(devices: Any, parts: list[Any], parts_of: Any = None) -> list[Any]:
        if parts_of is not None:
            return [_sum_by_hubs(devices, parts, parts_of, what)]
        with tf.name_scope("gradients" if what.is_trained else kind):
            parts = _sent(devices, parts, what) if kind == "sum" else parts
            with tf.device(devices.names[0]):
                return [combine(kind, parts)]

    made = program.add(emit, [item], ALL, [item.dtype], name="reduce", gives=0)
    made[0].node.crossing = what if kind == "sum" else None  # type: ignore[union-attr]
    return made[0]


def combine(kind: str, parts: list[Any]) -> Any:
    """The sum of tensors, or another reduction."""
    if kind == "sum":
        return tf.add_n(parts)
    result = parts[0]
    for part in parts[1:]:
        result = _PAIRS[kind](result, part)
    return result


def copy(program: Program, item: Item, what: Crossing) -> Item:
    """The tensor on every device. TensorFlow copies it when a device uses it."""

    def emit(devices: Any, whole: Any, parts_of: Any = None) -> list[Any]:
        if parts_of is not None:
            return [_copy_by_hubs(devices, whole, parts_of, what)]
        return [_sent(devices, [whole] * len(devices.names), what, devices.names[0])]

    made = program.add(emit, [item], ALL, [item.dtype], name="copy", gives=EACH)
    made[0].node.crossing = what  # type: ignore[union-attr]
    return made[0]


def _wire(devices: Any, dtype: tf.DType, what: Crossing) -> tf.DType:
    """The type in which a tensor crosses."""
    is_other = devices.wire_dtype is not None and what.is_trained and dtype.is_floating
    return tf.as_dtype(devices.wire_dtype) if is_other else dtype


def _sent(devices: Any, parts: list[Any], what: Crossing, source: str | None = None) -> list[Any]:
    """What arrives of each device's part, or of those of one source, which cross in a type."""
    dtype = parts[0].dtype
    wire = _wire(devices, dtype, what)
    if wire == dtype:
        return parts
    found = []
    for name, part in zip(devices.names, parts):
        with tf.device(source or name):
            sent = tf.cast(part, wire)
        with tf.device(name if source else devices.names[0]):
            found.append(tf.cast(sent, dtype))
    return found


def _copy_by_hubs(devices: Any, whole: Any, parts: Sequence[Part], what: Crossing) -> list[Any]:
    """The owner sends each piece to its hub, which sends it to the others."""
    wire = _wire(devices, whole.dtype, what)
    with tf.device(devices.names[0]):
        pieces = _cut(tf.cast(whole, wire), parts)
    passed = []
    for part, piece in zip(parts, pieces):
        with tf.device(part.hub):
            passed.append(tf.identity(piece))
    copies = [whole if wire == whole.dtype else tf.cast(tf.cast(whole, wire), whole.dtype)]
    for name in devices.names[1:]:
        with tf.device(name):
            joined = passed[0] if len(parts) == 1 else tf.reshape(tf.concat(passed, 0), whole.shape)
            copies.append(tf.cast(joined, whole.dtype))
    return copies


def _sum_by_hubs(devices: Any, addends: list[Any], parts: Sequence[Part], what: Crossing) -> Any:
    """Each hub sums its piece; the owner joins the sums."""
    dtype = addends[0].dtype
    wire = _wire(devices, dtype, what)
    scope = "gradients" if what.is_trained else "sums"
    with tf.name_scope(scope):
        return _add(devices, addends, parts, dtype, wire)


def _add(devices: Any, addends: list[Any], parts: Sequence[Part], dtype: Any, wire: Any) -> Any:
    pieces = []
    for name, addend in zip(devices.names, addends):
        with tf.device(name):
            pieces.append(_cut(tf.cast(addend, wire), parts))
    sums = []
    for part, column in zip(parts, zip(*pieces)):
        with tf.device(part.hub):
            sums.append(tf.cast(tf.add_n([tf.cast(one, dtype) for one in column]), wire))
    with tf.device(devices.names[0]):
        joined = sums[0] if len(sums) == 1 else tf.reshape(tf.concat(sums, 0), addends[0].shape)
        return tf.cast(joined, dtype)


def _cut(tensor: Any, parts: Sequence[Part]) -> list[Any]:
    if len(parts) == 1:
        return [tensor]
    return tf.split(tf.reshape(tensor, [-1]), [part.stop - part.start for part in parts])


def hubs_of(nodes: Sequence[Node], names: Sequence[str]) -> dict[int, tuple[Part, ...]]:
    """The pieces in which copies and sums go through hubs, by the `id` of the node.

    What is small goes directly.
    """
    loads = dict.fromkeys(names, 0) | {names[0]: 1}
    found: dict[int, tuple[Part, ...]] = {}
    for kind, shares in (("copy", shares_out), ("sum", shares_back)):
        sizes = {
            id(node): node.crossing.size
            for node in nodes
            if node.crossing is not None
            and node.crossing.kind == kind
            and (node.crossing.size or 0) >= LEAST
        }
        if sizes and len(names) > 1:
            found.update(divide(sizes, shares(loads, names[0])))  # type: ignore[arg-type]
    return found


def first(program: Program, item: Item) -> Item:
    """The first device's copy of what every device has whole."""

    def emit(devices: Any, parts: list[Any]) -> list[Any]:
        return [parts[0]]

    return program.add(emit, [item], ALL, [item.dtype], name="first", gives=0)[0]


def scatter(program: Program, item: Item, axis: int, unit: Any) -> Item:
    """A slice for each device; `unit`: how many entries of the axis belong to a row."""

    def emit(devices: Any, whole: Any) -> list[Any]:
        with tf.device(devices.names[0]):
            sizes = [local.entries(unit) for local in devices.locals]
            parts = tf.split(whole, tf.stack(sizes), axis, num=len(sizes))
            return [[_with_own_memory(p, n, axis) for p, n in zip(parts, devices.names)]]

    symbols = symbols_of([unit]) - {BATCH}
    added = program.add(
        emit, [item], ALL, [item.dtype], name="scatter", gives=EACH, symbols=symbols
    )
    return added[0]


def _with_own_memory(part: Any, device: str, axis: int) -> Any:
    """A slice, or a copy of it where it stays in the host's memory.

    TensorFlow may compute in the memory of a slice that nothing else needs. Of a batch from
    `tf.data.Dataset.from_generator`, that is the memory of the array which the generator has.
    """
    is_on_host = "CPU:" in device or part.dtype == tf.int32
    return tf.roll(part, 0, 0) if is_on_host and axis == 0 else part


def on_first(program: Program, item: Item, kind: str) -> Item:
    """A whole tensor as addends: the first device has it, the others have zeros."""
    assert kind == "sum", kind

    def emit(devices: Any, whole: Any) -> list[Any]:
        parts = [whole]
        for name in devices.names[1:]:
            with tf.device(name):
                parts.append(tf.zeros_like(whole))
        return [parts]

    return program.add(emit, [item], ALL, [item.dtype], name="addend", gives=EACH)[0]


def own_slice(program: Program, item: Item, axis: int, rank: int, unit: Any) -> Item:
    """A device's slice of what it has whole, of this rank."""

    def emit(local: Any, whole: Any) -> list[Any]:
        begins, sizes = [0] * rank, [-1] * rank
        begins[axis], sizes[axis] = local.first_entry(unit), local.entries(unit)
        return [tf.slice(whole, tf.stack(begins), tf.stack(sizes))]

    symbols = symbols_of([unit]) - {BATCH}
    return program.add(emit, [item], EACH, [item.dtype], name="slice", symbols=symbols)[0]


def only_on_first(program: Program, item: Item, kind: str) -> Item:
    """What a device has whole, as an addend: zeros on all devices but the first."""
    assert kind == "sum", kind

    def emit(local: Any, whole: Any) -> list[Any]:
        return [tf.where(tf.equal(local.index, 0), whole, tf.zeros_like(whole))]

    return program.add(emit, [item], EACH, [item.dtype], name="addend")[0]
