"""A step of one device, traced once and spread over several."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.shared import in_fresh_thread
from keras_multigpu.engines.tensorflow.partition.constants import constant_of
from keras_multigpu.engines.tensorflow.partition.emission import write
from keras_multigpu.engines.tensorflow.partition.layouts import WHOLE, Split, Value
from keras_multigpu.engines.tensorflow.partition.local import Devices
from keras_multigpu.engines.tensorflow.partition.planner import Planner, Record
from keras_multigpu.engines.tensorflow.partition.program import Item
from keras_multigpu.engines.tensorflow.partition.rules import RULES
from keras_multigpu.engines.tensorflow.partition.sizes import BATCH, Dim

_UNEQUAL = (
    "All tensors of a batch must have the same number of rows, the length of their first axis."
)


@dataclasses.dataclass
class Argument:
    """A tensor that a step takes.

    Attributes:
        tensor: it.
        dims: its dimensions, with the batch's symbol; `None` if their number isn't known.
        has_rows: whether the first axis is the batch.
        const: of the shape of a sparse tensor, whose rows are the batch's.
    """

    tensor: Any
    dims: Any
    has_rows: bool = False
    const: Any = None


def spread(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    devices: Sequence[str],
    *,
    compiled: bool = False,
    records: list[Record] | None = None,
) -> Any:
    """The result of `step(*args)`, computed by several devices.

    Called while a graph is built. The tensors of `args` that have the batch's rows, by their first
    axis, are split.

    Args:
        step: any function of tensors.
        args: structures of tensors, and of other values.
        devices: TensorFlow's names.
        compiled: whether XLA compiles what a device computes between two crossings.
        records: where to note how each operation is computed.
    """
    leaves = tf.nest.flatten(args)
    rows = rows_of(leaves)
    if rows in (None, 0, 1):
        return step(*args)
    batch = Dim.symbol(BATCH) if rows == "unknown" else rows
    arguments, restore = _arguments(args, leaves, batch)
    specs = [tf.TensorSpec(one.tensor.shape, one.tensor.dtype) for one in arguments]

    def function(*tensors: Any) -> Any:
        with variables_lifted():
            return step(*restore(tensors))

    traced = tf.function(function, autograph=False).get_concrete_function(*specs)
    made = _write(traced, arguments, batch, devices, compiled, [] if records is None else records)
    structure = traced.structured_outputs
    rest = iter(made)
    flat = tf.nest.flatten(structure, expand_composites=True)
    results = [next(rest) if isinstance(one, (tf.Tensor, tf.TensorSpec)) else one for one in flat]
    return tf.nest.pack_sequence_as(structure, results, expand_composites=True)


def rows_of(leaves: Sequence[Any]) -> Any:
    """The number of rows of a batch: an `int`, `"unknown"` until the step runs, or `None`."""
    found = [one.shape[0] for one in leaves if tf.is_tensor(one) and one.shape.rank]
    if not found:
        return None
    known = {one for one in found if one is not None}
    return "unknown" if None in found else min(known) if len(known) == 1 else None


def _arguments(
    args: Any, leaves: Sequence[Any], batch: Any
) -> tuple[list[Argument], Callable[[Sequence[Any]], Any]]:
    """The tensors of a step's arguments, and a function that puts others in their places."""
    found: list[Argument] = []
    for leaf in leaves:
        if isinstance(leaf, tf.SparseTensor):
            dims = (batch, *leaf.shape.as_list()[1:])
            const = constant_of([*dims]) if None not in dims else None
            found += [
                Argument(leaf.indices, (None, len(dims))),
                Argument(leaf.values, (None,)),
                Argument(leaf.dense_shape, (len(dims),), const=const),
            ]
        elif isinstance(leaf, tf.Tensor):
            rank = leaf.shape.rank
            dims = None if rank is None else tuple(leaf.shape.as_list())
            has_rows = bool(rank) and (dims[0] is None or dims[0] == batch)
            found.append(Argument(leaf, (batch, *dims[1:]) if has_rows else dims, has_rows))
        elif tf.is_tensor(leaf):
            parts = tf.nest.flatten(leaf, expand_composites=True)
            found += [Argument(one, tuple(one.shape.as_list())) for one in parts]

    def restore(tensors: Sequence[Any]) -> Any:
        rest = iter(tensors)
        flat = tf.nest.flatten(args, expand_composites=True)
        return tf.nest.pack_sequence_as(
            args, [next(rest) if tf.is_tensor(one) else one for one in flat], expand_composites=True
        )

    return found, restore


def _write(
    traced: Any,
    arguments: Sequence[Argument],
    batch: Any,
    devices: Sequence[str],
    compiled: bool,
    records: list[Record],
) -> list[Any]:
    """Plans the traced step, and writes the program into the graph that is being built."""
    graph = traced.graph
    captured = {id(inside): outside for outside, inside in graph.captures}
    rest = iter(arguments)
    planner = Planner(RULES, len(devices), batch, records)
    known: dict[int, Value] = {}
    given: list[Any] = []
    for tensor in graph.inputs:
        if id(tensor) in captured:
            dims = None
            if tensor.shape.rank is not None and tensor.dtype not in (tf.resource, tf.variant):
                dims = tuple(tensor.shape.as_list())
            one = Argument(captured[id(tensor)], dims)
        else:
            one = next(rest)
        given.append(one.tensor)
        item = Item(tensor.dtype, 0)
        planner.program.inputs.append(item)
        value = planner.value(tensor.dtype, one.dims, WHOLE, item)
        value.const = one.const
        if one.has_rows:
            value.layout = Split(0)
        known[id(tensor)] = value
    results = planner.run_graph(graph, known, graph.outputs)
    planner.program.outputs = [planner.get(value, WHOLE) for value in results]
    count = batch if isinstance(batch, int) else _count(arguments)
    scope = Devices(devices, count, is_compiled=compiled)
    return write(planner.program, scope, given, compiled)


def _count(arguments: Sequence[Argument]) -> Any:
    """The number of rows, which all arguments must have."""
    counts = [tf.shape(one.tensor)[0] for one in arguments if one.has_rows]
    checks = [tf.debugging.assert_equal(one, counts[0], _UNEQUAL) for one in counts[1:]]
    with tf.control_dependencies([one for one in checks if one is not None]):
        return tf.identity(counts[0])


@contextlib.contextmanager
def variables_lifted() -> Iterator[None]:
    """Scope in which the variables that a trace creates exist at once: one trace is enough."""
    names = (
        "initial_value trainable validate_shape name dtype constraint synchronization aggregation "
        "shape"
    ).split()

    def create(next_creator: Any, **settings: Any) -> tf.Variable:
        chosen = {name: settings[name] for name in names if name in settings}
        made: list[tf.Variable] = []
        in_fresh_thread(lambda: made.append(tf.Variable(**chosen)))
        return made[0]

    with tf.variable_creator_scope(create):
        yield
