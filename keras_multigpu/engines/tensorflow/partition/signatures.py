"""What a rule says of an operation: which axes of its inputs and outputs belong together."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import Value
from keras_multigpu.engines.tensorflow.partition.sizes import Dims, Unit, elements_of

Labels = Sequence[Any]


@dataclasses.dataclass
class Signature:
    """The axes of an operation's inputs and outputs, with labels.

    Split along a label, each device computes the operation on its slices of the inputs that have
    the label, and on whole copies of the others. It gets its slices of the outputs that have it,
    and an addend of the others.

    Attributes:
        inputs: for each input a label for each axis; `None`: it can't be split along that axis.
        outputs: likewise.
        partial: the kind of addends that outputs without the label are; `None`: there must be none.
        dims: the outputs' dimensions, where the rule knows more than the trace and the labels.
        shapes: {input: output}: inputs that hold the shape of an output.
        constants: {input: numbers}: what an input is replaced by.
        kind: the operation to use instead.
        attributes: attributes to use instead.
        zero_if_empty: labels along which a kernel fails, or gives garbage, if there is nothing: a
            device without rows gives zeros of `dims`.
        regroups: whether a label's axis may have another multiple of the rows in the outputs.
        write: adds it to a graph, as `operations.create` does, if it is more than one operation.
        write_empty: the same, for a device without rows, if no `dims` tell the shape of zeros.
        write_compiled: the same, for what XLA refuses to compile where there is nothing.
    """

    inputs: Sequence[Labels]
    outputs: Sequence[Labels]
    partial: str | None = None
    dims: Sequence[Any] | None = None
    shapes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    constants: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    kind: str | None = None
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    zero_if_empty: Sequence[Any] = ()
    regroups: bool = False
    write: Callable[..., list[Any]] | None = None
    write_empty: Callable[..., list[Any]] | None = None
    write_compiled: Callable[..., list[Any]] | None = None


def output_dims(op: tf.Operation, values: Sequence[Value], signature: Signature) -> list[Any]:
    """The dimensions of the outputs; `None` for those that aren't known."""
    known: dict[Any, Any] = {}
    for value, labels in zip(values, signature.inputs):
        for one, dim in zip(labels, value.dims or ()):
            known[one] = dim if known.get(one, dim) == dim else None  # one is broadcast
    known[None] = None
    found = []
    for number, (tensor, labels) in enumerate(zip(op.outputs, signature.outputs)):
        if signature.dims is not None and signature.dims[number] is not None:
            found.append(tuple(signature.dims[number]))
            continue
        static = static_dims(tensor)
        static = (None,) * len(labels) if static is None else static
        assert len(static) == len(labels), (op.type, static, labels)
        found.append(
            tuple(dim if dim is not None else known.get(one) for dim, one in zip(static, labels))
        )
    return found


def static_dims(tensor: tf.Tensor) -> tuple[Any, ...] | None:
    """A tensor's static dimensions, `None` for unknown ones; `None` if their number is unknown."""
    return None if tensor.shape.rank is None else tuple(tensor.shape.as_list())


def split_label(
    values: Sequence[Value],
    signature: Signature,
    dims: Sequence[Dims],
    unit_of: Callable[..., Unit | None],
) -> Any:
    """The label along which an operation is split; `None` if it can't be.

    `unit_of` gives the rows that a dimension is a multiple of, or `None`.
    """
    units: dict[Any, set[Any]] = collections.defaultdict(set)
    weights: dict[Any, float] = collections.defaultdict(float)
    is_split: set[Any] = set()  # a number that happens to be that of the rows is no reason
    for number, (value, labels) in enumerate(zip(values, signature.inputs)):
        if number in signature.shapes:
            continue
        for axis, (label, dim) in enumerate(zip(labels, value.dims or ())):
            if label is None:
                continue
            units[label].add(dim)
            is_free = value.is_free and not value.is_state
            if axis == value.axis or (is_free and unit_of(dim) is not None):
                weights[label] += 1 + elements_of(value.dims)
            if axis == value.axis:
                is_split.add(label)
    for labels, shape in zip(signature.outputs, dims):
        for label, dim in zip(labels, shape):
            if label in units and not signature.regroups:
                units[label].add(dim)
            elif label in units and not are_of_same_rows([dim, *units[label]], unit_of):
                units[label].add(None)
    possible = [
        label
        for label in weights
        if len(units[label]) == 1
        and unit_of(next(iter(units[label]))) is not None
        and (signature.partial or all(label in labels for labels in signature.outputs))
    ]
    is_kept = {one: all(one in labels for labels in signature.outputs) for one in possible}
    if not possible and signature.shapes and not any(value.is_spread for value in values):
        return _new_rows(signature, dims, units, unit_of)
    ranks = {one: (one in is_split, is_kept[one], weights[one]) for one in possible}
    return max(possible, key=lambda one: ranks[one], default=None)


def are_of_same_rows(dims: Iterable[Any], unit_of: Callable[..., Unit | None]) -> bool:
    """Whether dimensions are multiples of the same number of rows."""
    units = list(map(unit_of, dims))
    return all(
        one is not None and units[0] is not None and one.rows == units[0].rows for one in units
    )


def _new_rows(signature: Signature, dims: Sequence[Dims], known: Any, unit_of: Any) -> Any:
    """The label of a new axis of rows, along which each device repeats what all have."""
    for label, dim in zip(signature.outputs[0], dims[0]):
        if label is not None and label not in known and unit_of(dim) is not None:
            return label
    return None
