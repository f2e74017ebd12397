"""Variables, and other state: kept and changed on one device."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.constants import constant_of
from keras_multigpu.engines.tensorflow.partition.forms import NeedsOthers
from keras_multigpu.engines.tensorflow.partition.layouts import Sharded, Value
from keras_multigpu.engines.tensorflow.partition.operations import operation
from keras_multigpu.engines.tensorflow.partition.program import EACH
from keras_multigpu.engines.tensorflow.partition.rules.table import rule
from keras_multigpu.engines.tensorflow.partition.rules.tables import add_rows
from keras_multigpu.engines.tensorflow.partition.signatures import static_dims

_OF_ROWS = ("ResourceScatterAdd", "ResourceScatterSub")
_BY_SHARDS = ("ReadVariableOp", "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")


@rule("ReadVariableOp", needs_ranks=False)
def read(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Read once between two changes."""
    outside = planner.outside(values[0])
    if outside is not None:  # nothing of a device's own function changes it
        return [planner.take(read(planner.outer, op, [outside])[0])]
    variable = id(values[0])
    key = "read", variable, planner.versions.get(variable, 0), op.outputs[0].dtype
    if key not in planner.cache:
        made = _on_shards(planner, op, values) or planner.fallback(op, values)[0]
        (planner.cache[key],) = made
        planner.cache[key].is_trained = variable in planner.trained
        planner.cache[key].is_state = True
    return [planner.cache[key]]


_CHANGES = (
    "AssignVariableOp AssignAddVariableOp AssignSubVariableOp ResourceScatterAdd "
    "ResourceScatterDiv ResourceScatterMax ResourceScatterMin ResourceScatterMul "
    "ResourceScatterNdAdd ResourceScatterNdUpdate ResourceScatterSub ResourceScatterUpdate "
    "ResourceStridedSliceAssign"
).split()


@rule(*_CHANGES, needs_ranks=False)
def change(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Whoever reads it afterwards reads again."""
    planner.versions[id(values[0])] = planner.versions.get(id(values[0]), 0) + 1
    made = _on_shards(planner, op, values)
    if made is not None:
        return made, "spread"
    is_apart = values[-1].dims in planner.shards
    return planner.fallback(op, values)[0], "apart" if is_apart else "whole"


def _on_shards(planner: Any, op: tf.Operation, values: list[Value]) -> list[Value] | None:
    """Reads a sharded variable, or changes it, where its shards are; `None` if it has none."""
    layout = values[0].layout
    if not isinstance(layout, Sharded):
        return None
    if op.type in _OF_ROWS:
        made = add_rows(planner, op, values)
        if made is not None:
            return made
    if op.type not in _BY_SHARDS:
        raise NeedsOthers
    write, axis = operation(op), layout.axis
    dims = [static_dims(tensor) for tensor in op.outputs]

    def emit(local: Any, *tensors: Any) -> list[Any]:
        made = write(local, *tensors)
        for tensor, shape in zip(made, dims):
            assert shape is not None
            tensor.set_shape([*shape[:axis], None, *shape[axis + 1 :]])
        return made

    inputs = [planner.get(value, layout) for value in values]
    types = [tensor.dtype for tensor in op.outputs]
    items = planner.add(emit, inputs, EACH, types, name=op.name, after=planner.after(op, EACH))
    return [planner.value(*one, layout, item) for *one, item in zip(types, dims, items)]


@rule("VariableShape", needs_ranks=False)
def shape_of(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Known of a sharded variable: no device has one of this shape."""
    outside = planner.outside(values[0])
    if outside is not None:
        found = shape_of(planner.outer, op, [outside])
        return [planner.take((found or planner.outer.fallback(op, [outside])[0])[0])]
    elements = values[0].elements
    if elements is None or elements.dims is None:
        return None
    const = constant_of(elements.dims)
    return [Value(op.outputs[0].dtype, const.shape, const=const)]


@rule("ResourceGather", needs_ranks=False)
def resource_gather(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """The table stays where it is: its device looks up, the rows are sent."""
    found = static_dims(op.outputs[0])
    if values[1].dims is None or found is None or op.get_attr("batch_dims"):
        return None
    rank = len(values[1].dims)
    made, _ = planner.fallback(op, values, [(*values[1].dims, *found[rank:])])
    return made, "whole"
