"""The operations of a traced step, as joined processes compare them."""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.engines.cluster.listing import Listing, digest_of
from keras_multigpu.engines.tensorflow.cluster.facts import Outside, OutsideTable, OutsideVariable
from keras_multigpu.engines.tensorflow.partition.operations import attributes_of
from keras_multigpu.engines.tensorflow.partition.rules.control import graph_named

# Attributes in which equal steps may differ: names, and how a function is run.
_NAMES = frozenset({"shared_name", "container", "config", "config_proto", "executor_type", "token"})
_READING = frozenset(
    "ReadVariableOp VarIsInitializedOp VariableShape ResourceGather ResourceGatherNd "
    "LookupTableFindV2 LookupTableSizeV2".split()
)

_OF_VARIABLES = re.compile("Variable|ResourceGather|ResourceScatter")
_CHOOSES = frozenset("Case If StatelessCase StatelessIf".split())

Attributes = Sequence[tuple[str, Any]]
"""An operation's attributes, by name."""


def listing_of(graph: Any, variables: Mapping[int, int]) -> tuple[Listing, list[Outside]]:
    """What a graph computes: its outputs, and what it assigns.

    Args:
        graph: that of a traced step.
        variables: the numbers of the model's variables, by the `id`s of their handles.

    Returns:
        The listing; and tables and variables, none of the model's, that are alike in all processes
        whenever the step begins: of variables, those that it only reads, and whole numbers.
    """
    given: dict[int, Any] = {id(one): "input" for one in graph.inputs}
    names = {id(one.handle): one.name for one in graph.variables}
    compared: list[Outside] = []
    for outside, ours in graph.captures:
        if id(outside) in variables:
            given[id(ours)] = f"variable {variables[id(outside)]}"
        elif outside.dtype == tf.resource:
            known, given[id(ours)] = _resource(outside, ours, names.get(id(outside), "a variable"))
            compared += known
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


def _resource(outside: Any, ours: Any, name: str) -> tuple[list[Outside], str]:
    """A resource that a graph has from outside: what to compare of it, and what it is."""
    users = list(_users(ours))
    for op in users:
        kinds = {*op.node_def.attr}
        if "dtype" in kinds and _OF_VARIABLES.search(op.type):
            dtype = op.get_attr("dtype")
            is_alike = not dtype.is_floating or not any(map(_assigns, users))
            return [OutsideVariable(name, outside, dtype)] * is_alike, "variable of its own"
        if {"Tin", "Tout"} <= kinds and "Lookup" in op.type:
            table = OutsideTable(outside, op.get_attr("Tin"), op.get_attr("Tout"))
            with tf.init_scope():
                return [table], f"table {zlib.crc32(repr(table.rows()).encode())}"
    return [], "resource"


def _users(tensor: Any) -> Iterator[tf.Operation]:
    """The operations that use a tensor, in functions that get it, too."""
    for op in tensor.consumers():
        names = _functions(sorted(attributes_of(op).items()))
        if not names:
            yield op
        first = 1 if op.type in _CHOOSES else 0  # its first input chooses a function
        places = [k - first for k, one in enumerate(op.inputs) if one is tensor and k >= first]
        for inner in (graph_named(op, name) for name in names):
            for place in places if inner is not None else ():
                if place < len(inner.inputs):
                    yield from _users(inner.inputs[place])


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
