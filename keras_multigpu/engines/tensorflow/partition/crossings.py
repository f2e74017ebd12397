"""What crosses between devices: gathers, sums, copies and scatters, each made here alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.cluster.collectives import can_cross
from keras_multigpu.engines.tensorflow.partition.layouts import Joined, Owned, Sharded, Split
from keras_multigpu.engines.tensorflow.partition.program import (
    ALL,
    EACH,
    Across,
    Crossing,
    Item,
    Program,
)
from keras_multigpu.engines.tensorflow.partition.sending import (
    copies,
    copy_by_hubs,
    sum_as,
    sum_by_hubs,
    sum_of,
    wire_here,
    wire_of,
)
from keras_multigpu.engines.tensorflow.partition.sizes import symbols_of

_PAIRS = {
    "max": tf.maximum,
    "min": tf.minimum,
    "prod": tf.multiply,
    "any": tf.logical_or,
    "all": tf.logical_and,
}


def gather(program: Program, item: Item, layout: Split | Joined | Sharded | Owned) -> Item:
    """All slices, one after the other, at home."""

    def emit(devices: Any, parts: list[Any]) -> list[Any]:
        with tf.device(devices.home):
            return [tf.concat(devices.complete(parts, layout), layout.axis)]

    symbols = symbols_of([layout.size]) if isinstance(layout, Joined) else ()
    return program.add(emit, [item], ALL, [item.dtype], name="gather", gives=0, symbols=symbols)[0]


def reduce(program: Program, item: Item, kind: str, what: Crossing) -> Item:
    """The addends' sum, or other reduction, at home."""
    return _reduce(program, item, what, Across(kind))


def _reduce(program: Program, item: Item, what: Crossing, across: Across) -> Item:
    is_sum = across.kind in ("sum", "scatter")

    def emit(devices: Any, parts: list[Any], parts_of: Any = None) -> list[Any]:
        if parts_of is not None:
            return [sum_by_hubs(devices, parts, parts_of, what)]
        with tf.name_scope("gradients" if what.is_trained else across.kind):
            if is_sum:
                total = sum_of(devices, parts, what)
                total.set_shape(what.shape)  # the addends may not know it
                return [total]
            with tf.device(devices.home):
                return [combine(across.kind, parts)]

    more: Any = {"crossing": what if is_sum else None, "across": across}
    return program.add(emit, [item], ALL, [item.dtype], name="reduce", gives=0, **more)[0]


def gather_all(program: Program, item: Item, layout: Any, what: Crossing) -> Item:
    """The shards of all processes, one after the other, at each process's home."""
    shape = list(what.shape or ())
    dim = shape[layout.axis]

    def emit(devices: Any, parts: list[Any]) -> list[Any]:
        shape[layout.axis] = sum(local.extent(dim, layout)[1] for local in devices.locals)
        with tf.device(devices.home):
            own = tf.concat(parts, layout.axis)
        own.set_shape(shape)  # the parts may not know it
        return [own]

    more: Any = {"crossing": what, "across": Across("gather", layout.axis, dim)}
    return program.add(emit, [item], ALL, [item.dtype], name="gather", gives=0, **more)[0]


def sum_shards(program: Program, item: Item, layout: Any, what: Crossing) -> Item:
    """A shard of the addends' sum over all processes, for each device."""
    dim = (what.shape or ())[layout.axis]
    own = _reduce(program, item, what, Across("scatter", layout.axis, dim))

    def emit(devices: Any, own: Any) -> list[Any]:
        with tf.device(devices.home):
            sizes = [local.extent(dim, layout)[1] for local in devices.locals]
            return [tf.split(own, sizes, layout.axis)]

    return _added(program, emit, own, "scatter")


def combine(kind: str, parts: list[Any]) -> Any:
    """The sum of tensors, or another reduction."""
    return tf.add_n(parts) if kind == "sum" else functools.reduce(_PAIRS[kind], parts)


def copy(program: Program, item: Item, what: Crossing) -> Item:
    """The tensor on every device. TensorFlow copies it when a device uses it."""

    def emit(devices: Any, whole: Any, parts_of: Any = None) -> list[Any]:
        if parts_of is not None:
            return [copy_by_hubs(devices, whole, parts_of, what)]
        return [copies(devices, whole, what)]

    types = [item.dtype]
    return program.add(emit, [item], ALL, types, name="copy", gives=EACH, crossing=what)[0]


def first(program: Program, item: Item) -> Item:
    """The first device's copy of what every device has whole."""

    def emit(devices: Any, parts: list[Any]) -> list[Any]:
        return [parts[0]]

    return program.add(emit, [item], ALL, [item.dtype], name="first", gives=0)[0]


def scatter(program: Program, item: Item, layout: Split | Joined | Sharded, dim: Any) -> Item:
    """A slice for each device, of an axis of this size."""

    def emit(devices: Any, whole: Any) -> list[Any]:
        with tf.device(devices.home):
            parts = devices.cut(whole, layout, dim)
            return [[_with_own_memory(p, n, layout.axis) for p, n in zip(parts, devices.names)]]

    return _added(program, emit, item, "scatter", dim)


def _added(program: Program, emit: Any, item: Item, name: str, dim: Any = 1) -> Item:
    symbols = symbols_of([dim])
    return program.add(emit, [item], ALL, [item.dtype], name=name, gives=EACH, symbols=symbols)[0]


def reduce_scatter(
    program: Program, item: Item, layout: Split | Joined | Sharded, dim: Any, what: Crossing
) -> Item:
    """A slice of the addends' sum for each device, which adds it up."""

    def emit(devices: Any, parts: list[Any]) -> list[Any]:
        dtype = parts[0].dtype
        if devices.is_joined:
            with tf.device(devices.home):
                total = sum_of(devices, parts, what)
                wire = wire_of(devices, dtype, what)
                totals = devices.combine([total], [Across("sum")], wire)
                return [devices.cut(totals[0], layout, dim)]
        wire = wire_here(devices, dtype, what)
        with tf.name_scope("gradients" if what.is_trained else "sums"):
            pieces = devices.each(lambda part: devices.cut(tf.cast(part, wire), layout, dim), parts)
            return [devices.each(lambda *column: sum_as(dtype, column), *pieces)]

    return _added(program, emit, item, "reduce_scatter", dim)


def all_gather(
    program: Program, item: Item, layout: Split | Joined | Sharded | Owned, what: Crossing
) -> Item:
    """All slices, one after the other, on every device."""

    def emit(devices: Any, parts: list[Any]) -> list[Any]:
        dtype = parts[0].dtype
        wire = wire_here(devices, dtype, what)
        sent = devices.each(lambda part: tf.cast(part, wire), parts)
        with tf.device(devices.home):
            sent = devices.complete(sent, layout)
        return [devices.each(lambda: tf.cast(tf.concat(sent, layout.axis), dtype))]

    dim = layout.size if isinstance(layout, Joined) else 1
    return _added(program, emit, item, "all_gather", dim)


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
        is_first = [local.index == 0 for local in devices.locals]
        return [devices.each(lambda has: whole if has else tf.zeros_like(whole), is_first)]

    return program.add(emit, [item], ALL, [item.dtype], name="addend", gives=EACH)[0]


def own_slice(
    program: Program, item: Item, layout: Split | Joined | Sharded, dims: Sequence[Any]
) -> Item:
    """A device's slice of what it has whole, of these dimensions."""
    axis = layout.axis

    def emit(local: Any, whole: Any) -> list[Any]:
        is_joined = isinstance(layout, Joined)
        extents = local.extents(layout) if is_joined else [local.extent(dims[axis], layout)]
        pieces = []
        for begin, size in extents:
            begins, sizes = [0] * len(dims), [-1] * len(dims)
            begins[axis], sizes[axis] = begin, size
            pieces.append(tf.slice(whole, tf.stack(begins), tf.stack(sizes)))
        return [tf.concat(pieces, axis) if is_joined else pieces[0]]

    symbols = symbols_of([dims[axis]])
    return program.add(emit, [item], EACH, [item.dtype], name="slice", symbols=symbols)[0]


def of_process_0(program: Program, items: Sequence[Item], like: Sequence[tf.Tensor]) -> list[Item]:
    """What process 0 has, of these static shapes, in all processes; of texts each has its own."""
    crossing = [number for number, one in enumerate(items) if can_cross(one.dtype)]

    def emit(devices: Any, *wholes: Any) -> list[Any]:
        with tf.device(devices.home):
            agreed = devices.of_process_0(wholes)
            return [tf.ensure_shape(one, like[k].shape) for k, one in zip(crossing, agreed)]

    given = [items[number] for number in crossing]
    made = program.add(emit, given, ALL, [one.dtype for one in given], name="agree", gives=0)
    agreed = dict(zip(crossing, made))
    return [agreed.get(number, one) for number, one in enumerate(items)]


def only_on_first(program: Program, item: Item, kind: str) -> Item:
    """What a device has whole, as an addend: zeros on all devices but the first."""
    assert kind == "sum", kind

    def emit(local: Any, whole: Any) -> list[Any]:
        return [tf.where(tf.equal(local.index, 0), whole, tf.zeros_like(whole))]

    return program.add(emit, [item], EACH, [item.dtype], name="addend")[0]
