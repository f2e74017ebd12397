"""Sums of products over common axes."""

from __future__ import annotations

import string
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import Value
from keras_multigpu.engines.tensorflow.partition.rules.table import broadcast_labels, join, rule
from keras_multigpu.engines.tensorflow.partition.signatures import Signature
from keras_multigpu.engines.tensorflow.partition.sizes import Unknown, broadcast


@rule("MatMul")
def matmul(planner: Any, op: tf.Operation, values: list[Value]) -> Signature:
    """Rows and columns are kept, the inner axis is summed."""
    a = ("k", "m") if op.get_attr("transpose_a") else ("m", "k")
    b = ("n", "k") if op.get_attr("transpose_b") else ("k", "n")
    join(planner, (values[0], a.index("k")), (values[1], b.index("k")))
    return Signature([a, b], [("m", "n")], "sum")


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def batch_matmul(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """As a product of matrices, with axes in front that broadcast."""
    a = ("k", "m") if op.get_attr("adj_x") else ("m", "k")
    b = ("n", "k") if op.get_attr("adj_y") else ("k", "n")
    shapes = [value.dims or () for value in values]
    fronts = [shape[:-2] for shape in shapes]
    if op.type == "BatchMatMul" and fronts[0] != fronts[1]:
        return None  # it does not broadcast
    try:
        front = broadcast(*fronts)
    except Unknown:
        return None
    labels, before = broadcast_labels(front, fronts)
    inputs = [[*one, *ends] for one, ends in zip(before, (a, b))]
    ends = [dict(zip(a, shapes[0][-2:]))["m"], dict(zip(b, shapes[1][-2:]))["n"]]
    return Signature(inputs, [(*labels, "m", "n")], "sum", dims=[(*front, *ends)])


@rule("Einsum")
def einsum(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """The equation names the axes."""
    inputs, output = op.get_attr("equation").decode().split("->")
    terms = _spelled([*inputs.split(","), output], values)
    output = terms[-1]
    if any(len(set(term)) < len(term) for term in terms):
        return None
    in_several = {
        one for one in output if all(one not in term for term in terms[:-1])
    }  # an axis that only the output has
    if in_several:
        return None
    sizes: dict[str, list[Any]] = {}
    for term, value in zip(terms, values):
        for one, dim in zip(term, value.dims or ()):
            sizes.setdefault(one, []).append(dim)
    # A size of 1 may broadcast against another.
    labels = {one: one if all(d == dims[0] for d in dims) else None for one, dims in sizes.items()}
    dims = [max(sizes[one], key=lambda dim: dim != 1) for one in output]
    signature = [tuple(labels[one] for one in term) for term in terms]
    return Signature(signature[:-1], signature[-1:], "sum", dims=[dims])


def _spelled(terms: list[str], values: list[Value]) -> list[str]:
    """The terms of an equation, with a letter for each axis that "..." stands for.

    The last axes that it stands for are the same in all terms; the output has all of them.
    """
    unused = [one for one in string.ascii_letters if not any(one in term for term in terms)]
    counts = [
        value.rank - len(term) + 3 if "..." in term else 0 for term, value in zip(terms, values)
    ]
    most = max(counts)
    return [
        term.replace("...", "".join(unused[most - count : most]))
        for term, count in zip(terms, [*counts, most])
    ]


@rule("BiasAddGrad")
def bias_add_grad(planner: Any, op: tf.Operation, values: list[Value]) -> Signature:
    """All axes but the channels are summed."""
    labels = tuple(range(values[0].rank))
    channel = 1 if op.get_attr("data_format") == b"NCHW" else labels[-1]
    return Signature([labels], [(channel,)], "sum")


@rule("L2Loss")
def l2_loss(planner: Any, op: tf.Operation, values: list[Value]) -> Signature:
    """A sum over all axes."""
    return Signature([tuple(range(values[0].rank))], [()], "sum")


@rule("Cross")
def cross(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """The last axis belongs together."""
    if values[0].dims != values[1].dims:
        return None
    labels = (*range(values[0].rank - 1), None)
    return Signature([labels, labels], [labels], dims=[values[0].dims])


@rule("SparseTensorDenseMatMul")
def sparse_matmul(planner: Any, op: tf.Operation, values: list[Value]) -> Any:
    """The columns of the dense matrix are independent; the entries of the sparse one add up."""
    dense = ("column", None) if op.get_attr("adjoint_b") else (None, "column")
    dims = dict(zip(dense, values[3].dims or ()))
    inputs = [("entry", None), ("entry",), (None,), dense]
    return Signature(inputs, [(None, "column")], "sum", dims=[(None, dims["column"])])
