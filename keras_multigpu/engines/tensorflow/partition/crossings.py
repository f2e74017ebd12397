"""What crosses between devices: gathers, sums, copies and scatters, each made here alone."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.program import ALL, EACH, Item, Program
from keras_multigpu.engines.tensorflow.partition.sizes import BATCH, symbols_of

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


def reduce(program: Program, item: Item, kind: str) -> Item:
    """The addends' sum, or other reduction, on the first device."""

    def emit(devices: Any, parts: list[Any]) -> list[Any]:
        with tf.device(devices.names[0]):
            return [combine(kind, parts)]

    return program.add(emit, [item], ALL, [item.dtype], name="reduce", gives=0)[0]


def combine(kind: str, parts: list[Any]) -> Any:
    """The sum of tensors, or another reduction."""
    if kind == "sum":
        return tf.add_n(parts)
    result = parts[0]
    for part in parts[1:]:
        result = _PAIRS[kind](result, part)
    return result


def copy(program: Program, item: Item) -> Item:
    """The tensor on every device. TensorFlow copies it when a device uses it."""

    def emit(devices: Any, whole: Any) -> list[Any]:
        return [[whole] * len(devices.names)]

    return program.add(emit, [item], ALL, [item.dtype], name="copy", gives=EACH)[0]


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


def own_slice(program: Program, item: Item, axis: int, unit: Any) -> Item:
    """A device's slice of what it has whole."""

    def emit(local: Any, whole: Any) -> list[Any]:
        begins = [0] * len(whole.shape)
        sizes = [-1] * len(whole.shape)
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
