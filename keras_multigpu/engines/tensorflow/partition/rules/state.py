"""Variables, and other state: kept and changed on one device."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import Value
from keras_multigpu.engines.tensorflow.partition.rules.table import Table
from keras_multigpu.engines.tensorflow.partition.signatures import static_dims

RULES = Table()


@RULES.rule("ReadVariableOp", needs_ranks=False)
def read(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Read once between two changes."""
    outside = planner.outside(values[0])
    if outside is not None:  # nothing of a device's own function changes it
        return [planner.take(read(planner.outer, op, [outside])[0])]
    variable = id(values[0])
    key = "read", variable, planner.versions.get(variable, 0), op.outputs[0].dtype
    if key not in planner.cache:
        planner.cache[key] = planner.fallback(op, values)[0][0]
        planner.cache[key].is_trained = variable in planner.trained
        planner.cache[key].is_state = True
    return [planner.cache[key]]


@RULES.rule(
    "AssignVariableOp",
    "AssignAddVariableOp",
    "AssignSubVariableOp",
    "ResourceScatterAdd",
    "ResourceScatterDiv",
    "ResourceScatterMax",
    "ResourceScatterMin",
    "ResourceScatterMul",
    "ResourceScatterNdAdd",
    "ResourceScatterNdUpdate",
    "ResourceScatterSub",
    "ResourceScatterUpdate",
    "ResourceStridedSliceAssign",
    needs_ranks=False,
)
def change(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Whoever reads it afterwards reads again."""
    planner.versions[id(values[0])] = planner.versions.get(id(values[0]), 0) + 1
    made, _ = planner.fallback(op, values)
    return made, "whole"


@RULES.rule("ResourceGather", needs_ranks=False)
def resource_gather(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """The table stays where it is: its device looks up, the rows are sent."""
    found = static_dims(op.outputs[0])
    if values[1].dims is None or found is None or op.get_attr("batch_dims"):
        return None
    rank = len(values[1].dims)
    made, _ = planner.fallback(op, values, [(*values[1].dims, *found[rank:])])
    return made, "whole"
