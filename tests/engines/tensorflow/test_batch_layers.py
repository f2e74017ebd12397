"""Slicing and merging where the number of rows is not known, and of sparse and ragged tensors."""

import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from support.parity import difference

from keras_multigpu.layers import BatchMerge, BatchSlice


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_the_same_inside_a_function_of_unknown_rows(rows):
    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def there_and_back(whole):
        return BatchMerge()(BatchSlice(4)(whole), whole=whole)

    x = np.arange(2.0 * rows, dtype="float32").reshape(rows, 2)
    assert difference(there_and_back(x), x) == 0


def test_sparse_and_ragged_tensors():
    matrix = scipy.sparse.random(9, 5, 0.3, "coo", random_state=1, dtype="float32")
    indices = np.stack([matrix.row, matrix.col], axis=1)
    sparse = tf.sparse.reorder(tf.SparseTensor(indices, matrix.data, matrix.shape))
    slices = BatchSlice(4)(sparse)
    assert [tuple(part.shape) for part in slices] == [(3, 5), (2, 5), (2, 5), (2, 5)]
    merged = BatchMerge()(slices, whole=sparse)
    assert difference(tf.sparse.to_dense(merged), matrix.toarray()) == 0

    ragged = tf.ragged.constant([[1], [2, 3], [], [4, 5, 6], [7]])
    slices = BatchSlice(3).call(ragged)
    assert [part.to_list() for part in slices] == [[[1], [2, 3]], [[], [4, 5, 6]], [[7]]]
    assert BatchMerge().call(slices, whole=ragged).to_list() == ragged.to_list()


def test_inputs_of_different_lengths():
    join = tf.function(BatchSlice(2), input_signature=[[tf.TensorSpec([None])] * 2])
    with pytest.raises(tf.errors.InvalidArgumentError, match="same number of rows"):
        join([np.zeros(4, "float32"), np.zeros(3, "float32")])
