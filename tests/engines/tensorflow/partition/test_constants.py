"""Shape arithmetic: each operation against itself, for several numbers of rows."""

import types

import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.constants import (
    EVALUATE,
    constant_of,
    evaluate,
    numbers_of,
)
from keras_multigpu.engines.tensorflow.partition.signatures import static_dims
from keras_multigpu.engines.tensorflow.partition.sizes import BATCH, Dim

raw = tf.raw_ops
ROWS = (0, 1, 2, 3, 7)


def _n(x):
    return tf.shape(x)[0]


# {type: functions of a tensor of (rows, 3, 1)}
DECIDED = {
    "Add": [lambda x: raw.Add(x=tf.shape(x), y=2)],
    "AddV2": [lambda x: tf.shape(x) + tf.shape(x)[0]],
    "Sub": [lambda x: tf.shape(x) - 1],
    "Mul": [lambda x: tf.shape(x) * tf.shape(x)[::-1]],
    "FloorDiv": [lambda x: _n(x) * 4 // 2, lambda x: tf.constant([7, -7]) // 2],
    "FloorMod": [lambda x: _n(x) * 4 % 2, lambda x: tf.constant([7, -7]) % 3],
    "Neg": [lambda x: -tf.shape(x)],
    "Maximum": [lambda x: tf.maximum(_n(x), 0), lambda x: tf.maximum(_n(x) + 1, [[0], [1]])],
    "Minimum": [lambda x: tf.minimum(_n(x) + 1, 0), lambda x: tf.minimum([3, 4], 3)],
    "Greater": [lambda x: tf.cast(tf.constant([3, 1]) > 2, tf.int32)],
    "GreaterEqual": [lambda x: tf.cast(tf.constant([3, 2, 1]) >= 2, tf.int32)],
    "Less": [lambda x: tf.cast(tf.constant([3, 1]) < 2, tf.int32)],
    "LessEqual": [lambda x: tf.cast(tf.constant([3, 2, 1]) <= 2, tf.int32)],
    "Equal": [lambda x: tf.cast(tf.equal(tf.constant([3, 2]), 2), tf.int32)],
    "NotEqual": [lambda x: tf.cast(tf.not_equal(tf.constant([3, 2]), 2), tf.int32)],
    "Select": [lambda x: tf.compat.v1.where(tf.constant(2) > 1, [0, 1], [1, 0])],
    "SelectV2": [lambda x: tf.where(tf.constant(2) > 1, [_n(x), 1], [1, 0])],
    "Max": [
        lambda x: tf.reduce_max([_n(x), _n(x)]),
        lambda x: tf.reduce_max([_n(x)]),
        lambda x: tf.reduce_max([3, 7]),
    ],
    "Identity": [lambda x: tf.identity(tf.shape(x))],
    "EnsureShape": [lambda x: tf.ensure_shape(tf.shape(x), [3])],
    "Cast": [
        lambda x: tf.cast(tf.shape(x), tf.int64),
        lambda x: tf.cast(tf.constant([3, 1]) > 2, tf.int32),
    ],
    "Pack": [lambda x: tf.stack([_n(x), 3]), lambda x: tf.stack([tf.shape(x), [1, 2, 3]], -1)],
    "ConcatV2": [
        lambda x: tf.concat([tf.shape(x), [4]], 0),
        lambda x: tf.concat([[[1], [2]], [[3], [4]]], -1),
    ],
    "ExpandDims": [
        lambda x: tf.expand_dims(tf.shape(x), 0),
        lambda x: tf.expand_dims(tf.shape(x), [-1]),
    ],
    "Squeeze": [
        lambda x: tf.squeeze(tf.shape(x)[:1]),
        lambda x: tf.squeeze(tf.reshape(tf.shape(x)[:1], [1, 1]), 0),
    ],
    "Reshape": [lambda x: tf.reshape(tf.shape(x), [3, -1])],
    "Transpose": [lambda x: tf.transpose(tf.stack([tf.shape(x), [1, 2, 3]]), [1, 0])],
    "Split": [lambda x: tf.split(tf.shape(x), 3), lambda x: tf.split([[1, 2], [3, 4]], 2, -1)],
    "SplitV": [
        lambda x: tf.split(tf.shape(x), [1, 2, 0]),
        lambda x: tf.split([[1, 2], [3, 4]], [-1, 1], 1),
    ],
    "StridedSlice": [
        lambda x: tf.shape(x)[1:],
        lambda x: tf.shape(x)[-1],
        lambda x: tf.shape(x)[::-1],
        lambda x: tf.shape(x)[:-1:2],
        lambda x: tf.stack([tf.shape(x), tf.shape(x)])[1, :2],
        lambda x: tf.shape(x)[-9:9],
    ],
    "Slice": [
        lambda x: tf.slice(tf.shape(x), [1], [-1]),
        lambda x: tf.slice(tf.shape(x), [0], [2]),
    ],
    "GatherV2": [
        lambda x: tf.gather(tf.shape(x), [2, 0]),
        lambda x: tf.gather([[1, 2], [3, 4]], [1], axis=-1),
    ],
    "Prod": [lambda x: tf.reduce_prod(tf.shape(x)), lambda x: tf.reduce_prod([[1, 2], [3, 4]])],
    "Sum": [lambda x: tf.reduce_sum(tf.shape(x))],
    "Fill": [lambda x: tf.fill([2, 2], _n(x))],
    "Range": [lambda x: tf.range(5), lambda x: tf.range(5, 0, -2), lambda x: tf.range(tf.rank(x))],
    "BroadcastGradientArgs": [
        lambda x: list(raw.BroadcastGradientArgs(s0=tf.shape(x), s1=[3, 1])),
        lambda x: list(raw.BroadcastGradientArgs(s0=[1, 3], s1=[2, 1, 3])),
    ],
    "BroadcastArgs": [lambda x: raw.BroadcastArgs(s0=[2, 1], s1=[1, 1, 4])],
    "InvertPermutation": [lambda x: tf.math.invert_permutation([2, 0, 1])],
    "Tile": [lambda x: tf.tile(tf.shape(x)[:1], [2])],
    "ListDiff": [lambda x: list(raw.ListDiff(x=[3, 1, 2], y=[1, 5]))],
    "Unpack": [
        lambda x: tf.unstack(tf.shape(x)),
        lambda x: tf.unstack(tf.constant([[1, 2], [3, 4]]), axis=-1),
    ],
    "ZerosLike": [lambda x: raw.ZerosLike(x=tf.shape(x))],
    "OnesLike": [lambda x: raw.OnesLike(x=tf.shape(x))],
    "ConcatOffset": [
        lambda x: list(raw.ConcatOffset(concat_dim=1, shape=[tf.shape(x), tf.shape(x)]))
    ],
    "DynamicStitch": [lambda x: tf.dynamic_stitch([[0, 2], [1, 2]], [tf.shape(x)[:2], [8, 9]])],
    "ParallelDynamicStitch": [
        lambda x: raw.ParallelDynamicStitch(indices=[[0, 2], [1]], data=[[7, 8], [9]])
    ],
    "Shape": [lambda x: raw.Shape(input=x, out_type=tf.int64)],
    "ShapeN": [lambda x: list(raw.ShapeN(input=[x, x[:, 0]]))],
    "Size": [lambda x: raw.Size(input=x)],
    "Rank": [lambda x: raw.Rank(input=x)],
}
# What the polynomials don't decide: it must stay unknown.
UNDECIDED = [
    lambda x: tf.cast(_n(x) > 2, tf.int32),
    lambda x: tf.reduce_max([_n(x), 2]),
    lambda x: _n(x) // 2,
    lambda x: _n(x) % 2,
    lambda x: tf.maximum(_n(x), 2),
    lambda x: tf.minimum(_n(x) * _n(x), _n(x)),
    lambda x: tf.range(_n(x)),
    lambda x: raw.BroadcastArgs(s0=[_n(x)], s1=[_n(x) + 1]),
    lambda x: list(raw.BroadcastGradientArgs(s0=[_n(x)], s1=[3])),
    lambda x: tf.shape(x)[: _n(x)],
    lambda x: tf.reduce_sum([tf.shape(x), tf.shape(x)], 0),
    lambda x: tf.range(1000),
    lambda x: list(raw.ListDiff(x=[_n(x), 3], y=[3])),
]


def _evaluated(function):
    """The constants of a function's results: `None` for those that aren't known."""
    graph = (
        tf.function(function, autograph=False)
        .get_concrete_function(tf.TensorSpec([None, 3, 1]))
        .graph
    )
    known = {}
    for op in graph.get_operations():
        values = [known[id(one)] for one in op.inputs]
        constants = evaluate(op, values) or [None] * len(op.outputs)
        for tensor, const in zip(op.outputs, constants):
            dims = static_dims(tensor)
            if op.type == "Placeholder" or (tensor.dtype == tf.float32 and dims):
                dims = (Dim.symbol(BATCH), *dims[1:])
            known[id(tensor)] = types.SimpleNamespace(dims=dims, const=const)
    return [known[id(one)].const for one in graph.outputs]


def _numbers(const, rows):
    flat = [
        sum(f * rows ** len(key) for key, f in one.terms.items()) if isinstance(one, Dim) else one
        for one in const.flat
    ]
    return np.array(flat, np.int64).reshape(const.shape)


def test_every_operation_has_a_case():
    assert set(EVALUATE) <= set(DECIDED)


@pytest.mark.parametrize(
    ("kind", "function"), [(kind, one) for kind, many in DECIDED.items() for one in many]
)
def test_decided(kind, function):
    found = _evaluated(function)
    for rows in ROWS:
        expected = function(tf.zeros([rows, 3, 1]))
        if kind == "BroadcastGradientArgs" and rows == 1:
            continue  # an axis of one row is summed, or not: the same numbers
        for one, const in zip(expected if isinstance(expected, list) else [expected], found):
            assert const is not None
            np.testing.assert_array_equal(_numbers(const, rows), one.numpy())


@pytest.mark.parametrize("function", UNDECIDED)
def test_undecided(function):
    assert _evaluated(function) in ([None], [None, None])


def test_numbers():
    assert numbers_of(None) is None
    assert numbers_of(constant_of([1, Dim.symbol(BATCH)])) is None
    assert numbers_of(constant_of([[1, 2], [3, 4]])) == [1, 2, 3, 4]
