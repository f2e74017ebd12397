"""Tables in parts that a step only looks rows up in: their rows cross, and the tables don't."""

import keras
import numpy as np
import pytest
from keras import layers
from support.parity import difference, variables

from keras_multigpu import make_parallel, reports
from keras_multigpu.reports.loads import find_busiest

_HEIGHT, _UNITS = 4096, 8


class Tied(keras.Model):
    """Uses its table for lookups, and whole."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(_HEIGHT, _UNITS)

    def call(self, words):
        found = self.table(words)[:, 0]
        return keras.ops.matmul(found, keras.ops.transpose(self.table.embeddings[:5]))


class Clipped(layers.Layer):
    """Looks up the last row for what the table hasn't."""

    def build(self, shape):
        self.table = self.add_weight(shape=(_HEIGHT, _UNITS), name="table")

    def call(self, words):
        return self.table.value.at[words * 2].get(mode="clip")


def _flat(*tables, dtype=None):
    words = keras.Input((3,), dtype="int32")
    made = [layers.Flatten()(table(words)) for table in tables]
    made = layers.Concatenate()(made) if len(made) > 1 else made[0]
    return keras.Model(words, layers.Dense(5, dtype=dtype)(made))


def _twice():
    table = layers.Embedding(_HEIGHT, _UNITS)
    return _flat(table, table)


MODELS = {
    "rows": lambda: _flat(layers.Embedding(_HEIGHT, _UNITS)),
    "columns": lambda: _flat(layers.Embedding(_HEIGHT + 1, _UNITS)),
    "twice": _twice,
    "half": lambda: _flat(layers.Embedding(_HEIGHT, _UNITS, dtype="mixed_bfloat16")),
    "remade": lambda: _flat(layers.Embedding(_HEIGHT, _UNITS), layers.Embedding(_HEIGHT, _UNITS)),
    "clipped": lambda: _flat(Clipped()),
    "tied": Tied,
}


def _both(name, shard="weights"):
    for n in (1, 4):
        keras.utils.set_random_seed(1)
        model = make_parallel(MODELS[name](), n, shard=shard if n > 1 else None)
        model.compile("adam", "mse")
        yield model


def _data(rng, rows):
    words = rng.integers(0, _HEIGHT, (rows, 3))
    words[0] = words[1]  # whose gradients add up
    return words, rng.normal(size=(rows, 5))


def _sent(parallel, batch):
    report = reports.transfers(parallel, batch)
    return [sum(report.bytes(step).values()) for step in ("training", "prediction")]


@pytest.mark.filterwarnings("ignore:Each device updates all rows")
@pytest.mark.parametrize("shard", ["weights", None])
@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_of_one_device(name, shard, rng):
    """The last batch has 7 rows, which 4 devices don't share."""
    x, y = _data(rng, 39)
    found = []
    for model in _both(name, shard):
        logs = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
        made = [model.predict(x, verbose=0), model.evaluate(x, y, verbose=0)]
        found.append([logs, *variables(model), *made])
    assert difference(*found) < (1e-2 if name == "half" else 1e-5)


@pytest.mark.parametrize("rows", [16, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [*list(MODELS)[:4], pytest.param("clipped", marks=pytest.mark.slow)]
)
def test_only_rows_cross(name, rows, rng):
    _, parallel = _both(name)
    assert max(_sent(parallel, _data(rng, rows))) < _HEIGHT * _UNITS * 4 / 2


@pytest.mark.parametrize("name", ["rows", "twice", "tied"])
def test_only_rows_of_a_gradient_cross(name, rng):
    """Each device has the tables, and what the others have looked up."""
    _, parallel = _both(name, None)
    assert max(_sent(parallel, _data(rng, 16))) < _HEIGHT * _UNITS * 4 / 2


def test_advice_counts_rows(rng):
    model = MODELS["rows"]()
    model.compile("adam", "mse")
    x, y = _data(rng, 16)
    known = {"step_seconds": 1.0, "link": "pcie4", "inputs": x}
    (found,) = reports.advise(model, 16, [4], modes=["data"], **known).predictions
    counted = reports.transfers(make_parallel(model, 4), (x, y))
    moved = find_busiest([one for one in counted.training if one.kind != "inputs"], duplex=True)
    assert found.load.traffic.sent == pytest.approx(moved.sent, rel=0.5)


def test_a_gradient_of_more_rows_than_the_table_has_crosses_as_a_sum(rng):
    words = keras.Input((40,), dtype="int32")
    pooled = layers.GlobalAveragePooling1D()(layers.Embedding(512, _UNITS)(words))
    parallel = make_parallel(keras.Model(words, layers.Dense(5)(pooled)), 4)
    parallel.compile("adam", "mse")
    batch = rng.integers(0, 512, (16, 40)), rng.normal(size=(16, 5))
    assert reports.transfers(parallel, batch).bytes("training")["gradients"] > 512 * _UNITS * 4


class Integers(layers.Layer):
    """Looks up integers, which have another value for what the table hasn't."""

    def build(self, shape):
        options = {"dtype": "uint8", "initializer": "ones", "trainable": False}
        self.table = self.add_weight(shape=(_HEIGHT,), **options)

    def call(self, words):
        return keras.ops.cast(keras.ops.take(self.table, words, axis=0), "float32")


def test_a_table_of_integers_gives_what_one_device_gives():
    words = np.array([[1, 2, _HEIGHT + 3]] * 16)
    found = []
    for n in (1, 4):
        model = keras.Sequential([keras.Input((3,), dtype="int32"), Integers()])
        model = make_parallel(model, n, shard="weights" if n > 1 else None)
        found.append(model.predict(words, verbose=0))
    np.testing.assert_array_equal(*found)


def test_a_table_that_is_used_whole_crosses(rng):
    _, parallel = _both("tied")
    assert min(_sent(parallel, _data(rng, 16))) > _HEIGHT * _UNITS * 4 / 2


def test_a_table_of_which_more_is_looked_up_than_it_has_crosses(rng):
    words = keras.Input((_HEIGHT,), dtype="int32")
    pooled = layers.GlobalAveragePooling1D()(layers.Embedding(_HEIGHT, _UNITS)(words))
    parallel = make_parallel(keras.Model(words, layers.Dense(5)(pooled)), 4, shard="weights")
    parallel.compile("adam", "mse")
    x = rng.integers(0, _HEIGHT, (8, _HEIGHT))
    report = reports.transfers(parallel, (x, rng.normal(size=(8, 5))))
    assert report.bytes("training")["weights"] >= _HEIGHT * _UNITS * 4


@pytest.mark.parametrize("name", ["rows", "columns"])
def test_rows_that_the_table_has_not(name, rng):
    """They are NaN, as JAX gives on one device; numbers below zero count from the end."""
    x = np.array([[-1, 2, 3], [4, _HEIGHT + 9, 6], [7, 8, -_HEIGHT], [1, 1, 1]] * 4)
    plain, parallel = (model.predict(x, verbose=0) for model in _both(name))
    assert np.isnan(plain).any(1).sum() == 4
    np.testing.assert_allclose(plain, parallel, atol=1e-6)
