"""Slicing and merging, alone."""

import keras
import numpy as np
import pytest
from support.parity import difference

from keras_multigpu.layers import BatchMerge, BatchSlice
from keras_multigpu.layers.batch import slice_bounds


@pytest.mark.parametrize("num_slices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 33])
def test_bounds_cover_every_row_once_in_order(rows, num_slices):
    bounds = [slice_bounds(rows, index, num_slices) for index in range(num_slices)]
    covered = [row for start, size in bounds for row in range(start, start + size)]
    assert covered == list(range(rows))
    sizes = [size for _, size in bounds]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_no_slice_is_empty_and_merging_restores_the_batch(rows):
    whole = {"x": np.arange(2.0 * rows).reshape(rows, 2), "y": [np.arange(rows)]}
    slices = BatchSlice(4)(whole)
    assert [part["x"].shape[0] for part in slices] == [max(1, len(p)) for p in _split(rows)]
    merged = BatchMerge()(slices, whole=whole)
    assert difference(merged, whole) == 0


def test_what_is_no_list_of_slices():
    with pytest.raises(ValueError, match="(?s)must have a list of slices.*Put it into a list"):
        BatchMerge()(np.ones((3, 2)))


def _split(rows):
    return np.array_split(np.arange(rows), 4)


def test_masks_go_along():
    embedded = keras.layers.Embedding(5, 2, mask_zero=True)(np.array([[1, 0], [2, 3], [4, 0]]))
    slices = BatchSlice(2)(embedded)
    assert np.asarray(slices[0]._keras_mask).tolist() == [[True, False], [True, True]]
    merged = BatchMerge()(slices, whole=embedded)
    assert difference(merged._keras_mask, embedded._keras_mask) == 0


def test_a_scalar_goes_into_every_slice():
    slices = BatchSlice(2)([np.zeros((4, 1)), np.array(3.0)])
    assert [float(part[1]) for part in slices] == [3.0, 3.0]


def test_in_a_functional_model_saved_and_loaded(tmp_path):
    inputs = keras.Input((3,))
    dense = keras.layers.Dense(2)
    merged = BatchMerge()([dense(part) for part in BatchSlice(2)(inputs)], whole=inputs)
    model = keras.Model(inputs, merged)
    assert model.output_shape == (None, 2)
    x = np.ones((5, 3), "float32")
    assert difference(model.predict(x, verbose=0), np.asarray(dense(x))) < 1e-6
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert difference(loaded.predict(x, verbose=0), model.predict(x, verbose=0)) < 1e-6
    assert BatchSlice.from_config(BatchSlice(3).get_config()).num_slices == 3


@pytest.mark.parametrize("count", [0, -1, 2.0, True, None])
def test_a_wrong_number_of_slices(count):
    with pytest.raises(ValueError, match=r"`num_slices` must be a positive.*num_slices=") as error:
        BatchSlice(count)
    assert repr(count) in str(error.value)


def test_an_output_without_a_batch_axis():
    with pytest.raises(ValueError, match="must have a batch axis.*a scalar.*`add_loss`"):
        BatchMerge()([np.array(1.0), np.array(2.0)], whole=np.zeros((2, 1)))


def test_inputs_of_different_lengths():
    with pytest.raises(ValueError, match="same number of rows.*of 4, 3 rows"):
        BatchSlice(2)([np.zeros((4, 1)), np.zeros((3, 1))])
    with pytest.raises(ValueError, match="at least one tensor with a batch axis"):
        BatchSlice(2)([np.array(1.0)])
