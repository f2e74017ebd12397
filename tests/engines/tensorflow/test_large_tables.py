"""Tables that one device has: of large ones only the rows that a batch names cross."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_multigpu import make_parallel, reports
from keras_multigpu.reports.loads import find_busiest

_ROWS, _UNITS = 3000, 4
_LARGE = 8 * _ROWS * _UNITS  # bytes, in float64


class Tied(keras.Model):
    """Uses its table for lookups, and whole."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(_ROWS, _UNITS)

    def call(self, words):
        found = self.table(words)
        return keras.ops.matmul(found, keras.ops.transpose(self.table.embeddings[:5]))


def _tables():
    """A large one; and a small one, which crosses."""
    word, letters = keras.Input((), dtype="int32"), keras.Input((6,), dtype="int32")
    large, small = layers.Embedding(_ROWS, _UNITS), layers.Embedding(40, 3)
    known = [large(word), layers.Flatten()(small(letters))]
    return keras.Model([word, letters], layers.Dense(5)(layers.Concatenate()(known)))


def _looked_up_twice():
    words = keras.Input((2,), dtype="int32")
    table = layers.Embedding(2 * _ROWS, _UNITS)
    both = layers.Concatenate()([table(words), table(words[:, ::-1])])
    return keras.Model(words, layers.Dense(5)(layers.Flatten()(both)))


MODELS = {"tables": _tables, "tied": Tied, "twice": _looked_up_twice}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.1, use_ema=True),
    "accumulated": lambda: keras.optimizers.RMSprop(0.01, gradient_accumulation_steps=2),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
}
_CASES = [
    *[(name, "adam", False) for name in MODELS],
    ("tables", "sgd", False),
    ("tables", "adam", True),
    ("tables", "adagrad", False),
    *[
        pytest.param("tables", one, False, marks=pytest.mark.slow)
        for one in ("momentum", "clipped", "accumulated")
    ],
    *[
        pytest.param("tables", one, True, marks=pytest.mark.slow)
        for one in ("sgd", "clipped", "adagrad")
    ],
]


def _data(name, rng, rows):
    words = rng.integers(0, _ROWS, rows)
    words[1:4] = words[0]  # whose gradients add up
    given = {
        "tables": [words, rng.integers(0, 40, (rows, 6))],
        "tied": words,
        "twice": np.stack([words, words[::-1]], 1),
    }
    return given[name], rng.normal(size=(rows, 5))


@pytest.mark.parametrize(("name", "optimizer", "compiled"), _CASES)
def test_the_numbers_of_one_device(name, optimizer, compiled, both, in_float64, rng):
    x, y = _data(name, rng, 23)

    def use(model):
        model.compile(OPTIMIZERS[optimizer](), "mse", jit_compile=compiled)
        model.fit(x, y, batch_size=7, epochs=2, shuffle=False, verbose=0)
        slots = [variable.numpy() for variable in model.optimizer.variables]
        return [*model.get_weights(), *slots, model.predict(x, batch_size=7, verbose=0)]

    for one, other in zip(*both(MODELS[name], use, n=3)):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shard", [None, "weights"])
def test_rows_that_are_divided_by_zeros(shard, in_float64, rng):
    """Keras then takes all rows whose divisors are zeros; those become NaN."""
    x, y = np.arange(9) * 7, rng.normal(size=(9, _UNITS))
    found = []
    for n in (1, 3):
        keras.utils.set_random_seed(1)
        table = layers.Embedding(100 * _UNITS, _UNITS)
        model = make_parallel(
            keras.Sequential([keras.Input((), dtype="int32"), table]), n, shard=shard
        )
        optimizer = keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.0, epsilon=0.0)
        model.compile(optimizer, "mse", jit_compile=False)
        model.fit(x, y, batch_size=9, verbose=0)
        found.append(model.get_weights()[0])
    assert np.isnan(found[0]).any(1).sum() == 100 * _UNITS - 9
    np.testing.assert_allclose(*found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adagrad"])
def test_only_rows_cross(optimizer, in_float64, rng):
    parallel = make_parallel(_tables(), 3)
    parallel.compile(OPTIMIZERS[optimizer](), "mse", jit_compile=False)
    found = reports.transfers(parallel, _data("tables", rng, 14))
    for step in ("training", "prediction"):
        sent = sum(found.bytes(step).values())
        assert 0 < sent < _LARGE / 4
    weights = [one.bytes for one in found.training if one.kind == "weights"]
    assert 8 * 40 * 3 in weights  # the small table


def test_a_table_whose_rows_are_not_few_crosses(in_float64, rng):
    words = keras.Input((200,), dtype="int32")
    pooled = layers.GlobalAveragePooling1D()(layers.Embedding(_ROWS, _UNITS)(words))
    parallel = make_parallel(keras.Model(words, layers.Dense(5)(pooled)), 2)
    parallel.compile("adam", "mse", jit_compile=False)
    batch = rng.integers(0, _ROWS, (16, 200)), rng.normal(size=(16, 5))
    found = reports.transfers(parallel, batch)
    assert _LARGE in [one.bytes for one in found.training if one.kind == "weights"]


def test_a_step_is_planned_for_the_batches_of_the_loop(rng):
    """And again if there are more rows than it is good for."""
    traces = []

    class Noting(layers.Embedding):
        def call(self, inputs):
            traces.append(1)
            return super().call(inputs)

    table = Noting(500, 4)
    parallel = make_parallel(keras.Sequential([table, layers.Dense(5)]), 2)
    parallel.compile("adam", "mse", jit_compile=False)
    x, y = rng.integers(0, 500, 650), rng.normal(size=(650, 5))
    expected = parallel._parallel_steps._partition.rows.expected
    found = []
    for size in (32, 64, 640, 32):
        parallel.fit(x, y, batch_size=size, verbose=0)
        found.append((expected["train"].rows, expected["train"].most, len(traces)))
        if size == 32:  # other steps have other rows
            parallel.predict(x[:10], batch_size=600, verbose=0)
            traces.clear()
    assert [one[:2] for one in found] == [(32, 500), (32, 500), (640, math.inf), (640, math.inf)]
    assert found[0][2] > 0
    assert [one[2] > 0 for one in found[1:]] == [False, True, True]
    parallel.evaluate(tf.data.Dataset.from_tensor_slices((x, y)).batch(32), verbose=0)
    assert expected["test"].rows == 2048  # not known


def test_a_row_that_the_table_has_not():
    """On processors TensorFlow refuses it, wherever it is looked up."""
    parallel = make_parallel(_tables(), 3)
    words = np.full(9, _ROWS)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"is not in \[0, 3000\)"):
        parallel.predict([words, np.zeros((9, 6), "int32")], verbose=0)


def test_advice_counts_rows(in_float64, rng):
    """What it predicts for the table's device is what crosses."""
    model = _tables()
    model.compile("adam", "mse", jit_compile=False)
    x, y = _data("tables", rng, 24)
    known = {"step_seconds": 1.0, "link": "pcie4", "inputs": x}
    (found,) = reports.advise(model, 24, [3], modes=["data"], **known).predictions
    counted = reports.transfers(make_parallel(model, 3), (x, y))
    moved = find_busiest(one for one in counted.training if one.kind != "inputs")
    assert found.load.traffic.sent == pytest.approx(moved.sent, rel=0.5)
    assert found.load.traffic.received == pytest.approx(moved.received, rel=0.5)
