"""Dilated convolutions: TensorFlow makes rows of an image's blocks, and an image of them again.

`SpaceToBatchND` puts the first block of all rows before the second one of any, so that no slice of
its result has all blocks of a row. Where only convolutions are between it and `BatchToSpaceND`, the
blocks of a row follow each other here: convolutions compute each row by itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import Value
from keras_multigpu.engines.tensorflow.partition.operations import create
from keras_multigpu.engines.tensorflow.partition.rules.rows import CONVOLUTIONS, FILTERS, GRADIENTS
from keras_multigpu.engines.tensorflow.partition.rules.table import rule
from keras_multigpu.engines.tensorflow.partition.signatures import Signature, static_dims
from keras_multigpu.engines.tensorflow.partition.sizes import quotient

_INTO, _BACK = "SpaceToBatchND", "BatchToSpaceND"
_SAME_ROWS = ("ExpandDims", "Squeeze", "Reshape")
_OF_SHAPES = ("Shape", "ShapeN", "Size", "Rank")
# {type: its inputs with rows}
_ROWS_OF = {
    **dict.fromkeys((*CONVOLUTIONS, *_SAME_ROWS, _BACK), (0,)),
    **dict.fromkeys(FILTERS, (0, 2)),
    **{kind: (2,) for kind in GRADIENTS if "Conv" in kind},
}


@rule(_INTO, _BACK)
def blocks(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """Each row with its blocks."""
    known = planner.cache.setdefault("blocks", {})
    if id(op) not in known:
        known[id(op)] = _are_rows_apart(op)
    after = static_dims(op.outputs[0])
    size, rows = _size(op), (values[0].dims or ())[0]
    made = rows * size if op.type == _INTO else quotient(rows, size)
    if not size or made is None or after is None:
        return None
    if not known[id(op)]:  # what follows is spread again
        return planner.fallback(op, values, [(made, *after[1:])])
    labels = ("row", *(None,) * (len(after) - 1))
    return Signature(
        [labels, (None,), (None, None)],
        [labels],
        dims=[(made, *after[1:])],
        regroups=True,
        zero_if_empty=["row"],
        write=functools.partial(_write, size),
    )


def _write(
    size: int, kind: str, inputs: Sequence[Any], attributes: Mapping[str, Any], name: str
) -> list[Any]:
    """The operation, with the blocks of a row beside each other."""
    first, *rest = inputs
    if kind == _BACK:
        return create(kind, [_reordered(first, -1, size), *rest], attributes, name)
    return [_reordered(create(kind, inputs, attributes, name)[0], size, -1)]


def _reordered(tensor: Any, before: int, beside: int) -> Any:
    """Rows that are numbered by two axes, numbered by the second one first."""
    shape = tf.shape(tensor)
    pairs = tf.reshape(tensor, tf.concat([[before, beside], shape[1:]], 0))
    order = [1, 0, *range(2, tensor.shape.rank + 1)]
    return tf.reshape(tf.transpose(pairs, order), shape)


def _size(op: tf.Operation) -> int:
    """How many blocks a row has; 0 if that isn't known."""
    block = tf.get_static_value(op.inputs[1])
    return 0 if block is None else math.prod(map(int, block))


def _are_rows_apart(op: tf.Operation) -> bool:
    """Whether only convolutions are between this and the operations that undo it, or it undoes."""
    size, seen, left = _size(op), set[int](), [op]
    outputs = {id(tensor) for tensor in op.graph.outputs}
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        sizes = [static_dims(tensor) for tensor in (*one.inputs[:1], *one.outputs)]
        if any(dims is None or None in dims[1:] for dims in sizes):
            return False
        if one.type in (_INTO, _BACK) and (not size or _size(one) != size):
            return False
        if one.type in _SAME_ROWS and not _keeps_rows(one):
            return False
        for tensor, other in _neighbours(one):
            if id(tensor) in outputs or other is None:
                return False
            left.append(other)
    return True


def _neighbours(op: tf.Operation) -> Iterator[tuple[tf.Tensor, tf.Operation | None]]:
    """What makes the rows that it takes, and takes those that it makes; `None`: something else."""
    if op.type != _INTO:
        for number in _ROWS_OF[op.type]:
            before = op.inputs[number].op
            is_known = before.type == _INTO or (before.type in _ROWS_OF and before.type != _BACK)
            yield op.inputs[number], before if is_known else None
    if op.type != _BACK and op.type not in FILTERS:
        yield op.outputs[0], op
        for one in op.outputs[0].consumers():
            if one.type not in _OF_SHAPES:
                takes = [n for n, tensor in enumerate(one.inputs) if tensor is op.outputs[0]]
                is_known = set(takes) <= {*_ROWS_OF.get(one.type, ())}
                yield op.outputs[0], one if is_known else None


def _keeps_rows(op: tf.Operation) -> bool:
    """Whether it adds or removes axes of one entry only, behind the rows."""
    before, after = static_dims(op.inputs[0]), static_dims(op.outputs[0])
    assert before is not None
    assert after is not None
    return [one for one in before[1:] if one != 1] == [one for one in after[1:] if one != 1]
