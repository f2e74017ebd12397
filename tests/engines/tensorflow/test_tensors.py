"""Data as TensorFlow has it: `tf.data`, sparse and ragged tensors."""

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from keras import layers
from support.descent import share
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


WORDS = ["red", "green", "blue"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"output_sequence_length": 3},
        {"ngrams": 2},
        {"split": "character"},
        {"output_mode": "multi_hot"},
        {"output_mode": "count", "ngrams": 2},
        {"output_mode": "multi_hot", "split": "character"},
        {"output_mode": "tf_idf", "idf_weights": [1.0, 2.0, 3.0]},
    ],
    ids=str,
)
def test_what_follows_texts_is_spread(options):
    """One device splits the texts, and the rows of what that gives are split."""
    rng = np.random.default_rng(5)
    texts = np.array([" ".join(rng.choice(WORDS, rng.integers(5))) for _ in range(ROWS)])
    y, models = rng.normal(size=(ROWS, 2)), []
    for n in (1, 3):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((), dtype="string")
        x = layers.TextVectorization(vocabulary=WORDS, **options)(inputs)
        if "output_mode" not in options:
            x = layers.GlobalAveragePooling1D()(layers.Embedding(9, 8)(x))
        outputs = layers.Dense(2)(layers.Dense(64, "relu")(x))
        models.append(make_parallel(keras.Model(inputs, outputs), n))
        models[-1].compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        data = tf.data.Dataset.from_tensor_slices((texts, y)).batch(BATCH)
        models[-1].fit(data, epochs=2, shuffle=False, verbose=0)
    assert difference(*map(variables, models)) < 2e-5
    share = models[1].explain().partition("train_step: ")[2].partition("%")[0]
    assert float(share) > 90


@pytest.mark.parametrize("shape", [[-1, -1], [4, -1], [-1, 2]], ids=str)
def test_rows_of_texts_keep_their_places(shape):
    """Rows that are padded, cut, or of a number that is given."""

    class Padded(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, texts):
            words = tf.strings.to_number(tf.strings.split(texts))
            sizes = [None if one < 0 else one for one in shape]
            rows = words.to_tensor(-1.0, shape=sizes)
            return self.dense(tf.reduce_sum(rows, axis=1)[:, None]) + tf.reduce_max(rows)

    texts = tf.constant([" ".join(map(str, range(row % 4))) for row in range(7)])
    keras.utils.set_random_seed(3)
    plain = Padded()
    expected = plain(texts)
    parallel = make_parallel(plain, 3)
    assert difference(np.asarray(expected), np.asarray(parallel(texts))) < 2e-5
    predicted = [model.predict(texts, batch_size=7, verbose=0) for model in (plain, parallel)]
    assert difference(*predicted) < 2e-5


def test_characters_of_a_matrix_of_texts(rng):
    """They are as many rows as the matrix has texts."""

    class Lengths(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, texts):
            decoded = tf.raw_ops.UnicodeDecode(input=texts, input_encoding="UTF-8")
            rows = tf.RaggedTensor.from_row_splits(decoded.char_values, decoded.row_splits)
            sums = tf.reduce_sum(tf.cast(rows.to_tensor(), "float32"), axis=1) / 1000
            return self.dense(tf.reshape(sums, tf.shape(texts)))

    texts = tf.constant(rng.choice(["a", "bc", "", "def"], (7, 3)))
    keras.utils.set_random_seed(3)
    plain = Lengths()
    plain(texts)
    predicted = [
        model.predict(texts, batch_size=7, verbose=0) for model in (plain, make_parallel(plain, 3))
    ]
    assert difference(*predicted) < 2e-5


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
    outputs = [model.predict(inputs, verbose=0) for model in (plain, parallel)]
    assert difference(*outputs) < 2e-5
    assert len(outputs[1]) == ROWS


class LastOfPadded(keras.Model):
    """An LSTM over ragged rows, padded with zeros that it does not see."""

    def __init__(self):
        super().__init__()
        self.words = layers.Embedding(20, 8, mask_zero=True)
        self.lstm, self.dense = layers.LSTM(8), layers.Dense(2)

    def call(self, inputs):
        padded = inputs.to_tensor() if isinstance(inputs, tf.RaggedTensor) else inputs
        return self.dense(self.lstm(self.words(padded)))


@pytest.mark.parametrize("is_static", [False, True])
def test_padded_ragged_rows_are_rows_of_the_batch(is_static):
    def build():
        keras.utils.set_random_seed(3)
        model = LastOfPadded()
        model(np.ones((2, 3), "int32"))
        return model

    rng = np.random.default_rng(5)
    x = tf.ragged.constant([rng.integers(1, 20, n).tolist() for n in rng.integers(1, 5, ROWS)])
    dataset = tf.data.Dataset.from_tensor_slices((x, arrays(ROWS)[1]))
    dataset = dataset.batch(BATCH, drop_remainder=is_static)
    plain, parallel = pair(build)
    for model in (plain, parallel):
        model.fit(dataset, epochs=2, shuffle=False, verbose=0)
    assert difference(variables(plain), variables(parallel)) < 2e-5
    assert share(parallel.explain()) > 99


def test_ragged_rows_of_another_number():
    """Labels of flat values: `fit` knows only in a step that they are not as many as the rows."""

    def build():
        keras.utils.set_random_seed(3)
        x = keras.Input((None,), dtype="int32", ragged=True)
        padded = layers.Lambda(lambda x: x.to_tensor(), output_shape=lambda shape: shape)(x)
        y = layers.LSTM(2, return_sequences=True)(layers.Embedding(20, 8)(padded))
        flat = layers.Lambda(
            lambda both: tf.boolean_mask(both[1], tf.sequence_mask(both[0].row_lengths())),
            output_shape=lambda shapes: (None, 2),
        )
        return keras.Model(x, flat([x, y]))

    rng = np.random.default_rng(5)
    batches = []
    for lengths in ([3, 1, 2, 4], [1, 1, 1], [2, 5]):
        rows = [rng.integers(1, 20, n).tolist() for n in lengths]
        batches.append((tf.ragged.constant(rows), rng.normal(size=(sum(lengths), 2))))
    signature = (tf.RaggedTensorSpec([None, None], tf.int32), tf.TensorSpec([None, 2], tf.float64))
    dataset = tf.data.Dataset.from_generator(lambda: batches, output_signature=signature)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))
    plain, parallel = pair(build)
    for model in (plain, parallel):
        model.fit(dataset, epochs=2, shuffle=False, verbose=0)
    assert difference(variables(plain), variables(parallel)) < 2e-5
