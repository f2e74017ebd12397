"""What calls, branches and loops share: their graphs, and how they may run.

What nothing of which crosses, each device runs for its rows: one loop for each device. What
crosses, all devices run together. What has no rows, one device runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.shared import unchanged
from keras_multigpu.engines.tensorflow.partition.forms import (
    ALL_DEVICES,
    EACH_DEVICE,
    ONE_DEVICE,
    NeedsOthers,
)
from keras_multigpu.engines.tensorflow.partition.layouts import WHOLE, Partial, Value
from keras_multigpu.engines.tensorflow.partition.planner import Planner


def graph_named(op: tf.Operation, name: str) -> Any:
    """The graph of a function that an operation's graph knows by name.

    `None` for those of `tf.compat.v1`'s kind, which have a definition only.
    """
    return getattr(op.graph._get_function(name), "graph", None)


def graph_of(op: tf.Operation, attribute: str) -> Any:
    """The graph of the function that an attribute names."""
    return graph_named(op, op.get_attr(attribute).name)


def origin(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that identities pass on."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def ways(planner: Planner, values: Sequence[Value]) -> tuple[str, ...]:
    """How it may run, the best first."""
    if planner.way != ALL_DEVICES:
        return (planner.way,)

    def may_have_rows(value: Value) -> bool:
        return value.is_free and not value.is_state and planner.has_rows(value.dims)

    if any(value.is_spread or may_have_rows(value) for value in values):
        return EACH_DEVICE, ALL_DEVICES, ONE_DEVICE
    if any(value.is_sharded for value in values):
        return ALL_DEVICES, ONE_DEVICE
    # What one device gets from outside, joined processes agree on.
    return (ONE_DEVICE, ALL_DEVICES) if planner.is_joined else (ONE_DEVICE,)


def first_possible(
    planner: Planner, possible: Sequence[str], plan: Callable[[str], list[Value]]
) -> list[Value]:
    """The plan of the first way that is possible."""
    *others, last = possible
    # What is chosen of the rows may have to leave a function whole: only it can count them.
    for chosen in dict.fromkeys([planner.chosen, None]):
        with unchanged(planner, "chosen", chosen):
            for way in others:
                with contextlib.suppress(NeedsOthers):
                    return plan(way)
    return plan(last)


def carried(some: Sequence[Any], states: Sequence[Any]) -> list[Any]:
    """What is of the variables that a loop changes: those that have states."""
    return [one for one, state in zip(some, states) if state is not None]


def while_loop(
    op: tf.Operation, test: Any, body: Any, variables: Any, shapes: Any, name: str
) -> list[Any]:
    """A loop in place of `op`, whose variables keep their static shapes."""

    def step(*variables: Any) -> list[Any]:
        made: list[Any] = body(*variables)
        for tensor, shape in zip(made, shapes):
            tensor.set_shape(shape)
        return made

    most = op.get_attr("parallel_iterations")
    made: list[Any] = tf.while_loop(
        test, step, variables, shape_invariants=shapes, parallel_iterations=most, name=name
    )
    return made


def sums(planner: Planner, values: Sequence[Value]) -> list[Value]:
    """The values, without addends."""
    found = []
    for value in values:
        if isinstance(value.layout, Partial):
            layout = planner.shard_of(value) or WHOLE
            value = planner.value(value.dtype, value.dims, layout, planner.get(value, layout))
        found.append(value)
    return found


def changed(planner: Planner, values: Sequence[Value]) -> None:
    """Resources may be changed: whoever reads them afterwards reads again."""
    for value in values:
        if value.dtype == tf.resource:
            planner.versions[id(value)] = planner.versions.get(id(value), 0) + 1
