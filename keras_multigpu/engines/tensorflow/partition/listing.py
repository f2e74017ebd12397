"""The operations of a traced step, as joined processes compare them."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.engines.cluster.descriptions import digest_of
from keras_multigpu.engines.cluster.listing import Listing
from keras_multigpu.engines.tensorflow.partition.operations import attributes_of
from keras_multigpu.engines.tensorflow.partition.rules.control import graph_named

# Attributes in which equal steps may differ: names, and how a function is run.
_NAMES = frozenset({"shared_name", "container", "config", "config_proto", "executor_type", "token"})
_READING = frozenset(
    "ReadVariableOp VarIsInitializedOp VariableShape ResourceGather ResourceGatherNd "
    "LookupTableFindV2 LookupTableSizeV2".split()
)

Attributes = Sequence[tuple[str, Any]]
"""An operation's attributes, by name."""


def listing_of(graph: Any, variables: Mapping[int, int]) -> tuple[Listing, list[tf.Variable]]:
    """What a graph computes: its outputs, and what it assigns.

    Args:
        graph: that of a traced step.
        variables: the numbers of the model's variables, by the `id`s of their handles.

    Returns:
        The listing; and the variables that are none of the model's whose values are alike in all
        processes whenever the step begins: those that it only reads, and whole numbers.
    """
    given: dict[int, Any] = {id(one): "input" for one in graph.inputs}
    own = {id(one.handle): one for one in graph.variables if id(one.handle) not in variables}
    compared = []
    for outside, ours in graph.captures:
        users = ours.consumers()
        if id(outside) in variables:
            given[id(ours)] = f"variable {variables[id(outside)]}"
        elif id(outside) in own:
            given[id(ours)] = "variable of its own"
            variable = own[id(outside)]
            if not variable.dtype.is_floating or not any(map(_assigns, users)):
                compared.append(variable)
        elif outside.dtype == tf.resource:
            given[id(ours)] = f"table {_contents(outside, users)}"
        elif outside.dtype != tf.variant:
            given[id(ours)] = f"tensor {_value(outside)}"
    listing = Listing()
    _list(graph, given, listing, {"": 0})
    return listing, compared


def _value(one: Any) -> int:
    """A checksum of a tensor that a step has from outside, if its value is known."""
    if not hasattr(one, "numpy"):
        return 0
    value = np.asarray(one.numpy())
    if value.dtype == object:  # texts, of which NumPy has the addresses
        return zlib.crc32(repr(value.tolist()).encode())
    return digest_of([value], sys.maxsize)


def _contents(table: Any, users: Sequence[tf.Operation]) -> int:
    """A checksum of what a lookup table holds, in any order."""
    lookups = [op for op in users if {"Tin", "Tout"} <= {*op.node_def.attr} and "Lookup" in op.type]
    if not lookups:
        return 0
    keys, values = (lookups[0].get_attr(name) for name in ("Tin", "Tout"))
    with tf.init_scope():
        found = tf.raw_ops.LookupTableExportV2(table_handle=table, Tkeys=keys, Tvalues=values)
    rows = sorted(zip(*(np.asarray(one).tolist() for one in found)))
    return zlib.crc32(repr(rows).encode())


def _list(
    graph: Any, given: Mapping[int, Any], listing: Listing, known: dict[str, int], number: int = 0
) -> None:
    """Adds a graph's operations to a listing, and first those of the functions that it calls.

    `known` are the numbers of the functions that are listed, by their names.
    """
    operations = _with_results(graph)
    places = {id(op): place for place, op in enumerate(operations)}
    for op in operations:
        attributes = sorted(attributes_of(op).items())
        called = _functions(attributes)
        for name in called:
            inner = None if name in known else graph_named(op, name)
            known.setdefault(name, len(known))
            if inner is not None:
                _list(inner, {}, listing, known, known[name])
        inputs = [(places[id(one.op)], one.value_index) for one in op.inputs]
        forms = [(one.dtype.name, str(one.shape)) for one in op.outputs]
        values = [given.get(id(one)) for one in op.outputs]
        numbers = [known[name] for name in called]
        listing.add(
            (number, op.type, _settings(attributes), numbers, inputs, forms, values),
            f"{op.type} {op.name!r} of {', '.join(f'{a}{b}' for a, b in forms)}{_scalar(op)}",
        )
    results = [(places[id(one.op)], one.value_index) for one in graph.outputs]
    listing.add((number, "results", results), f"the results {results}")


def _scalar(op: tf.Operation) -> str:
    """The value of a constant of one element, for people."""
    if op.type != "Const" or op.outputs[0].shape.num_elements() != 1:
        return ""
    return f" with {np.ravel(tf.get_static_value(op.outputs[0]))[0]!s}"


def _with_results(graph: Any) -> list[tf.Operation]:
    """The operations on which a graph's outputs depend, and what it assigns."""
    operations = graph.get_operations()
    stack = [one.op for one in graph.outputs] + [op for op in operations if _assigns(op)]
    found = set(map(id, stack))
    while stack:
        for one in stack.pop().inputs:
            if id(one.op) not in found:
                found.add(id(one.op))
                stack.append(one.op)
    return [op for op in operations if id(op) in found]


def _assigns(op: tf.Operation) -> bool:
    """Whether it may change a variable or a table; summaries are a process's own."""
    has_resource = any(one.dtype == tf.resource for one in op.inputs)
    return has_resource and op.type not in _READING and "Summary" not in op.type


def _settings(attributes: Attributes) -> list[tuple[str, int]]:
    """What of an operation's attributes equal steps have in common."""
    found = []
    for name, one in attributes:
        if name in _NAMES or one.WhichOneof("value") in ("func", "placeholder"):
            continue
        if not one.list.func:
            found.append((name, zlib.crc32(one.SerializeToString(deterministic=True))))
    return found


def _functions(attributes: Attributes) -> list[str]:
    """The names of the functions that an operation calls."""
    values = [one for _, one in attributes]
    single = [one.func.name for one in values if one.WhichOneof("value") == "func"]
    return [*single, *(each.name for one in values for each in one.list.func)]
