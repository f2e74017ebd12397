"""The label along which an operation is split."""

import pytest
import tensorflow as tf

from keras_multigpu.engines.tensorflow.partition.layouts import WHOLE, Split, Value
from keras_multigpu.engines.tensorflow.partition.signatures import Signature, split_label
from keras_multigpu.engines.tensorflow.partition.sizes import Dim, unit_of

pytestmark = pytest.mark.backend_free
B = Dim.symbol("batch")


def choose(values, signature, dims):
    return split_label(
        values, signature, dims, lambda dim: None if dim is None else unit_of(dim, B)
    )


def _value(dims, axis=None):
    return Value(tf.float32, dims, WHOLE if axis is None else Split(axis))


def _free(dims):
    return Value(tf.float32, dims, make=lambda layout: None)


KEEPS = Signature([("a", "b"), ("a", "b")], [("a", "b")])


@pytest.mark.parametrize(
    ("values", "signature", "dims", "expected"),
    [
        ([_value((B, 2), 0), _value((B, 2), 0)], KEEPS, [(B, 2)], "a"),
        ([_value((B, 2), 0), _value((B, 2))], KEEPS, [(B, 2)], "a"),
        ([_value((B, 2)), _value((B, 2))], KEEPS, [(B, 2)], None),  # nothing is split yet
        ([_value((B, 2)), _free((B, 2))], KEEPS, [(B, 2)], "a"),
        ([_value((B, B), 0), _value((B, B), 1)], KEEPS, [(B, B)], "a"),
        ([_value((B, B), 1), _value((B, B), 1)], KEEPS, [(B, B)], "b"),
        ([_value((2 * B, 2), 0), _value((2 * B, 2), 0)], KEEPS, [(2 * B, 2)], "a"),
        ([_value((B, 2), 0), _value((2, 2))], KEEPS, [(B, 2)], None),  # another size
        ([_value((B, 2), 0), _value((1, 2))], KEEPS, [(B, 2)], None),
        ([_value((B, 2), 0), _value((Dim.symbol("size0"), 2))], KEEPS, [(B, 2)], None),
        ([_value((B, 2), 0), _value((B, 2), 0)], KEEPS, [(None, 2)], None),  # an unknown result
        ([_value((B, 2), 0)], Signature([("a", "b")], [("b",)]), [(2,)], None),  # no addends
        ([_value((B, 2), 0)], Signature([("a", "b")], [("b",)], "sum"), [(2,)], "a"),
        ([_value((B, B), 0)], Signature([("a", "b")], [("b",)], "sum"), [(B,)], "a"),
        ([_value((B, 2), 0)], Signature([(None, "b")], [(None, "b")]), [(B, 2)], None),
        ([_value((2, B), 1)], Signature([("a", "b")], [("a", "b")]), [(2, 2 * B)], None),
        (
            [_value((2, B), 1)],
            Signature([("a", "b")], [("a", "b")], regroups=True),
            [(2, 2 * B)],
            "b",
        ),
        ([_value((2, B), 1)], Signature([("a", "b")], [("a", "b")], regroups=True), [(2, 5)], None),
        ([_value((B,), 0)], Signature([("a",)], [("a",)], shapes={0: 0}), [(B,)], None),
    ],
)
def test_choice(values, signature, dims, expected):
    assert choose(values, signature, dims) == expected
