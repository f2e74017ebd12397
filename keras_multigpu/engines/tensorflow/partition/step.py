"""A step of one device, traced once and spread over several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.emission import write
from keras_multigpu.engines.tensorflow.partition.layouts import WHOLE, Split, Value
from keras_multigpu.engines.tensorflow.partition.local import Devices
from keras_multigpu.engines.tensorflow.partition.planner import Planner, Record
from keras_multigpu.engines.tensorflow.partition.program import EACH, Item
from keras_multigpu.engines.tensorflow.partition.rules import RULES
from keras_multigpu.engines.tensorflow.partition.sizes import BATCH, Dim


def spread(
    step: Callable[..., Any],
    args: Any,
    devices: Sequence[str],
    *,
    compiled: bool = False,
    records: list[Record] | None = None,
) -> Any:
    """The result of `step(*args)`, computed by several devices.

    Called while a graph is built. The tensors of `args` whose first axis is the batch are split.

    Args:
        step: any function of tensors.
        args: a tuple: structures of tensors, and other values.
        devices: TensorFlow's names.
        compiled: whether XLA compiles what a device computes between two crossings.
        records: where to note how each operation is computed.
    """
    records = [] if records is None else records
    flat = tf.nest.flatten(args, expand_composites=True)
    places = [number for number, one in enumerate(flat) if tf.is_tensor(one)]
    tensors = [flat[number] for number in places]

    def function(*inside: Any) -> Any:
        mine = list(flat)
        for number, tensor in zip(places, inside):
            mine[number] = tensor
        return step(*tf.nest.pack_sequence_as(args, mine, expand_composites=True))

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
    with lifted_variables():
        traced = tf.function(function, autograph=False).get_concrete_function(*specs)
    made = _write(traced, tensors, devices, compiled, records)
    structure = traced.structured_outputs
    return tf.nest.pack_sequence_as(structure, _with_nones(structure, made), expand_composites=True)


def _with_nones(structure: Any, tensors: Sequence[Any]) -> list[Any]:
    rest = iter(tensors)
    flat = tf.nest.flatten(structure, expand_composites=True)
    return [next(rest) if tf.is_tensor(one) or isinstance(one, tf.TensorSpec) else one for one in flat]


def _write(
    traced: Any, tensors: Sequence[Any], devices: Sequence[str], compiled: bool, records: Any
) -> list[Any]:
    graph = traced.graph
    captured = {id(inside): outside for outside, inside in graph.captures}
    given = [tensor for tensor in graph.inputs if id(tensor) not in captured]
    assert len(given) == len(tensors)
    rows = [tensor for tensor in given if tensor.shape.rank]
    static = rows[0].shape[0] if rows else 1
    batch = Dim.symbol(BATCH) if static is None else static
    planner = Planner(RULES, len(devices), batch, records)
    known: dict[int, Value] = {}
    values: list[Any] = []
    by_tensor = dict(zip(map(id, given), tensors))
    for tensor in graph.inputs:
        outside = captured.get(id(tensor), by_tensor.get(id(tensor)))
        item = Item(tensor.dtype, 0)
        planner.program.inputs.append(item)
        values.append(outside)
        dims: Any = None
        if tensor.shape.rank is not None and tensor.dtype != tf.resource:
            dims = tuple(tensor.shape.as_list())
        is_row = id(tensor) in by_tensor and dims and dims[0] == static
        if is_row:
            dims = (batch, *dims[1:])
        value = planner.value(tensor.dtype, dims, WHOLE, item)
        if is_row:
            value.layout = Split(0)
        known[id(tensor)] = value
    results = planner.run_graph(graph, known, graph.outputs)
    planner.program.outputs = [planner.get(value, WHOLE) for value in results]
    count = tf.shape(by_tensor[id(rows[0])])[0] if static is None else static
    return write(
        planner.program, Devices(devices, count, is_compiled=compiled), values, compiled
    )


def lifted_variables() -> Any:
    """Scope in which variables that a trace creates exist at once, so that one trace is enough."""

    def create(next_creator: Any, **settings: Any) -> tf.Variable:
        settings.pop("distribute_strategy", None)
        with tf.init_scope():
            return next_creator(**settings)

    return tf.variable_creator_scope(create)


__all__ = ["EACH", "spread"]
