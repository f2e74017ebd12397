"""Data as TensorFlow has it: `tf.data`, sparse and ragged tensors."""

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from keras import layers
from support.models import arrays, pair
from support.parity import difference, variables

from keras_multigpu import make_parallel

ROWS, BATCH = 70, 16


def _dataset():
    return tf.data.Dataset.from_tensor_slices(arrays(ROWS)).batch(BATCH)


@pytest.mark.parametrize("repeated", [False, True])
def test_datasets(repeated):
    plain, parallel = pair()
    data = _dataset().repeat() if repeated else _dataset()
    options = {"steps_per_epoch": 5} if repeated else {"validation_data": _dataset()}
    histories = [
        model.fit(data, shuffle=False, epochs=2, verbose=0, **options).history
        for model in (plain, parallel)
    ]
    assert difference(*histories) < 2e-5
    assert difference(variables(plain), variables(parallel)) < 2e-5
    logs = [model.evaluate(_dataset(), verbose=0) for model in (plain, parallel)]
    assert difference(*logs) < 2e-5
    outputs = [model.predict(_dataset(), verbose=0) for model in (plain, parallel)]
    assert difference(*outputs) < 2e-5
    assert len(outputs[0]) == ROWS


def test_what_follows_sparse_rows_is_spread():
    """One device adds up what the rows name, and the gradient of that."""
    rng = np.random.default_rng(5)
    dense = rng.normal(size=(ROWS, 30)) * (rng.random((ROWS, 30)) < 0.1)
    dense[3] = 0.0  # a row of which nothing is named
    x, y, models = scipy.sparse.csr_matrix(dense), rng.normal(size=(ROWS, 2)), []
    for n in (1, 3):
        keras.utils.set_random_seed(3)
        first, *others = layers.Dense(8, "relu", name="first"), layers.Dense(64), layers.Dense(2)
        models.append(
            make_parallel(keras.Sequential([keras.Input((30,), sparse=True), first, *others]), n)
        )
        models[-1].compile("adam", "mse", jit_compile=False)
        models[-1].fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    assert difference(*map(variables, models)) < 2e-5
    _, _, table = models[1].explain().partition("train_step")
    kinds = {line.split()[-1] for line in table.splitlines()[2:]}
    assert {"SegmentSum", "GatherV2"} <= kinds
    assert "MatMul" not in kinds


def test_sparse_tensors():
    def build():
        keras.utils.set_random_seed(3)
        return keras.Sequential([keras.Input((30,), sparse=True), layers.Dense(2)])

    rng = np.random.default_rng(5)
    dense = rng.normal(size=(ROWS, 30)) * (rng.random((ROWS, 30)) < 0.1)
    x, y = tf.sparse.from_dense(dense.astype("float32")), rng.normal(size=(ROWS, 2))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    plain, parallel = pair(build)
    for model in (plain, parallel):
        model.fit(dataset, epochs=2, shuffle=False, verbose=0)
    assert difference(variables(plain), variables(parallel)) < 2e-5
    outputs = [model.predict(dataset.map(lambda x, y: x), verbose=0) for model in (plain, parallel)]
    assert difference(*outputs) < 2e-5
    for rows in (1, 3, 5):
        part = tf.sparse.slice(x, [0, 0], [rows, 30])
        assert difference(np.asarray(plain(part)), np.asarray(parallel(part))) < 2e-5


class MeanOfRagged(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, inputs):
        if isinstance(inputs, tf.RaggedTensor):
            inputs = tf.reduce_mean(inputs, axis=1)[:, None]
        return self.dense(inputs[:, :1])


def test_ragged_tensors():
    def build():
        keras.utils.set_random_seed(3)
        return MeanOfRagged()

    rng = np.random.default_rng(5)
    x = tf.ragged.constant([rng.normal(size=n).tolist() for n in rng.integers(1, 5, ROWS)])
    dataset = tf.data.Dataset.from_tensor_slices((x, arrays(ROWS)[1])).batch(BATCH)
    plain, parallel = pair(build)
    for model in (plain, parallel):
        model.fit(dataset, epochs=2, shuffle=False, verbose=0)
    assert difference(variables(plain), variables(parallel)) < 2e-5
    assert difference(*(model.evaluate(dataset, verbose=0) for model in (plain, parallel))) < 2e-5
    inputs = dataset.map(lambda x, y: x)
    with pytest.warns(UserWarning, match="100% of a predict step .* ragged rows in 'the inputs'"):
        outputs = [model.predict(inputs, verbose=0) for model in (plain, parallel)]
    assert difference(*outputs) < 2e-5
    assert len(outputs[1]) == ROWS
